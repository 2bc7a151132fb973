"""Rules turn logical names into shardings, and a name without a rule is an error, never a silent copy."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from configs.schema import Rules
from parallel.sharding import constrain, on_mesh, sharding
from tests import tiny

MESH = tiny.program().mesh


@pytest.mark.parametrize(
    "names, spec",
    [
        (("embed", "mlp"), PartitionSpec("fsdp", "tensor")),
        (("layers", "embed", "heads", "head_dim"), PartitionSpec(None, "fsdp", "tensor", None)),
        (("batch", "length", "embed"), PartitionSpec(("data", "fsdp"), None, None)),  # fsdp is taken by the batch
        (("batch", "length", "vocab"), PartitionSpec(("data", "fsdp"), None, "tensor")),
        ((None, "embed"), PartitionSpec(None, "fsdp")),
    ],
)
def test_rules_in_order_of_precedence(names, spec):
    assert sharding(MESH, Rules(), *names).spec == spec
    shape = (8,) * len(names)
    with on_mesh(MESH, Rules()):
        text = jax.jit(lambda x: constrain(x, *names)).lower(jnp.zeros(shape)).as_text()
        out = jax.jit(lambda x: constrain(x, *names))(jnp.zeros(shape))
    assert "sharding_constraint" in text or "@Sharding" in text
    assert out.sharding.is_equivalent_to(sharding(MESH, Rules(), *names), len(names))


def test_a_rule_can_be_changed():
    assert sharding(MESH, Rules(embed="fsdp,data"), "embed", "mlp").spec == PartitionSpec(("fsdp", "data"), "tensor")
    assert sharding(MESH, Rules(mlp=""), "embed", "mlp").spec == PartitionSpec("fsdp", None)
    assert tiny.program(rules=Rules(mlp="")).abstract_state.params["block"]["mlp"]["up"]["kernel"].sharding.spec == (
        PartitionSpec(None, "fsdp", None)
    )


def test_a_name_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match="'embd' is not a logical axis"):
        sharding(MESH, Rules(), "embd")
    with on_mesh(MESH, Rules()), pytest.raises(ValueError, match="embd"):
        jax.eval_shape(lambda x: constrain(x, "embd"), jnp.zeros(8))


def test_as_many_names_as_dimensions():
    with pytest.raises(ValueError, match="1 logical names"):
        constrain(jnp.zeros((2, 2)), "batch")


def test_every_constraint_of_the_block_is_in_the_program():
    """Flax drops them all, silently, where it finds no mesh: nine names and the block's output, forward and recompute."""
    program = tiny.program()
    with program.on_mesh():
        step = jax.jit(program.train_step).lower(program.abstract_state, program.abstract_batch())
    text = step.as_text()
    assert text.count("sharding_constraint") + text.count("@Sharding") >= 20
