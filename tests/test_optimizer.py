"""AdamW against its formula, the schedule, and what decays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.schema import Optimizer
from optimizer import decay_mask, make_optimizer, schedule
from tests import tiny


def test_the_schedule_warms_up_to_the_peak_and_ends_at_its_fraction():
    settings = Optimizer(learning_rate=1.0, warmup_steps=10, final_learning_rate_fraction=0.1)
    rate = schedule(settings, 110)
    np.testing.assert_allclose([rate(0), rate(5), rate(10), rate(60), rate(110)], [0, 0.5, 1, 0.55, 0.1], rtol=1e-6)


@pytest.mark.parametrize("warmup, steps", [(0, 1), (1, 1), (5, 5), (0, 10)])
def test_the_schedule_is_finite_at_its_edges(warmup, steps):
    rates = [float(schedule(Optimizer(warmup_steps=warmup), steps)(i)) for i in range(steps + 2)]
    assert np.isfinite(rates).all()


def test_norm_scales_do_not_decay_though_the_scan_stacks_them_to_matrices():
    mask = decay_mask(tiny.program(model={"qk_norm": True}).abstract_state.params)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): m for path, m in jax.tree.leaves_with_path(mask)}
    assert {name for name, decays in flat.items() if not decays} == {
        "final_norm/scale", "block/attention_norm/scale", "block/mlp_norm/scale",
        "block/attention/query_norm/scale", "block/attention/key_norm/scale",
    }  # fmt: skip


def test_a_new_kind_of_parameter_must_be_put_in_a_list():
    with pytest.raises(ValueError, match="Add 'gain' to DECAYED or NOT_DECAYED"):
        decay_mask({"mlp": {"gain": jnp.ones(3)}})


def test_adamw_by_hand():
    """Clipped to a global norm of 1, moments with bias correction, decay scaled by the learning rate."""
    settings = Optimizer(
        learning_rate=0.1, warmup_steps=0, final_learning_rate_fraction=1.0, weight_decay=0.5, b1=0.8, b2=0.9, clip_norm=1.0
    )
    params = {"kernel": jnp.array([[1.0, -2.0]]), "scale": jnp.array([[3.0, 1.0]])}
    tx = make_optimizer(settings, 10)
    state = tx.init(params)
    expected = {k: np.array(v) for k, v in params.items()}
    moment = {k: np.zeros_like(v) for k, v in expected.items()}
    square = {k: np.zeros_like(v) for k, v in expected.items()}
    for t in (1, 2, 3):
        gradient = {"kernel": np.array([[3.0 * t, 4.0]]), "scale": np.array([[0.0, -2.0]])}
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for k, g in gradient.items():
            g = g / max(norm, 1.0)
            moment[k] = 0.8 * moment[k] + 0.2 * g
            square[k] = 0.9 * square[k] + 0.1 * g**2
            adam = (moment[k] / (1 - 0.8**t)) / (np.sqrt(square[k] / (1 - 0.9**t)) + 1e-8)
            expected[k] = expected[k] - 0.1 * (adam + (0.5 * expected[k] if k == "kernel" else 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)


def test_moments_are_split_like_their_parameters():
    state = tiny.program().abstract_state
    adam = next(s for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    for moment in (adam.mu, adam.nu):
        assert jax.tree.map(lambda a: a.sharding, moment) == jax.tree.map(lambda a: a.sharding, state.params)
    assert state.params["block"]["mlp"]["up"]["kernel"].sharding.spec == jax.P(None, "fsdp", "tensor")
