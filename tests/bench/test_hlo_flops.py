"""FLOPs read off compiled programs against those of the trace."""

import jax
import jax.numpy as jnp
import pytest

from bench.hlo_flops import kernel_calls, matmul_flops
from model.stack import Segment
from program import Program
from remat.trace import matmul_flops as traced_flops
from tests import tiny


def test_loops_are_multiplied_out():
    def run(x, w):
        inner = lambda y, _: (y @ w, None)  # noqa: E731
        outer = lambda y, _: (jax.lax.scan(inner, jnp.tanh(y), length=5)[0], None)  # noqa: E731
        return jax.lax.scan(outer, x, length=7)[0]

    x = jnp.ones((8, 16)), jnp.ones((16, 16))
    assert matmul_flops(jax.jit(run).lower(*x).compile().as_text()) == 7 * 5 * 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    "segments", [(Segment(0, 3),), (Segment(0, 3, ("q", "up")),), (Segment(0, 1), Segment(1, 2, ("gate",)))]
)
def test_a_train_step_does_the_products_of_its_trace(segments):
    config = tiny.config(mesh={"data": 1, "fsdp": 1, "tensor": 1})
    program = Program(config, tiny.program(mesh={"data": 1, "fsdp": 1, "tensor": 1}).mesh, segments)
    with program.on_mesh():
        jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch()).jaxpr
    compiled = matmul_flops(program.compile_train_step().as_text())
    # The compiler drops what nobody needs, such as the product at the end of a block that is computed again.
    assert 0.9 * traced_flops(jaxpr) < compiled <= traced_flops(jaxpr)


CONVOLUTION = """
HloModule m
ENTRY %main (x: bf16[4,64,1], w: bf16[16,64,32]) -> bf16[4,32,16] {
  %x = bf16[4,64,1]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w = bf16[16,64,32]{2,1,0:T(8,128)(2,1)} parameter(1)
  %call = (bf16[4,64]{1,0}, f32[4]{0}) custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %c = bf16[4,32,16]{2,1,0} convolution(%x, %w), window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=bf0_0io->bf0
}
"""


def test_what_a_window_meets_in_the_padding_is_no_work():
    assert matmul_flops(CONVOLUTION) == 2 * 4 * 64 * 32 * 16
    assert kernel_calls(CONVOLUTION, "tpu_custom_call") == 1 and kernel_calls(CONVOLUTION, "splash") == 0
