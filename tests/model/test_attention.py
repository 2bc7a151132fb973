"""Every attention kernel against the plain formula in float64: outputs, gradients, shards, what is saved, what is held."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from configs.schema import Config, InputError, Mesh, Model, Remat, Rules
from model import attention
from model.attention import attend, choose_kernel
from parallel.mesh import make_mesh
from parallel.sharding import on_mesh
from program import Program
from remat.topologies import absent_devices
from tests import tiny

RNG = np.random.default_rng(0)


def _plain(q, k, v, segments, window):
    """Softmax of the scores over the earlier positions of the same segment and window, all heads spelt out."""
    group, (length, head_dim) = q.shape[2] // k.shape[2], q.shape[1::2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    i, j = jnp.arange(length)[:, None], jnp.arange(length)
    seen = (j <= i) & (i - j < (window or length)) & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.where(seen, jnp.einsum("bqnh,bknh->bnqk", q, k) / head_dim**0.5, -jnp.inf)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, axis=-1), v)


def _inputs(batch, length, heads, kv_heads, head_dim, documents):
    q, g = RNG.normal(size=(2, batch, length, heads, head_dim))
    k, v = RNG.normal(size=(2, batch, length, kv_heads, head_dim))
    segments = np.sort(RNG.integers(1, documents + 1, size=(batch, length)), axis=1)
    return q, k, v, segments, g


def _with_gradients(function, q, k, v, g):
    out, pullback = jax.vjp(function, q, k, v)
    return out, *pullback(g)


def _compare(run, inputs, window, dtype, tolerance):
    q, k, v, segments, g = inputs
    with jax.enable_x64(True):
        wide = [jnp.asarray(a) for a in (q, k, v, g)]
        expected = _with_gradients(lambda *qkv: _plain(*qkv, segments, window), *wide)
    with jax.enable_x64(dtype == "float64"):
        given = [jnp.asarray(a, dtype) for a in (q, k, v, g)]
        found = _with_gradients(lambda *qkv: run(*qkv, jnp.asarray(segments, jnp.int32)), *given)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_xla_form(kv_heads, window):
    # jax.nn.dot_product_attention computes the softmax in float32 whatever it is given.
    _compare(lambda *a: attend(*a, "xla", window), _inputs(2, 12, 4, kv_heads, 8, 3), window, "float64", 2e-6)


@pytest.mark.parametrize("kv_heads, window, length", [(4, 0, 256), (2, 100, 256), (1, 0, 384), (2, 1, 128)])
def test_splash(kv_heads, window, length):
    run = lambda *a: attend(*a, "splash", window, interpret=True)  # noqa: E731
    _compare(run, _inputs(2, length, 4, kv_heads, 16, 3), window, "float32", 2e-5)


@pytest.mark.parametrize("kernel", ["xla", "splash"])
@pytest.mark.parametrize(
    "kv_heads, rules", [(2, Rules()), (1, Rules(kv_heads="")), (2, Rules(batch="data", heads="fsdp,tensor"))]
)
def test_on_a_mesh_every_query_meets_its_own_keys(kernel, kv_heads, rules):
    if rules.heads == "fsdp,tensor":
        rules = dataclasses.replace(rules, kv_heads="tensor")
    mesh = make_mesh(tiny.config(), jax.devices()[:8])
    inputs = _inputs(4, 128, 4, kv_heads, 8, 3)
    with on_mesh(mesh, rules):
        _compare(jax.jit(lambda *a: attend(*a, kernel, 50, interpret=True)), inputs, 50, "float32", 2e-5)


def _calls(jaxpr, name):
    """How often a primitive or kernel of this name is called in a jaxpr, loops counted once."""
    count = 0
    for equation in jaxpr.eqns:
        kernel = str(equation.params.get("name_and_src_info", equation.params.get("name", "")))
        count += name in (equation.primitive.name, kernel.split(" ")[0])
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            count += _calls(inner, name) if hasattr(inner, "eqns") else 0
    return count


def _grad_jaxpr(function, names, *inputs):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    total = lambda *a: jnp.sum(jax.checkpoint(function, policy=policy)(*a) ** 2)  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*inputs).jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * 3)[0]  # JAX 0.10 leaves a call in that only the compiler drops


@pytest.mark.parametrize("names, forward_runs", [((), 2), (("attention",), 1), (("q",), 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_saving_attention_saves_what_splash_needs_so_that_it_runs_once(names, forward_runs, sharded):
    q, k, v, segments, _ = (jnp.asarray(a, jnp.float32) for a in _inputs(4, 128, 4, 2, 16, 3))
    run = lambda *a: attend(*a, segments.astype(jnp.int32), "splash", interpret=True)  # noqa: E731
    if sharded:
        with on_mesh(make_mesh(tiny.config(), jax.devices()[:8]), Rules()):
            jaxpr = _grad_jaxpr(run, names, q, k, v)
    else:
        jaxpr = _grad_jaxpr(run, names, q, k, v)
    assert _calls(jaxpr, "splash_mha_fwd_segmented_residuals") == forward_runs


@jax.custom_vjp
def _flash(q, k, v, mask):
    """A kernel in the shape of cuDNN's: backward from the context and the log-sum-exp [B, N, L]."""
    return _flash_forward(q, k, v, mask)[0]


def _flash_forward(q, k, v, mask):
    scores = jnp.where(mask, jnp.einsum("bqnh,bknh->bnqk", q, k), -1e30)
    log_z = jax.lax.erf_inv(jnp.zeros(())) + jax.nn.logsumexp(scores, axis=-1)  # erf_inv: to be counted
    out = jnp.einsum("bnqk,bknh->bqnh", jnp.exp(scores - log_z[..., None]), v)
    return out, (q, k, v, mask, log_z, out)


def _flash_backward(residuals, g):
    q, k, v, mask, log_z, out = residuals
    scores = jnp.where(mask, jnp.einsum("bqnh,bknh->bnqk", q, k), -1e30)
    p = jnp.exp(scores - log_z[..., None])
    dp = jnp.einsum("bqnh,bknh->bnqk", g, v)
    ds = p * (dp - jnp.einsum("bqnh,bqnh->bnq", g, out)[..., None])
    return (
        jnp.einsum("bnqk,bknh->bqnh", ds, k), jnp.einsum("bnqk,bqnh->bknh", ds, q),
        jnp.einsum("bnqk,bqnh->bknh", p, g), np.zeros(mask.shape, jax.dtypes.float0),
    )  # fmt: skip


_flash.defvjp(_flash_forward, _flash_backward)


def test_residuals_of_a_kernel_are_named_and_nothing_else_is():
    """cuDNN needs a GPU even to be traced; a kernel of its form goes through the same wrapper here."""
    q, k, v, _, _ = (jnp.asarray(a, jnp.float32) for a in _inputs(2, 6, 4, 4, 8, 1))
    mask = jnp.tril(jnp.ones((6, 6), bool))[None, None]
    named = attention._with_named_residuals(lambda q, k, v: _flash(q, k, v, mask))
    expected = jax.grad(lambda *a: jnp.sum(_flash(*a, mask) ** 2), argnums=(0, 1, 2))(q, k, v)
    found = jax.grad(lambda *a: jnp.sum(named(*a) ** 2), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert _calls(_grad_jaxpr(named, (), q, k, v), "erf_inv") == 2
    assert _calls(_grad_jaxpr(named, ("attention",), q, k, v), "erf_inv") == 1
    forward = jax.make_jaxpr(lambda *a: jax.vjp(named, *a))(q, k, v).jaxpr
    saved = [tuple(e.outvars[0].aval.shape) for e in forward.eqns if e.primitive.name == "name"]
    assert sorted(saved) == [(2, 4, 6), (2, 6, 4, 8)]


BF16 = Model(head_dim=64)


@pytest.mark.parametrize(
    "changes, length, platform, kernel, note",
    [
        ({}, 512, "tpu", "splash", ""),
        ({}, 512, "gpu", "cudnn", ""),
        ({}, 512, "cpu", "xla", ""),
        ({}, 200, "tpu", "xla", "not splash: context_length 200 is no multiple of 128"),
        ({"compute_dtype": "float32"}, 512, "gpu", "xla", "not cudnn: compute_dtype is float32"),
        ({"head_dim": 256}, 512, "gpu", "xla", "not cudnn: head_dim 256"),
        ({"attention_kernel": "xla"}, 512, "tpu", "xla", ""),
        ({"attention_kernel": "splash"}, 512, "tpu", "splash", ""),
    ],
)
def test_the_kernel_for_the_devices(changes, length, platform, kernel, note):
    found = choose_kernel(dataclasses.replace(BF16, **changes), Rules(), length, platform)
    assert found[0] == kernel and found[1].startswith(note) and bool(found[1]) == bool(note)


@pytest.mark.parametrize(
    "kernel, length, platform, told",
    [
        ("splash", 512, "cpu", "attention_kernel is 'splash', but the devices are cpu"),
        ("cudnn", 512, "tpu", "attention_kernel is 'cudnn', but the devices are tpu"),
        ("splash", 200, "tpu", "but context_length 200 is no multiple of 128"),
    ],
)
def test_a_kernel_that_cannot_work_there_is_refused(kernel, length, platform, told):
    with pytest.raises(InputError, match=told):
        choose_kernel(dataclasses.replace(BF16, attention_kernel=kernel), Rules(), length, platform)


def test_a_split_length_leaves_the_kernels_out():
    assert choose_kernel(BF16, Rules(length="tensor"), 512, "tpu")[0] == "xla"


def _compiled_step(topology, plan):
    config = Config(
        global_batch_size=8, context_length=512,
        model=Model(num_layers=2, embed_dim=128, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=256,
                    sliding_window=200),
        mesh=Mesh(fsdp=4, tensor=2), remat=Remat(plan),
    )  # fmt: skip
    with tiny.no_compile_cache():
        text = Program(config, make_mesh(config, absent_devices(topology))).compile_train_step().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)}
    held = {shape for shape in shapes if shape.count(512) >= 2}
    return text, held


@pytest.mark.parametrize("plan, forward_runs", [("full", 2), ("names:attention", 1)])
def test_a_step_for_tpu_holds_no_scores(plan, forward_runs):
    pytest.importorskip("libtpu")
    text, held = _compiled_step("v5e:2x4", plan)
    assert held == set()
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    assert sum("splash_mha_fwd" in line for line in calls) == forward_runs
    assert sum("splash_mha_d" in line for line in calls) == 2


@pytest.mark.cuda
@pytest.mark.parametrize("plan, forward_runs", [("full", 2), ("names:attention", 1)])
def test_a_step_for_gpu_holds_no_scores_of_all_heads(plan, forward_runs):
    pytest.importorskip("jax_plugins.xla_cuda12", reason="needs the extra cuda12: make test-cuda")
    text, held = _compiled_step("h100:8", plan)
    assert all(np.prod(shape) <= 2 * 512 * 512 for shape in held)  # the mask, once for the two heads of the device
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmax"') == forward_runs
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"') == 1
