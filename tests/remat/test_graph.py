"""What saving a name saves, held to formulas and to the programs that JAX makes of it."""

import itertools

import jax
import pytest
from jax.interpreters import partial_eval

from configs.schema import InputError
from device_kinds import NOMINAL
from model import layers
from model.stack import Segment
from program import Program
from remat import block
from remat.block import trace_block
from remat.graph import subsets
from remat.plan import check_plan
from remat.policies import searched_names
from remat.trace import matmul_flops
from tests import tiny

NAMES = ["q", "k", "v", "attention", "attention_out", "up", "gate"]

# On one of the 2 x 2 x 2 devices: two of eight rows, half of the heads and of the mlp.
ROWS, L, D, F, N, K, H = 2, 16, 32, 32, 2, 1, 8
TOKENS = ROWS * L
FLOPS = {
    "q": 2 * TOKENS * D * N * H, "k": 2 * TOKENS * D * K * H, "v": 2 * TOKENS * D * K * H, "scores": 2 * TOKENS * L * N * H,
    "attention": 2 * TOKENS * L * N * H, "attention_out": 2 * TOKENS * D * N * H, "up": 2 * TOKENS * D * F,
    "gate": 2 * TOKENS * D * F,
}  # fmt: skip
BYTES = {"input": TOKENS * D, "q": TOKENS * N * H, "k": TOKENS * K * H, "v": TOKENS * K * H, "attention": TOKENS * N * H,
         "attention_out": TOKENS * D, "up": TOKENS * F, "gate": TOKENS * F}  # fmt: skip


@pytest.fixture(scope="module")
def graph():
    return trace_block(tiny.program(), NOMINAL)


# Saved names -> what is computed again. The XLA form of attention needs its probabilities, hence the scores, in any case.
TABLE = {
    (): ["q", "k", "v", "scores", "attention", "attention_out", "up", "gate"],
    ("q",): ["k", "v", "scores", "attention", "attention_out", "up", "gate"],
    ("q", "k", "v"): ["scores", "attention", "attention_out", "up", "gate"],
    ("attention",): ["q", "k", "v", "scores", "attention_out", "up", "gate"],
    ("attention_out",): ["q", "k", "v", "scores", "attention", "up", "gate"],
    ("up", "gate"): ["q", "k", "v", "scores", "attention", "attention_out"],
    ("attention", "attention_out", "up", "gate"): ["q", "k", "v", "scores"],
    tuple(NAMES): ["scores"],
}


@pytest.mark.parametrize("saved, again", TABLE.items(), ids=lambda names: "+".join(names) or "nothing")
def test_recompute_and_saved_bytes_of_each_policy(graph, saved, again):
    need = graph.need(frozenset(saved))
    assert need.flops == sum(FLOPS[name] for name in again)
    assert need.saved_bytes == 4 * (BYTES["input"] + sum(BYTES[name] for name in saved))
    assert need.saved == frozenset(saved)


def _gradient_flops(save):
    """Of all products in the gradient of the loss, as JAX makes it, over all layers and devices."""
    program = Program(tiny.config(), tiny.program().mesh, (Segment(0, 3, save),))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), program.abstract_batch())
    loss = lambda params, batch: program.sums(params, batch, None, True)["nll"]  # noqa: E731
    with program.on_mesh():
        jaxpr = jax.make_jaxpr(jax.grad(loss))(program.abstract_state.params, batch).jaxpr
    return matmul_flops(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


@pytest.mark.parametrize("saved", [(), ("q",), ("attention",), ("up",), ("q", "k", "v", "attention"), tuple(NAMES)])
def test_the_program_that_jax_makes_computes_as_much_again(graph, saved):
    assert _gradient_flops(saved) - _gradient_flops(None) == 3 * 8 * graph.need(frozenset(saved)).flops


def test_names_that_save_nothing_are_told_apart_with_the_reason(graph):
    assert graph.names == ["block_input", *NAMES, "mlp_out"]
    assert graph.useful_names == NAMES
    assert graph.why_useless("mlp_out") == "the backward pass does not need it"
    assert graph.why_useless("block_input").startswith("the layer's input is kept anyway")


def test_of_too_many_names_those_that_save_the_most_for_their_bytes_are_searched(graph):
    assert searched_names(graph) == NAMES
    few = searched_names(graph, 3)
    assert len(few) == 3 and few == [n for n in NAMES if n in few]
    nothing = graph.need(frozenset()).seconds
    worth = {n: (nothing - graph.need(frozenset([n])).seconds) / graph.bytes_of(n) for n in NAMES}
    assert min(worth[n] for n in few) >= max(worth[n] for n in NAMES if n not in few)


def test_a_set_is_never_costlier_than_a_smaller_one(graph):
    for small, large in itertools.product(subsets(NAMES[:4]), repeat=2):
        if small < large:
            assert graph.need(large).seconds <= graph.need(small).seconds


def test_a_tensor_that_is_named_in_the_block_is_found_without_another_line(monkeypatch):
    def silu(x):
        return layers.saveable(x * jax.nn.sigmoid(x), "activation", "batch", "length", "mlp")

    monkeypatch.setattr(layers.nn, "silu", silu)
    found = trace_block(tiny.program(), NOMINAL)
    assert "activation" in found.useful_names
    assert found.bytes_of("activation") == 4 * BYTES["gate"]


def test_on_a_tpu_the_last_dimension_is_filled_up(graph, monkeypatch):
    monkeypatch.setattr(block, "LANES", {"cpu": 16})
    filled = trace_block(tiny.program(), NOMINAL)
    assert filled.bytes_of("q") == 2 * graph.bytes_of("q")  # heads of 8
    assert filled.bytes_of("attention_out") == graph.bytes_of("attention_out")  # 32 wide
    assert filled.bytes_of("up") == graph.bytes_of("up")  # 64, 32 on each of two devices


def test_a_tensor_that_loses_its_name_can_no_longer_be_planned(monkeypatch):
    plan = (Segment(0, 3, ("q", "up")),)
    check_plan(trace_block(tiny.program(), NOMINAL), plan)
    named = layers.saveable
    monkeypatch.setattr(layers, "saveable", lambda x, name, *axes: x if name == "up" else named(x, name, *axes))
    with pytest.raises(InputError, match="saves 'up', which no tensor of the block is called"):
        check_plan(trace_block(tiny.program(), NOMINAL), plan)


@pytest.mark.parametrize(
    "save, told",
    [
        (("mlp_out",), "'mlp_out' in vain: the backward pass does not need it"),
        (("q", "block_input"), "'block_input' in vain: the layer's input is kept anyway"),
    ],
)
def test_a_name_that_saves_nothing_is_refused(graph, save, told):
    with pytest.raises(InputError, match=told):
        check_plan(graph, (Segment(0, 3, save),))


def test_a_name_that_saves_nothing_beside_the_others_is_refused(monkeypatch):
    """Two names for one tensor: whoever saves the later one does not need the earlier one."""
    named = layers.saveable

    def twice(x, name, *axes):
        return named(named(x, "up_again", *axes), name, *axes) if name == "up" else named(x, name, *axes)

    monkeypatch.setattr(layers, "saveable", twice)
    graph = trace_block(tiny.program(), NOMINAL)
    check_plan(graph, (Segment(0, 3, ("up_again",)),))
    with pytest.raises(InputError, match="'up_again' in vain: beside the other names"):
        check_plan(graph, (Segment(0, 3, ("up", "up_again")),))
