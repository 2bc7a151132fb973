"""The smallest run, for tests and for looking around.

    python main.py --config=configs/tiny.py --workdir=runs/tiny

Trains 0.1 M parameters for 20 steps on made-up text, on eight devices, in about ten seconds on two CPU cores.
The loss falls from about 6 to 2.5 nats a byte.
"""

from configs.schema import Checkpoint, Config, Data, Mesh, Model, Optimizer


def get_config() -> Config:
    return Config(
        steps=20,
        global_batch_size=8,
        context_length=64,
        model=Model(num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=16, compute_dtype="float32"),
        mesh=Mesh(data=-1, fsdp=2, tensor=2),
        data=Data(source="synthetic"),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=5),
        checkpoint=Checkpoint(every_steps=10),
    )
