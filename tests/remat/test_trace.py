"""What is read off the trace of a model."""

import jax
import jax.numpy as jnp
import pytest

from remat.trace import matmul_flops
from tests import tiny


def _by_hand(config):
    """Forward: two FLOPs for each weight of a product and token, and 4 x length x heads x head_dim for attention."""
    m = config.model
    attention = m.embed_dim * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    mlp = m.embed_dim * m.mlp_dim * (2 if m.activation == "gelu" else 3)
    scores = 2 * config.context_length * m.num_heads * m.head_dim
    per_token = 2 * (m.num_layers * (attention + mlp + scores) + m.embed_dim * m.vocab_size)
    return 3 * per_token * config.global_batch_size * config.context_length


@pytest.mark.parametrize(
    "changes",
    [{}, {"model": {"activation": "gelu", "tie_embeddings": True}}, {"gradient_accumulation": 2}, {"loss": {"chunk_length": 4}},
     {"model": {"dropout_rate": 0.1, "num_kv_heads": 4}}, {"remat": {"plan": "none"}}],
    ids=str,
)  # fmt: skip
def test_model_flops_are_those_of_the_formula(changes):
    program = tiny.program(**changes)
    assert program.model_flops == _by_hand(program.config)


def _flops(function, *shapes):
    return matmul_flops(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)).jaxpr)


def test_products_are_found_wherever_they_are():
    product = 2 * 3 * 4 * 5
    assert _flops(jnp.dot, (3, 4), (4, 5)) == product
    assert _flops(jax.jit(jnp.dot), (3, 4), (4, 5)) == product
    assert _flops(jax.checkpoint(jnp.dot), (3, 4), (4, 5)) == product
    assert _flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (7, 3, 4), (7, 4, 5)) == 7 * product
    scan = lambda a, b: jax.lax.scan(lambda c, _: (c, a @ b), 0.0, None, length=6)[1]  # noqa: E731
    assert _flops(scan, (3, 4), (4, 5)) == 6 * product
    with pytest.raises(ValueError, match="a while loop has products"):
        _flops(lambda a: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ a, a), (3, 3))
