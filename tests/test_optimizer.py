"""Optimizers against their formulas and against an unstacked model, schedules, what decays, how the state is split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.schema import Optimizer
from optimizer import STACKED, decay_mask, make_optimizer, per_layer, schedule
from tests import tiny


def test_the_schedule_warms_up_to_the_peak_and_ends_at_its_fraction():
    settings = Optimizer(learning_rate=1.0, warmup_steps=10, final_learning_rate_fraction=0.1)
    rate = schedule(settings, 110)
    np.testing.assert_allclose([rate(0), rate(5), rate(10), rate(60), rate(110)], [0, 0.5, 1, 0.55, 0.1], rtol=1e-6)


def test_the_linear_schedule_is_a_line_from_the_peak_to_its_fraction():
    rate = schedule(Optimizer(schedule="linear", learning_rate=1.0, warmup_steps=10, final_learning_rate_fraction=0.2), 110)
    np.testing.assert_allclose(
        [rate(0), rate(5), rate(10), rate(60), rate(110), rate(200)], [0, 0.5, 1, 0.6, 0.2, 0.2], rtol=1e-6
    )


def test_wsd_stays_at_the_peak_and_falls_over_the_last_steps():
    settings = Optimizer(
        schedule="wsd", learning_rate=1.0, warmup_steps=10, decay_fraction=0.4, final_learning_rate_fraction=0.0
    )
    rate = schedule(settings, 100)
    np.testing.assert_allclose([rate(i) for i in (0, 10, 59, 60, 80, 100)], [0, 1, 1, 1, 0.5, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup, steps", [(0, 1), (1, 1), (5, 5), (0, 10), (9, 5)])
@pytest.mark.parametrize("fraction", [0.001, 1.0])
def test_the_schedule_is_sound_at_its_edges(kind, warmup, steps, fraction):
    settings = Optimizer(schedule=kind, learning_rate=1.0, warmup_steps=warmup, decay_fraction=fraction)
    rates = np.array([float(schedule(settings, steps)(i)) for i in range(max(warmup, steps) + 3)])
    assert np.isfinite(rates).all() and rates.min() >= 0 and rates.max() <= 1
    assert rates[max(steps, warmup + 1)] == pytest.approx(settings.final_learning_rate_fraction)


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
        updates, state = tx.update(jax.tree.map(jnp.float32, gradient), state, params)
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


# Against a model that is not stacked

MODEL = {"num_layers": 3, "embed_dim": 128, "mlp_dim": 256, "qk_norm": True}  # large enough for Adafactor to factor
NO_CLIP = {"clip_norm": 0.0, "warmup_steps": 0, "schedule": "linear", "final_learning_rate_fraction": 1.0}


def _random(tree, seed):
    """Normal numbers; those of each layer of another size, so that what mixes layers shows."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        a = rng.normal(size=leaf.shape)
        sizes = 10.0 ** np.arange(leaf.shape[0]).reshape(-1, *[1] * (a.ndim - 1)) if path[0].key == STACKED else 1.0
        return jnp.asarray(a * sizes, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def _unstacked(tree):
    """The same parameters as a model without a scan would have them: one tree a layer."""
    layers = {f"layer_{i}": jax.tree.map(lambda a, i=i: a[i], tree[STACKED]) for i in range(MODEL["num_layers"])}
    return layers | {k: v for k, v in tree.items() if k != STACKED}


def _plain_muon(settings):
    """Which parameter is what, written down by hand."""
    numbers = optax.contrib.MuonDimensionNumbers
    first, first_two = lambda rank: numbers((0,), tuple(range(1, rank))), numbers((0, 1), (2,))
    matrices = {"query": first(3), "key": first(3), "value": first(3), "out": first_two, "up": first(2), "gate": first(2),
                "down": first(2)}  # fmt: skip
    rows_and_columns = {"query": (128, 32), "key": (128, 16), "value": (128, 16), "out": (32, 128), "up": (128, 256),
                        "gate": (128, 256), "down": (256, 128)}  # fmt: skip
    is_matrix = lambda path: path[0].key.startswith("layer_") and path[-2].key in matrices  # noqa: E731
    by_path = jax.tree_util.tree_map_with_path
    labels = lambda tree: by_path(lambda path, _: "muon" if is_matrix(path) else "adam", tree)  # noqa: E731
    muon = optax.contrib.scale_by_muon(
        beta=settings.momentum, weight_dimension_numbers=lambda tree: by_path(lambda path, _: matrices[path[-2].key], tree)
    )
    size = lambda path, u: u * 0.2 * max(rows_and_columns[path[-2].key]) ** 0.5  # noqa: E731
    muon = optax.chain(muon, optax.stateless(lambda u, _: by_path(size, u)))
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(settings.b1, settings.b2, settings.epsilon)}, labels)


PLAIN = {
    "adamw": lambda s: optax.scale_by_adam(s.b1, s.b2, s.epsilon),
    "adafactor": lambda s: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=32), optax.clip_by_block_rms(1.0)),
    "muon": _plain_muon,
}


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("name", PLAIN)
def test_a_stacked_model_is_updated_as_an_unstacked_one_value_by_value(name, clip):
    settings = Optimizer(**NO_CLIP | {"name": name, "learning_rate": 0.1, "weight_decay": 0.5, "clip_norm": clip})
    decays = lambda tree: jax.tree_util.tree_map_with_path(lambda p, _: "norm" not in jax.tree_util.keystr(p), tree)  # noqa: E731
    plain = optax.chain(
        optax.clip_by_global_norm(clip) if clip else optax.identity(), PLAIN[name](settings),
        optax.add_decayed_weights(0.5, mask=decays), optax.scale(-0.1),
    )  # fmt: skip
    tx = make_optimizer(settings, 10)
    shapes = tiny.program(model=MODEL).abstract_state.params
    params = _random(shapes, 0)
    expected = _unstacked(params)
    state, plain_state = tx.init(params), plain.init(expected)
    for seed in (1, 2, 3):
        gradients = _random(shapes, seed)
        updates, state = jax.jit(tx.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = jax.jit(plain.update)(_unstacked(gradients), plain_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), _unstacked(params), expected)


def test_muon_by_hand():
    """Nesterov's momentum with bias correction, five Newton-Schulz steps, the size of Adam's updates."""
    tx = make_optimizer(Optimizer(**NO_CLIP | {"name": "muon", "learning_rate": 1.0, "weight_decay": 0.0}), 10)
    params = {STACKED: {"up": {"kernel": jnp.zeros((1, 4, 6))}}}
    state, momentum = tx.init(params), np.zeros((4, 6))
    for t in (1, 2):
        gradient = np.random.default_rng(t).normal(size=(4, 6))
        updates, state = tx.update({STACKED: {"up": {"kernel": jnp.asarray(gradient, jnp.float32)[None]}}}, state, params)
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.95 * momentum / (1 - 0.95 ** (t + 1)) + 0.05 * gradient / (1 - 0.95**t)
        x /= np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        expected = -0.2 * np.sqrt(6) * x
        np.testing.assert_allclose(updates[STACKED]["up"]["kernel"][0], expected, rtol=1e-3, atol=1e-4)
        assert 0.1 < np.sqrt(np.mean(expected**2)) < 0.3


def test_adafactor_by_hand():
    """Second moments as the outer product of means of rows and columns, the update clipped to a root mean square of 1."""
    tx = make_optimizer(Optimizer(**NO_CLIP | {"name": "adafactor", "learning_rate": 1.0, "weight_decay": 0.0}), 10)
    shape = (128, 130)
    params = {STACKED: {"up": {"kernel": jnp.zeros((1, *shape))}}}
    state, row, column = tx.init(params), np.zeros(128), np.zeros(130)
    for t in (0, 1):
        gradient = np.random.default_rng(t).normal(size=shape) * np.linspace(0.1, 3, 130)
        updates, state = tx.update({STACKED: {"up": {"kernel": jnp.asarray(gradient, jnp.float32)[None]}}}, state, params)
        decay = 1 - (t + 1.0) ** -0.8
        row = decay * row + (1 - decay) * np.mean(gradient**2, axis=1)
        column = decay * column + (1 - decay) * np.mean(gradient**2, axis=0)
        update = gradient / np.sqrt(np.outer(row, column) / row.mean())
        expected = -update / max(1.0, np.sqrt(np.mean(update**2)))
        np.testing.assert_allclose(updates[STACKED]["up"]["kernel"][0], expected, rtol=1e-3, atol=1e-5)


def test_a_kernel_whose_matrix_is_unknown_is_an_error():
    tx = per_layer(optax.identity())
    assert tx.init({STACKED: {"gain": jnp.ones((2, 3))}})  # any other transformation takes any parameter
    tx = make_optimizer(Optimizer(name="muon"), 10)
    params = {STACKED: {"router": {"kernel": jnp.ones((2, 3, 4))}}}
    with pytest.raises(ValueError, match="Add 'router' to SUMMED_DIMENSIONS in optimizer.py"):
        tx.update(params, tx.init(params), params)


# On a mesh


def _specs(program):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): a.sharding.spec
        for path, a in jax.tree_util.tree_leaves_with_path(program.abstract_state.opt_state)
    }


def test_factored_moments_are_split_like_the_dimensions_that_they_have():
    specs = _specs(tiny.program(model=MODEL, optimizer={"name": "adafactor"}))
    state = "1/0/0/{}/block/mlp/up/kernel"  # [layers, 128 (fsdp), 256 (tensor)]
    assert specs[state.format("v_row")] == jax.P(None, "fsdp")
    assert specs[state.format("v_col")] == jax.P(None, "tensor")
    assert specs[state.format("v")] == jax.P()
    assert specs["1/0/0/v/block/attention/query/kernel"] == jax.P(None, "fsdp", "tensor", None)  # too small to factor
    assert specs["1/0/0/count"] == jax.P()


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_a_step_on_a_mesh_is_that_of_one_device_and_no_large_state_is_whole(name):
    changes = {"model": MODEL, "optimizer": {"name": name}}
    # Muon has many collectives at a time; eight simulated devices on two cores have been seen to wait for each other in vain.
    mesh = {"data": 1, "fsdp": 2, "tensor": 1} if name == "muon" else {}
    split, alone = tiny.program(**changes, mesh=mesh), tiny.program(mesh={"data": 1, "fsdp": 1, "tensor": 1}, **changes)
    for path, a in jax.tree_util.tree_leaves_with_path(split.abstract_state.opt_state):
        whole = np.prod(a.sharding.shard_shape(a.shape)) == np.prod(a.shape)
        assert not whole or np.prod(a.shape) < 1000, jax.tree_util.keystr(path)
    states = []
    for program in (split, alone):
        state, step = program.init_state(), program.compile_train_step()
        for seed in (0, 1):
            state, values = step(state, tiny.batch(program, seed))
            assert np.isfinite(float(values["loss"]))
        states.append(jax.device_get(state.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *states)
