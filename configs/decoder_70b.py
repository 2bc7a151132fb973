"""A 70 B parameter decoder of the Llama-3 shape (arXiv:2407.21783), all devices on fsdp.

    python main.py --config=configs/decoder_70b.py --workdir=runs/70b \
        --config.data.source=text --config.data.path='books/**/*.txt' --config.data.tokenizer=tokenizer.json

Without those it trains on made-up text. The batch is one sequence for each of 512 devices.
No figure of a run yet: it has not been run on an accelerator.
"""

from configs.schema import Config, Data, Mesh, Model, Optimizer


def get_config() -> Config:
    return Config(
        steps=100_000,
        global_batch_size=512,
        context_length=4096,
        model=Model(
            num_layers=80,
            embed_dim=8192,
            mlp_dim=28_672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            rope_theta=500_000.0,
        ),
        mesh=Mesh(fsdp=-1),
        data=Data(source="synthetic"),
        optimizer=Optimizer(learning_rate=1.5e-4, warmup_steps=2000),
    )
