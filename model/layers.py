"""The parts of a decoder block.

Dimensions, as suffixes: B batch, L length, D embed, N query heads, K key/value heads, H head_dim, F mlp.
Activations are in the compute dtype, parameters in the parameter dtype; kernels are cast where they are used,
inside the block, so that what is gathered over fsdp is the smaller copy.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from configs.schema import Model
from model.attention import attend
from parallel.sharding import constrain


def saveable(x: jax.Array, name: str, *axes: str) -> jax.Array:
    """Marks a tensor that a block may save: its logical sharding and its activation name, together.

    The one door for both, so that whatever a plan can name has a known sharding. Call it on the value in the
    compute dtype: a name after an upcast would save twice the bytes.
    """
    return checkpoint_name(constrain(x, *axes), name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def project(spec: str, x: jax.Array, kernel: jax.Array, gradient_dtype: str, out_dtype=None) -> jax.Array:
    """`einsum(spec, x, kernel)` with the kernel cast to x's dtype and its gradient summed in `gradient_dtype`.

    The gradient of a kernel is a sum over the whole batch, hence over devices. Differentiating the cast would
    reduce it across devices in the compute dtype; asking the product itself for float32 makes the partial
    sums, and so the reduction, float32.
    """
    return jnp.einsum(spec, x, kernel.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)


def _project_forward(spec, x, kernel, gradient_dtype, out_dtype):
    return project(spec, x, kernel, gradient_dtype, out_dtype), (x, kernel)


def _project_backward(spec, gradient_dtype, out_dtype, residuals, g):
    x, kernel = residuals
    left, right, out = spec.replace("->", ",").split(",")
    g = g.astype(x.dtype)
    sum_dtype = jnp.promote_types(gradient_dtype, x.dtype)
    dx = jnp.einsum(f"{out},{right}->{left}", g, kernel.astype(x.dtype), preferred_element_type=x.dtype)
    dkernel = jnp.einsum(f"{left},{out}->{right}", x, g, preferred_element_type=sum_dtype)
    return dx, dkernel.astype(kernel.dtype)


project.defvjp(_project_forward, _project_backward)


def dropout(x: jax.Array, rate: float, key: jax.Array, site: int, deterministic: bool) -> jax.Array:
    """Zeroes a share `rate` of x and scales the rest by 1 / (1 - rate). `site` tells calls with one key apart."""
    if deterministic or rate == 0:
        return x
    keep = jax.random.bernoulli(jax.random.fold_in(key, site), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def rotate(x_BLNH: jax.Array, positions_BL: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (RoFormer, arXiv:2104.09864): pairs (i, i + H/2) turned by position * theta^(-2i/H)."""
    half = x_BLNH.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies
    first, second = jnp.split(x_BLNH.astype(jnp.promote_types(x_BLNH.dtype, jnp.float32)), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BLNH.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last dimension, in float32 (arXiv:1910.07467)."""

    epsilon: float
    param_dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The scale is whole on every device: it is small, and gathering it would cost a collective.
        init = nn.with_logical_partitioning(nn.initializers.ones, (None,))
        scale: Any = self.param("scale", init, (x.shape[-1],), jnp.dtype(self.param_dtype))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale).astype(x.dtype)


class Kernel(nn.Module):
    """A matrix product over the dimensions that x and the kernel share in `spec`, such as 'BLD,DNH->BLNH'.

    The kernel starts as truncated normal of variance scale / (size of the shared dimensions).
    """

    spec: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    param_dtype: str
    gradient_dtype: str
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        left, right, _ = self.spec.replace("->", ",").split(",")
        shared = [i for i, dim in enumerate(right) if dim in left]
        fan_in = math.prod(self.shape[i] for i in shared)
        normal = nn.initializers.truncated_normal(math.sqrt(self.scale / fan_in))
        init = nn.with_logical_partitioning(normal, self.axes)
        kernel = self.param("kernel", init, self.shape, jnp.dtype(self.param_dtype))
        return project(self.spec, x, kernel, self.gradient_dtype)


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    config: Model
    gradient_dtype: str

    @nn.compact
    def __call__(self, x_BLD, positions_BL, segment_ids_BL):
        c = self.config
        kernel = functools.partial(Kernel, param_dtype=c.param_dtype, gradient_dtype=self.gradient_dtype)
        queries, keys = (c.embed_dim, c.num_heads, c.head_dim), (c.embed_dim, c.num_kv_heads, c.head_dim)
        q_BLNH = kernel("BLD,DNH->BLNH", queries, ("embed", "heads", "head_dim"), name="query")(x_BLD)
        k_BLKH = kernel("BLD,DKH->BLKH", keys, ("embed", "kv_heads", "head_dim"), name="key")(x_BLD)
        v_BLKH = kernel("BLD,DKH->BLKH", keys, ("embed", "kv_heads", "head_dim"), name="value")(x_BLD)
        q_BLNH = saveable(q_BLNH, "q", "batch", "length", "heads", "head_dim")
        k_BLKH = saveable(k_BLKH, "k", "batch", "length", "kv_heads", "head_dim")
        v_BLKH = saveable(v_BLKH, "v", "batch", "length", "kv_heads", "head_dim")
        if c.qk_norm:
            q_BLNH = RMSNorm(c.norm_epsilon, c.param_dtype, name="query_norm")(q_BLNH)
            k_BLKH = RMSNorm(c.norm_epsilon, c.param_dtype, name="key_norm")(k_BLKH)
        q_BLNH = rotate(q_BLNH, positions_BL, c.rope_theta)
        k_BLKH = rotate(k_BLKH, positions_BL, c.rope_theta)
        context_BLNH = attend(q_BLNH, k_BLKH, v_BLKH, segment_ids_BL, c.attention_kernel, c.sliding_window)
        out = kernel("BLNH,NHD->BLD", (c.num_heads, c.head_dim, c.embed_dim), ("heads", "head_dim", "embed"),
                     scale=0.5 / c.num_layers, name="out")  # fmt: skip
        return saveable(out(context_BLNH), "attention_out", "batch", "length", "embed")


class MLP(nn.Module):
    """Gated (SwiGLU, GeGLU: arXiv:2002.05202) or plain GELU feed-forward."""

    config: Model
    gradient_dtype: str

    @nn.compact
    def __call__(self, x_BLD):
        c = self.config
        kernel = functools.partial(Kernel, param_dtype=c.param_dtype, gradient_dtype=self.gradient_dtype)
        wide = functools.partial(kernel, "BLD,DF->BLF", (c.embed_dim, c.mlp_dim), ("embed", "mlp"))
        hidden_BLF = saveable(wide(name="up")(x_BLD), "up", "batch", "length", "mlp")
        if c.activation == "gelu":
            hidden_BLF = nn.gelu(hidden_BLF)
        else:
            gate_BLF = saveable(wide(name="gate")(x_BLD), "gate", "batch", "length", "mlp")
            hidden_BLF = hidden_BLF * (nn.silu if c.activation == "swiglu" else nn.gelu)(gate_BLF)
        down = kernel("BLF,FD->BLD", (c.mlp_dim, c.embed_dim), ("mlp", "embed"), scale=0.5 / c.num_layers, name="down")
        return saveable(down(hidden_BLF), "mlp_out", "batch", "length", "embed")


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Add an argument where you like: `model.stack` finds `deterministic` by its name.
    """

    config: Model
    gradient_dtype: str = "float32"

    @nn.compact
    def __call__(self, x_BLD, layer, key, positions_BL, segment_ids_BL, deterministic):
        """One layer of the stack.

        Args:
          x_BLD: the residual stream. `layer`: this layer's index, an int32 scalar.
          key: dropout key of the step, one for all layers; None where there is no dropout.
          deterministic: a Python bool; True turns dropout off.
        """
        c = self.config
        if key is not None:
            # Folded with the layer, not drawn by make_rng: masks must not depend on how layers are segmented.
            key = jax.random.fold_in(key, layer)
        x_BLD = saveable(x_BLD, "block_input", "batch", "length", "embed")
        normed = RMSNorm(c.norm_epsilon, c.param_dtype, name="attention_norm")(x_BLD)
        y_BLD = Attention(c, self.gradient_dtype, name="attention")(normed, positions_BL, segment_ids_BL)
        x_BLD = x_BLD + dropout(y_BLD, c.dropout_rate, key, 0, deterministic)
        normed = RMSNorm(c.norm_epsilon, c.param_dtype, name="mlp_norm")(x_BLD)
        y_BLD = MLP(c, self.gradient_dtype, name="mlp")(normed)
        x_BLD = x_BLD + dropout(y_BLD, c.dropout_rate, key, 1, deterministic)
        return constrain(x_BLD, "batch", "length", "embed")
