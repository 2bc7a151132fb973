"""What can be configured: typed fields with their defaults, and the checks that need no devices.

A file in this folder returns a `Config` from `get_config()` and names only what differs from the
defaults here. Any field can be set on the command line: `--config.model.num_layers=4`. A field says
whose size it is where that could be mistaken: `global_batch_size` counts sequences over all devices.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, cast

AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16", "float16", "float64")
SOURCES = ("stdlib", "text", "synthetic")
ACTIVATIONS = ("swiglu", "geglu", "gelu")


class InputError(Exception):
    """Bad input from the person who runs meshfit: `main.py` prints it without a traceback and exits with 2."""


@dataclass(slots=True)
class Model:
    """The decoder. Sizes are those of the whole model, not of a shard."""

    num_layers: int = 4
    embed_dim: int = 128
    mlp_dim: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2  # num_heads must be a multiple; equal: multi-head attention, 1: multi-query
    head_dim: int = 32
    vocab_size: int = 320  # rows of the embedding; at least the tokenizer's size
    activation: str = "swiglu"  # swiglu | geglu (both gated) | gelu
    qk_norm: bool = False  # RMSNorm over head_dim on queries and keys
    tie_embeddings: bool = False  # the head is the transposed embedding
    dropout_rate: float = 0.0  # after the embedding, attention and the MLP
    logit_soft_cap: float = 0.0  # cap * tanh(logits / cap); 0 is off
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"


@dataclass(slots=True)
class Mesh:
    """Devices by axis. One axis may be -1: all the devices that the others leave."""

    data: int = 1  # copies of the model
    fsdp: int = -1  # shards of the parameters, which also split the batch
    tensor: int = 1  # shards of every matrix product
    num_devices: int = 0  # use this many of the devices; 0: all, and the mesh must take all of them
    cpu_devices: int = 8  # devices to simulate in one process where JAX finds no accelerator


@dataclass(slots=True)
class Rules:
    """Which mesh axes split each logical axis: names joined by commas, or nothing for a whole copy everywhere.

    Within one array a mesh axis can split one dimension only; the field that stands first here wins. So
    `embed` splits parameters over fsdp, and is whole in activations, whose batch has fsdp already.
    """

    batch: str = "data,fsdp"
    length: str = ""
    vocab: str = "tensor"
    heads: str = "tensor"
    kv_heads: str = "tensor"
    mlp: str = "tensor"
    embed: str = "fsdp"
    head_dim: str = ""
    layers: str = ""


@dataclass(slots=True)
class Data:
    source: str = "stdlib"  # stdlib (source files of Python's standard library) | text | synthetic
    path: str = ""  # text: a glob, such as 'books/**/*.txt'
    tokenizer: str = "bytes"  # 'bytes', or the path of a Hugging Face tokenizer.json
    heldout_percent: float = 2.0  # of the documents, chosen by a hash of the document's name
    prefetch_batches: int = 2  # prepared ahead of the step, on the devices already


@dataclass(slots=True)
class Optimizer:
    """AdamW with warmup, cosine decay and clipping by global norm."""

    learning_rate: float = 3e-4  # at its highest
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1  # of learning_rate, reached at the last step
    weight_decay: float = 0.1  # on matrices only
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0  # 0 is off


@dataclass(slots=True)
class Loss:
    z_loss: float = 1e-4  # weight of log(Z)^2 (PaLM, arXiv:2204.02311, section 5)
    chunk_length: int = 512  # positions of each sequence whose logits exist at one time
    gradient_dtype: str = "float32"  # in which gradients are summed over devices and microbatches


@dataclass(slots=True)
class Evaluation:
    every_steps: int = 0  # besides the one after the last step; 0: only that
    batch_size: int = 0  # sequences over all devices; 0: a microbatch of training


@dataclass(slots=True)
class Checkpoint:
    every_steps: int = 1000  # the last step is saved in any case
    keep_last: int = 2
    keep_every_steps: int = 0  # steps that are multiples of it are kept for good; 0: none
    convert_dtype: bool = False  # allow reading parameters that were stored in another dtype


@dataclass(slots=True)
class Sample:
    """What is written at the end of training."""

    prompt: str = "def "
    length: int = 0  # tokens; 0: no sample
    temperature: float = 0.7


@dataclass(slots=True)
class Remat:
    plan: str = "full"  # full | none | names:a,b,c (the activation names that every block saves)


@dataclass(slots=True)
class Config:
    steps: int = 1000
    seed: int = 0
    global_batch_size: int = 16  # sequences in one step, over all devices and microbatches
    gradient_accumulation: int = 1  # microbatches in one step
    context_length: int = 256  # tokens in one sequence
    init_from: str = ""  # an existing checkpoint (or its workdir) to take the parameters from
    log_every_steps: int = 10
    model: Model = field(default_factory=Model)
    mesh: Mesh = field(default_factory=Mesh)
    rules: Rules = field(default_factory=Rules)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss: Loss = field(default_factory=Loss)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    sample: Sample = field(default_factory=Sample)
    remat: Remat = field(default_factory=Remat)


def field_names(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of all leaves of a config, in the order in which they are declared."""
    names = []
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        names += field_names(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else [prefix + f.name]
    return names


def check_types(node: Any, prefix: str = "") -> None:
    for f in dataclasses.fields(node):
        value, wanted = getattr(node, f.name), cast(type, f.type)
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, wanted):
                raise InputError(f"config.{prefix}{f.name} is {value!r}; it must be a configs.schema.{wanted.__name__}.")
            check_types(value, f"{prefix}{f.name}.")
            continue
        if wanted is float and type(value) is int:
            value = float(value)
            setattr(node, f.name, value)
        if type(value) is not wanted:
            raise InputError(
                f"config.{prefix}{f.name} is {value!r} ({type(value).__name__}); it must be of type {wanted.__name__}."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"config.{prefix}{f.name} is {value}; it must be a finite number.")


def _require(config: Config, names: str, allowed: str, holds) -> None:
    for name in names.split():
        node: Any = config
        for part in name.split("."):
            node = getattr(node, part)
        if not holds(node):
            raise InputError(f"config.{name} is {node!r}; it must be {allowed}.")


def validate(config: Config) -> None:
    """Checks whatever needs no devices. Raises `InputError` naming the field, its value and what is allowed."""
    if not isinstance(config, Config):
        raise InputError(f"get_config() returned a {type(config).__name__}; it must return a configs.schema.Config.")
    check_types(config)
    positive = (
        "steps global_batch_size gradient_accumulation context_length log_every_steps model.num_layers "
        "model.embed_dim model.mlp_dim model.num_heads model.num_kv_heads model.head_dim model.vocab_size "
        "model.rope_theta model.norm_epsilon mesh.cpu_devices data.prefetch_batches optimizer.learning_rate "
        "optimizer.epsilon loss.chunk_length checkpoint.every_steps checkpoint.keep_last"
    )
    not_negative = (
        "seed model.logit_soft_cap mesh.num_devices optimizer.warmup_steps optimizer.weight_decay "
        "optimizer.clip_norm loss.z_loss evaluation.every_steps evaluation.batch_size "
        "checkpoint.keep_every_steps sample.length sample.temperature"
    )
    _require(config, positive, "greater than 0", lambda v: v > 0)
    _require(config, not_negative, "0 or greater", lambda v: v >= 0)
    _require(config, "seed", "less than 2**32", lambda v: v < 2**32)
    _require(config, "model.dropout_rate optimizer.b1 optimizer.b2", "at least 0 and below 1", lambda v: 0 <= v < 1)
    _require(config, "optimizer.final_learning_rate_fraction", "between 0 and 1", lambda v: 0 <= v <= 1)
    _require(config, "data.heldout_percent", "above 0 and below 100", lambda v: 0 < v < 100)
    _require(config, "mesh.data mesh.fsdp mesh.tensor", "greater than 0, or -1", lambda v: v > 0 or v == -1)
    dtypes = "model.compute_dtype model.param_dtype loss.gradient_dtype"
    _require(config, dtypes, f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES)
    _require(config, "data.source", f"one of {', '.join(SOURCES)}", lambda v: v in SOURCES)
    _require(config, "model.activation", f"one of {', '.join(ACTIVATIONS)}", lambda v: v in ACTIVATIONS)
    _check_sizes(config)
    _check_rules(config.rules)
    plan = config.remat.plan
    if plan not in ("full", "none") and not (plan.startswith("names:") and all(plan[len("names:") :].split(","))):
        raise InputError(f"config.remat.plan is {plan!r}; it must be 'full', 'none' or 'names:a,b,c'.")
    if config.data.source == "text" and not config.data.path:
        raise InputError("config.data.path is empty; data.source='text' needs a glob, such as 'books/**/*.txt'.")


def _check_sizes(config: Config) -> None:
    model = config.model
    if model.num_heads % model.num_kv_heads:
        raise InputError(
            f"config.model.num_heads is {model.num_heads} and num_kv_heads {model.num_kv_heads}; "
            "num_heads must be a multiple of num_kv_heads, so that every key head serves equally many queries."
        )
    if model.head_dim % 2:
        raise InputError(f"config.model.head_dim is {model.head_dim}; rotary positions need an even number.")
    if config.global_batch_size % config.gradient_accumulation:
        raise InputError(
            f"config.global_batch_size is {config.global_batch_size} and gradient_accumulation "
            f"{config.gradient_accumulation}; the batch must split into that many equal microbatches."
        )
    if list(axis_sizes(config.mesh).values()).count(-1) > 1:
        raise InputError(f"config.mesh is {axis_sizes(config.mesh)}; only one axis may be -1.")


def _check_rules(rules: Rules) -> None:
    for name, axes in mesh_axes(rules).items():
        if not set(axes) <= set(AXES) or len(set(axes)) != len(axes):
            raise InputError(
                f"config.rules.{name} is {getattr(rules, name)!r}; it must name mesh axes out of "
                f"{', '.join(AXES)}, each at most once, joined by commas, or be empty."
            )


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Size of each mesh axis as configured, outermost first."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def mesh_axes(rules: Rules) -> dict[str, tuple[str, ...]]:
    """For each logical axis the mesh axes that split it, in order of precedence."""
    return {f.name: tuple(getattr(rules, f.name).split(",")) if getattr(rules, f.name) else () for f in
            dataclasses.fields(rules)}  # fmt: skip


def validate_on_mesh(config: Config, sizes: dict[str, int]) -> None:
    """Checks that everything that the mesh splits divides. `sizes`: devices on each axis, all known.

    Raises `InputError` with every size that does not divide, and by what.
    """
    rules = mesh_axes(config.rules)
    model = config.model
    microbatch = config.global_batch_size // config.gradient_accumulation
    checks = [
        ("global_batch_size / gradient_accumulation", "batch", microbatch),
        ("evaluation.batch_size", "batch", config.evaluation.batch_size or microbatch),
        ("context_length", "length", config.context_length),
        ("model.vocab_size", "vocab", model.vocab_size),
        ("model.num_heads", "heads", model.num_heads),
        ("model.num_kv_heads", "kv_heads", model.num_kv_heads),
        ("model.mlp_dim", "mlp", model.mlp_dim),
        ("model.embed_dim", "embed", model.embed_dim),
        ("model.head_dim", "head_dim", model.head_dim),
        ("model.num_layers", "layers", model.num_layers),
    ]
    problems = []
    for name, logical, size in checks:
        shards = math.prod(sizes[axis] for axis in rules[logical])
        if size % shards:
            split = " x ".join(f"{axis}={sizes[axis]}" for axis in rules[logical])
            problems.append(f"config.{name} = {size} does not divide by {shards} ({logical} is split over {split})")
    if problems:
        mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise InputError(
            f"The sizes do not fit the mesh {mesh}:\n  " + "\n  ".join(problems)
            + "\nChange those sizes, the mesh (config.mesh.*) or the rules (config.rules.*)."
        )  # fmt: skip
