"""One million parameters on the source files of Python's standard library, on eight devices.

python main.py --config=configs/default.py --workdir=runs/default     (or: make train)
"""

from configs.schema import Checkpoint, Config, Evaluation, Mesh, Model, Optimizer, Sample


def get_config() -> Config:
    return Config(
        steps=320,
        global_batch_size=16,
        context_length=256,
        model=Model(compute_dtype="float32"),
        mesh=Mesh(data=-1, fsdp=2, tensor=2),
        optimizer=Optimizer(learning_rate=3e-3, warmup_steps=20),
        evaluation=Evaluation(every_steps=160),
        checkpoint=Checkpoint(every_steps=80),
        sample=Sample(length=160),
    )
