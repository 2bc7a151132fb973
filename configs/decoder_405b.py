"""A 405 B parameter decoder of the Llama-3 shape (arXiv:2407.21783), for a whole TPU v5p pod.

    python main.py --config=configs/decoder_405b.py --workdir=runs/405b --mode=plan --topology=v5p:16x20x28

The batch is one sequence for every four of 8,960 devices, 18 M tokens: each four share their matrices (tensor), 64 times
four share the parameters (fsdp), and there are 35 copies (data). On other numbers of devices change
--config.global_batch_size with them.
No figure of a run yet: it has not been run on an accelerator.
"""

from configs.schema import Config, Data, Mesh, Model, Optimizer


def get_config() -> Config:
    return Config(
        steps=200_000,
        global_batch_size=2240,
        context_length=8192,
        model=Model(
            num_layers=126,
            embed_dim=16_384,
            mlp_dim=53_248,
            num_heads=128,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            rope_theta=500_000.0,
        ),
        mesh=Mesh(data=-1, fsdp=64, tensor=4),
        data=Data(source="synthetic"),
        optimizer=Optimizer(learning_rate=8e-5, warmup_steps=8000),
    )
