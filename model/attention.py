"""Causal attention within segments, by the kernel for the devices at hand.

Dimensions, as suffixes: B batch, L length, N query heads, K key/value heads, H head_dim.

A kernel that keeps its scores on the chip (splash, cuDNN) has a backward pass of its own, which needs the context
and the log-sum-exp of the scores. Both are named "attention" inside its forward pass: named outside, the context
would be saved and the kernel would still run again for the other.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks

from configs.schema import InputError, Model, Rules
from parallel.sharding import constrain

NAME = "attention"
_Q_AXES = ("batch", "length", "heads", "head_dim")
_KV_AXES = ("batch", "length", "kv_heads", "head_dim")
_SPLASH_BLOCKS = (512, 256, 128)  # positions at a time, the first that divides the length


def choose_kernel(model: Model, rules: Rules, length: int, platform: str) -> tuple[str, str]:
    """The kernel for `platform` ("tpu", "gpu", "cpu") and, where "auto" settled for less than the best, why.

    Raises InputError if a kernel is asked for that cannot work there.
    """
    best = {"tpu": "splash", "gpu": "cudnn"}.get(platform, "xla")
    wanted = best if model.attention_kernel == "auto" else model.attention_kernel
    problem = ""
    if wanted != "xla":
        if wanted == "splash" and length % min(_SPLASH_BLOCKS):
            problem = f"context_length {length} is no multiple of {min(_SPLASH_BLOCKS)}"
        elif wanted == "cudnn" and model.compute_dtype not in ("bfloat16", "float16"):
            problem = f"compute_dtype is {model.compute_dtype}, and the kernel computes in bfloat16 or float16"
        elif wanted == "cudnn" and (model.head_dim % 8 or model.head_dim > 128):
            problem = f"head_dim {model.head_dim} is not a multiple of 8 up to 128"
        elif rules.length or rules.head_dim:
            problem = "rules.length or rules.head_dim split what the kernel needs whole"
    if model.attention_kernel == "auto":
        return ("xla", f"not {wanted}: {problem}") if problem else (wanted, "")
    if wanted not in ("xla", best):
        problem = f"the devices are {platform}"
    if problem:
        raise InputError(
            f"config.model.attention_kernel is {wanted!r}, but {problem}. Change that, or take 'auto' or 'xla' (which holds "
            "all scores of a layer in memory)."
        )
    return wanted, ""


def attend(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, kernel: str, window: int = 0, interpret: bool = False) -> jax.Array:
    """The context, as q_BLNH: each position attends to those before it and itself, in its own segment.

    Args:
      kernel: "splash" | "cudnn" | "xla", as `choose_kernel` says. N must be a multiple of K (arXiv:2305.13245).
      window: how many positions it sees, itself included; 0: all.
      interpret: runs splash without a TPU, slowly.
    """
    if kernel == "xla":
        left = None if window == 0 else (window - 1, 0)
        mask = _same_segment(segment_ids_BL)
        context = jax.nn.dot_product_attention(
            q_BLNH, k_BLKH, v_BLKH, mask=mask, is_causal=True, local_window_size=left, implementation="xla"
        )
        return checkpoint_name(constrain(context, *_Q_AXES), NAME)
    kernels: dict[str, Callable] = {"splash": functools.partial(_splash, interpret=interpret), "cudnn": _cudnn}
    on_shard: Callable = functools.partial(kernels[kernel], window=window)
    spec_q, spec_kv = (nn.logical_to_mesh_axes(axes) for axes in (_Q_AXES, _KV_AXES))
    if jax.sharding.get_abstract_mesh().empty:
        return on_shard(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)
    if spec_q != spec_kv:  # the shards of q and of k would hold heads that do not belong together
        k_BLKH, v_BLKH = (jnp.repeat(a, q_BLNH.shape[2] // a.shape[2], axis=2) for a in (k_BLKH, v_BLKH))
    rows = nn.logical_to_mesh_axes(("batch", "length"))
    run = jax.shard_map(on_shard, in_specs=(spec_q, spec_q, spec_q, rows), out_specs=spec_q, check_vma=False)
    return run(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL)


def _same_segment(segment_ids_BL):
    return segment_ids_BL[:, None, :, None] == segment_ids_BL[:, None, None, :]


def _splash(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, window: int, interpret: bool):
    """Splash attention: blocks that the mask leaves empty are skipped, forward and backward."""
    length, heads = q_BLNH.shape[1:3]
    block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
    blocks = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    mask = splash_masks.LocalMask((length, length), (window - 1 if window else None, 0), 0)
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=NAME,
        interpret=interpret,
    )
    # The kernel does not scale; scaled in float32, q is rounded once.
    wide = jnp.promote_types(q_BLNH.dtype, jnp.float32)
    q_BLNH = (q_BLNH.astype(wide) / math.sqrt(q_BLNH.shape[3])).astype(q_BLNH.dtype)
    heads_first = (jnp.swapaxes(a, 1, 2) for a in (q_BLNH, k_BLKH, v_BLKH))
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first, splash.SegmentIds(segment_ids_BL, segment_ids_BL)), 1, 2)


def _cudnn(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, window: int):
    """cuDNN's flash attention. The segments go in as a bias of B x L x L, for all heads together."""
    left = None if window == 0 else (window - 1, 0)

    def kernel(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, local_window_size=left, implementation="cudnn")

    return _with_named_residuals(kernel)(q_BLNH, k_BLKH, v_BLKH, _same_segment(segment_ids_BL))


def _with_named_residuals(kernel: Callable) -> Callable:
    """`kernel(q_BLNH, ...)`, whose context and log-sum-exp [B, N, L] are named where its forward pass keeps them."""

    @jax.custom_vjp
    def named(*inputs):
        return checkpoint_name(kernel(*inputs), NAME)

    def forward(*inputs):
        context, pullback = jax.vjp(kernel, *inputs)
        named_context = checkpoint_name(context, NAME)
        batch, length, heads, _ = context.shape

        def name(kept):  # by shape: the mask and the inputs are kept too, and must not be saved under this name
            is_sum = getattr(kept, "shape", None) == (batch, heads, length)
            return named_context if kept is context else checkpoint_name(kept, NAME) if is_sum else kept

        return named_context, jax.tree.map(name, pullback)

    named.defvjp(forward, lambda pullback, g: pullback(g))
    return named
