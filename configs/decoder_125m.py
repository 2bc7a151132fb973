"""A 0.1 B parameter decoder for one to eight devices.

    python main.py --config=configs/decoder_125m.py --workdir=runs/125m \
        --config.data.source=text --config.data.path='books/**/*.txt' --config.data.tokenizer=tokenizer.json

Without those it trains on made-up text. 109.5 M parameters, one table for embedding and head; 5 B tokens.
No figure of a run yet: it has not been run on an accelerator.
"""

from configs.schema import Config, Data, Mesh, Model, Optimizer


def get_config() -> Config:
    return Config(
        steps=20_000,
        global_batch_size=256,
        context_length=1024,
        model=Model(
            num_layers=12,
            embed_dim=768,
            mlp_dim=2048,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            vocab_size=32_000,
            tie_embeddings=True,
        ),
        mesh=Mesh(data=-1, fsdp=1),
        data=Data(source="synthetic"),
        optimizer=Optimizer(learning_rate=6e-4, warmup_steps=1000),
    )
