"""What can be configured: typed fields with their defaults. `configs/validation.py` has the checks.

A file in this folder returns a `Config` from `get_config()` and names only what differs from the
defaults here. Any field can be set on the command line: `--config.model.num_layers=4`. A field says
whose size it is where that could be mistaken: `global_batch_size` counts sequences over all devices.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

AXES = ("data", "fsdp", "tensor")
DTYPES = ("float32", "bfloat16", "float16", "float64")
SOURCES = ("stdlib", "text", "synthetic")
ACTIVATIONS = ("swiglu", "geglu", "gelu")
ATTENTION_KERNELS = ("auto", "splash", "cudnn", "xla")
OPTIMIZERS = ("adamw", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "wsd")


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
    sliding_window: int = 0  # positions that a token sees, itself included; 0: all before it
    attention_kernel: str = "auto"  # splash (TPU) | cudnn (GPU) | xla | auto: the one for the devices, where the sizes allow
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
    """What turns gradients into updates, after they are clipped by their global norm."""

    name: str = "adamw"  # adamw | adafactor | muon (on the matrices of the blocks, adamw on the rest)
    learning_rate: float = 3e-4  # at its highest
    schedule: str = "cosine"  # after the warmup: cosine | linear | wsd (constant, then a linear decay)
    warmup_steps: int = 100
    decay_fraction: float = 0.2  # wsd: the share of all steps, at the end, in which the learning rate falls
    final_learning_rate_fraction: float = 0.1  # of learning_rate, reached at the last step
    weight_decay: float = 0.1  # on matrices only
    b1: float = 0.9  # adamw's first moment
    b2: float = 0.95  # adamw's second moment
    momentum: float = 0.95  # muon's, in Nesterov's form
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
    """How text is sampled: at the end of training, and by --mode=generate."""

    prompt: str = "def "
    length: int = 0  # tokens; 0: no sample after training, and as many as the context holds in --mode=generate
    temperature: float = 0.7  # 0: always the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability (arXiv:1904.09751)
    seed: int = 0
    count: int = 1  # samples, each another one


@dataclass(slots=True)
class Profile:
    steps: tuple = ()  # (first, last): profile these steps and those between, into WORKDIR/profile


@dataclass(slots=True)
class Remat:
    plan: str = "auto"  # auto (by the memory that there is) | full | none | names:a,b,c | the path of a plan.json


@dataclass(slots=True)
class Memory:
    """The memory of each device that the plan may fill."""

    limit_gib: float = 0.0  # of every device; 0: what it reports, or its kind has
    limits_gib: str = ""  # of single devices, by global id: "3:9.5,5:8"
    reserve_gib: float = 0.25  # left free on every device
    offload: str = "checked"  # saved tensors on the host: checked (if gradients come out right here) | assumed | never
    host_limit_gib: float = 0.0  # of the host's memory, for each device; 0: what its kind of machine has
    plan_cache: bool = True  # keep peaks of compiled steps in the user's cache folder, so that a plan asked for again is quick
    save_hlo: bool = False  # write the compiled step's text to WORKDIR/train_step.hlo.txt


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
    memory: Memory = field(default_factory=Memory)
    profile: Profile = field(default_factory=Profile)


def field_names(node: Any, prefix: str = "") -> list[str]:
    """Dotted names of all leaves of a config, in the order in which they are declared."""
    names = []
    for f in dataclasses.fields(node):
        value = getattr(node, f.name)
        names += field_names(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else [prefix + f.name]
    return names


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """Size of each mesh axis as configured, outermost first."""
    return {axis: getattr(mesh, axis) for axis in AXES}


def mesh_axes(rules: Rules) -> dict[str, tuple[str, ...]]:
    """For each logical axis the mesh axes that split it, in order of precedence."""
    return {f.name: tuple(getattr(rules, f.name).split(",")) if getattr(rules, f.name) else () for f in
            dataclasses.fields(rules)}  # fmt: skip
