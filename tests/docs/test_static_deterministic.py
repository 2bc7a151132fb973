"""Runs every row of docs/static_deterministic.md: the page says what happens, and this looks."""

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning

PAGE = (pathlib.Path(__file__).parents[2] / "docs/static_deterministic.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
X = jnp.ones((1, 16))


def _table(heading):
    """The rows under a heading as lists of cells, the header left out."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


HOW = ["by position", "by name"]
CLASS, DECORATOR, SCAN, OTHER = map(
    _table, ("Around the class", "As a decorator", "Under nn.scan", "Other flags and other ways")
)


def _code(cell):
    return "\n".join(re.findall(r"`([^`]*)`", cell))


@functools.cache
def _page():
    """The names that the code of the page defines, all of it run from top to bottom, and those that its tables use."""
    names = {"partitioning": partitioning, "functools": functools, "jax": jax}
    for code in CODE:
        exec(code, names)
    return names


def _results(module, variables, how=HOW[0], make_flag=bool):
    """Loss and gradients in training and the output in evaluation, jitted; and whether they are recomputed."""

    def call(variables, x, flag, **kwargs):
        if how == HOW[0]:
            return module.apply(variables, x, flag, **kwargs)
        return module.apply(variables, x, deterministic=flag, **kwargs)

    def loss(variables, x):
        return jnp.sum(call(variables, x, make_flag(False), rngs={"dropout": jax.random.key(1)}) ** 2)

    results = jax.jit(jax.value_and_grad(loss))(variables, X), jax.jit(lambda v, x: call(v, x, make_flag(True)))(variables, X)
    return results, "remat" in str(jax.make_jaxpr(jax.grad(loss))(variables, X))


def _same(a, b):
    np.testing.assert_equal(len(jax.tree.leaves(a)), len(jax.tree.leaves(b)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def _check(said, module, plain, **kwargs):
    """That a wrapped module does what the page says, compared with the plain one if that is to work."""
    variables = plain.init(jax.random.key(0), X, True)
    try:
        results, recomputed = _results(module(), variables, **kwargs)
        happened = "works"
    except Exception as error:
        happened = f"{type(error).__name__}: {error}".replace("`", "")
    said = said.replace("`", "")
    assert happened == "works" if said == "**works**" else happened.startswith(said), happened
    if happened == "works":
        assert recomputed
        _same(results, _results(plain, variables)[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", CLASS, ids=lambda row: row[0])
def test_around_the_class(row, how):
    _check(row[1 + HOW.index(how)], lambda: eval(_code(row[0]), _page())(), _page()["MLP"](), how=how)


def _decorated(decorators, above):
    """The page's MLP with decorators above its method, instead of @nn.compact, or above the class."""
    source = CODE[0]
    if above == "the class":
        source = source.replace("class MLP", f"{decorators}\nclass MLP")
    else:
        source = source.replace("    @nn.compact\n", "".join(f"    {line}\n" for line in decorators.splitlines()))
    names = {"functools": functools, "jax": jax}
    exec(source, names)
    return names["MLP"]()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", DECORATOR, ids=lambda row: f"{row[0]} above {row[1]}")
def test_as_a_decorator(row, how):
    _check(row[2 + HOW.index(how)], lambda: _decorated(_code(row[0]), row[1]), _page()["MLP"](), how=how)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # nn.scan warns of what is given by name, and drops it
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("row", SCAN, ids=lambda row: row[0])
def test_under_nn_scan(row, how):
    names = dict(_page())
    if how == HOW[1]:
        exec(CODE[1].replace('(name="layers")(x, deterministic)', '(name="layers")(x, deterministic=deterministic)'), names)
    layer = eval(_code(row[0]), names)
    _check(row[1 + HOW.index(how)], lambda: names["Stack"](layer), _page()["Stack"](_page()["Layer"]))


FLAGS = {"`True`": bool, "`np.bool_(True)`": np.bool_, "`1`": int, "`jnp.array(True)`": jnp.array}


class Nested(nn.Module):
    """The page's Checkpointed without its checkpoint: the same parameters and, by their names, the same dropout masks."""

    @nn.compact
    def __call__(self, x, deterministic):
        return _page()["MLP"](name="mlp")(x, deterministic)


@pytest.mark.parametrize("row", OTHER, ids=lambda row: f"{row[0]} {row[1]}")
def test_other_flags_and_other_ways(row):
    code, flag, said, _ = row
    module, plain = eval(_code(code), _page()), _page()["MLP"]()
    if flag in FLAGS:
        # An int's message has its value; 0 comes first, in training.
        said = said.replace("got 1 (int)", "got 0 (int)")
        return _check(said, lambda: module, Nested() if "Checkpointed" in code else plain, make_flag=FLAGS[flag])
    assert flag == "an argument of `jax.jit`"
    variables = module.init(jax.random.key(0), X, True)
    with pytest.raises(Exception) as error:
        jax.jit(module.apply)(variables, X, True)
    assert f"{type(error.value).__name__}: {error.value}".replace("`", "").startswith(said.replace("`", ""))


def test_a_field_instead_of_an_argument():
    params = _page()["MLP"]().init(jax.random.key(0), X, True)
    loss = lambda p: jnp.sum(_page()["train"].apply(p, X, rngs={"dropout": jax.random.key(1)}) ** 2)  # noqa: E731
    found = jax.jit(jax.value_and_grad(loss))(params), _page()["evaluate"].apply(params, X)
    _same(found, _results(_page()["MLP"](), params)[0])
    assert "remat" in str(jax.make_jaxpr(jax.grad(loss))(params))


def test_the_wrong_position_is_found_out_only_by_dropout():
    """The page's warning: with a rate of 0 nn.Dropout never asks for the flag."""
    wrapped = nn.checkpoint(_page()["MLP"])
    variables = wrapped(rate=0.0).init(jax.random.key(0), X, True)
    assert wrapped(rate=0.0).apply(variables, X, False).shape == (1, 1)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        wrapped(rate=0.5).apply(variables, X, False, rngs={"dropout": jax.random.key(1)})


def test_no_table_lost_a_row():
    assert [len(table) for table in (CLASS, DECORATOR, SCAN, OTHER)] == [14, 13, 7, 12]
