"""A 0.75 B parameter decoder, all devices on fsdp.

    python main.py --config=configs/decoder_750m.py --workdir=runs/750m \
        --config.data.source=text --config.data.path='books/**/*.txt' --config.data.tokenizer=tokenizer.json

Without those it trains on made-up text. 886 M parameters with both tables, 0.75 B without. The batch is four
sequences for each of eight devices: on N devices, --config.global_batch_size=4N.
No figure of a run yet: it has not been run on an accelerator.
"""

from configs.schema import Config, Data, Mesh, Model, Optimizer


def get_config() -> Config:
    return Config(
        steps=40_000,
        global_batch_size=32,
        context_length=2048,
        model=Model(
            num_layers=16,
            embed_dim=2048,
            mlp_dim=5632,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32_000,
        ),
        mesh=Mesh(fsdp=-1),
        data=Data(source="synthetic"),
        optimizer=Optimizer(learning_rate=4e-4, warmup_steps=1000),
    )
