"""The checks of a config: whatever needs no devices, and what must divide on a mesh.

Every refusal is an `InputError` that names the field, what was given and what is allowed.
"""

import dataclasses
import math
from typing import Any, cast

from configs.schema import (
    ACTIVATIONS,
    ATTENTION_KERNELS,
    AXES,
    DTYPES,
    OPTIMIZERS,
    SCHEDULES,
    SOURCES,
    Config,
    InputError,
    Rules,
    axis_sizes,
    mesh_axes,
)


def check_types(node: Any, prefix: str = "") -> None:
    for f in dataclasses.fields(node):
        value, wanted = getattr(node, f.name), cast(type, f.type)
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, wanted):
                raise InputError(f"config.{prefix}{f.name} is {value!r}; it must be a configs.schema.{wanted.__name__}.")
            check_types(value, f"{prefix}{f.name}.")
            continue
        convert = {(float, int): float, (tuple, list): tuple}.get((wanted, type(value)))
        if convert:
            value = convert(value)
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
        "optimizer.epsilon loss.chunk_length checkpoint.every_steps checkpoint.keep_last sample.count"
    )
    not_negative = (
        "seed model.logit_soft_cap model.sliding_window mesh.num_devices optimizer.warmup_steps optimizer.weight_decay "
        "optimizer.clip_norm loss.z_loss evaluation.every_steps evaluation.batch_size "
        "checkpoint.keep_every_steps memory.limit_gib memory.reserve_gib memory.host_limit_gib "
        "sample.length sample.temperature sample.top_k sample.seed"
    )
    _require(config, positive, "greater than 0", lambda v: v > 0)
    _require(config, not_negative, "0 or greater", lambda v: v >= 0)
    _require(config, "seed sample.seed", "less than 2**32", lambda v: v < 2**32)
    below_one = "model.dropout_rate optimizer.b1 optimizer.b2 optimizer.momentum"
    _require(config, below_one, "at least 0 and below 1", lambda v: 0 <= v < 1)
    _require(config, "optimizer.final_learning_rate_fraction", "between 0 and 1", lambda v: 0 <= v <= 1)
    _require(config, "optimizer.decay_fraction sample.top_p", "above 0 and at most 1", lambda v: 0 < v <= 1)
    _require(config, "data.heldout_percent", "above 0 and below 100", lambda v: 0 < v < 100)
    _require(config, "mesh.data mesh.fsdp mesh.tensor", "greater than 0, or -1", lambda v: v > 0 or v == -1)
    dtypes = "model.compute_dtype model.param_dtype loss.gradient_dtype"
    choices = [
        (dtypes, DTYPES),
        ("data.source", SOURCES),
        ("model.activation", ACTIVATIONS),
        ("model.attention_kernel", ATTENTION_KERNELS),
        ("optimizer.name", OPTIMIZERS),
        ("optimizer.schedule", SCHEDULES),
        ("memory.offload", ("checked", "assumed", "never")),
    ]
    for names, allowed in choices:
        _require(config, names, f"one of {', '.join(allowed)}", lambda v, allowed=allowed: v in allowed)
    _check_sizes(config)
    _check_rules(config.rules)
    plan = config.remat.plan
    named = plan.startswith("names:") and all(plan[len("names:") :].split(","))
    if plan not in ("auto", "full", "none") and not named and not plan.endswith(".json"):
        raise InputError(
            f"config.remat.plan is {plan!r}; it must be 'auto', 'full', 'none', 'names:a,b,c' or the path of a plan.json."
        )
    if config.data.source == "text" and not config.data.path:
        raise InputError("config.data.path is empty; data.source='text' needs a glob, such as 'books/**/*.txt'.")
    steps = config.profile.steps
    if steps and not (len(steps) == 2 and all(type(s) is int for s in steps) and 0 < steps[0] <= steps[1]):
        raise InputError(
            f"config.profile.steps is {steps!r}; it must be the first and the last step to profile, such as (10, 13), or ()."
        )


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
