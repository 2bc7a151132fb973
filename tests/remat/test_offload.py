"""What offloading costs by the model, when it is allowed at all, and that it changes no gradient."""

import dataclasses
import itertools
import json
import re
import types

import jax
import pytest

from configs.schema import InputError
from device_kinds import NOMINAL
from model.stack import Segment
from program import Program
from remat import offload
from remat.block import trace_block
from remat.graph import subsets
from remat.measure import Compiler
from remat.plan import check_plan
from remat.planner import decide
from remat.policies import policies
from tests import tiny


@pytest.fixture(scope="module")
def graph():
    return trace_block(tiny.program(), NOMINAL)


def _front(graph, kind, host_bytes=1e18):
    """By trying everything: the fewest seconds for each number of bytes on the device, where something is offloaded."""
    best: dict[int, float] = {}
    for kept in subsets(graph.useful_names):
        need = graph.need(kept)
        for moved in subsets([*kept, "block_input"]):
            size = sum(map(graph.bytes_of, moved))
            if size > host_bytes:
                continue
            copy = size / kind.host_bandwidth
            wait = max(0, copy - graph.forward_seconds) + max(0, copy - 2 * graph.forward_seconds - need.seconds)
            left = need.saved_bytes - size
            best[left] = min(best.get(left, float("inf")), need.seconds + wait)
    found, fewest = {}, float("inf")
    for size, seconds in sorted(best.items()):
        if seconds < fewest:
            found[size] = fewest = seconds
    return found


@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e12])
@pytest.mark.parametrize("host_bytes", [1e18, 3000])
def test_policies_with_offloading_are_the_best_there_are(graph, bandwidth, host_bytes):
    kind = dataclasses.replace(NOMINAL, host_bandwidth=bandwidth)
    plain = [graph.need(names) for names in subsets(graph.useful_names)]
    found = offload.with_offload(graph, plain, kind, host_bytes)
    expected = _front(graph, kind, host_bytes)
    for need in found:
        assert need.seconds == pytest.approx(expected[need.saved_bytes])
        assert need.offloaded and not need.offloaded & need.saved
        assert need.offloaded_bytes == sum(map(graph.bytes_of, need.offloaded)) <= host_bytes
    cheapest = {n.saved_bytes: n.seconds for n in sorted([*plain, *found], key=lambda n: -n.seconds)}
    assert all(cheapest[size] == pytest.approx(seconds) for size, seconds in expected.items())


def test_offloading_is_taken_only_where_it_is_modelled_faster(graph):
    plain = [graph.need(names) for names in subsets(graph.useful_names)]
    slow = dataclasses.replace(NOMINAL, host_bandwidth=1.0)
    faster_than = {n.saved_bytes: n.seconds for n in plain}
    for need in offload.with_offload(graph, plain, slow, 1e18):
        assert all(need.seconds < s for size, s in faster_than.items() if size <= need.saved_bytes)


@pytest.mark.parametrize("allowed, told", [("never", "'never'"), ("checked", "on CPU"), ("assumed", "on CPU")])
def test_nothing_is_offloaded_on_a_cpu(allowed, told):
    program = tiny.program(memory={"offload": allowed})
    needs, why = policies(program, trace_block(program, NOMINAL))
    assert told in why and not any(need.offloaded for need in needs)


def test_absent_devices_are_asked_to_be_trusted(monkeypatch):
    absent = types.SimpleNamespace(platform="tpu")
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[absent]))
    assert "config.memory.offload='assumed'" in offload.why_not(mesh, "checked")
    assert offload.why_not(mesh, "assumed") == ""
    monkeypatch.setattr(jax, "devices", lambda: [absent])
    monkeypatch.setattr(offload, "check_gradients", lambda: "the gradients are off")
    assert offload.why_not(mesh, "checked") == "the gradients are off"


def test_gradients_that_offloading_would_change_are_noticed(monkeypatch):
    assert offload.check_gradients(width=16) == ""
    named, calls = offload.checkpoint_name, itertools.count()
    monkeypatch.setattr(offload, "checkpoint_name", lambda x, name: named(x * (1 + 1e-3 * next(calls)), name))
    assert "are off by up to" in offload.check_gradients(width=16)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("segment", [Segment(0, 2, (), ("block_input",)), Segment(0, 2, ("q",), ("up", "gate"))])
def test_offloading_changes_no_gradient(layers, segment):
    """Neither does a stack of one layer, whose scan turns once."""
    config = tiny.config(model={"num_layers": layers}, mesh={"data": 1, "fsdp": 2, "tensor": 1})
    mesh = tiny.program(mesh={"data": 1, "fsdp": 2, "tensor": 1}).mesh

    def gradient(of):
        program = Program(config, mesh, (dataclasses.replace(of, num_layers=layers),))
        batch = jax.tree.map(lambda a: a[0], tiny.batch(program))
        loss = lambda p: program.sums(p, batch, None, True)["nll"]  # noqa: E731
        with program.on_mesh():
            return jax.jit(jax.grad(loss))(program.init_state().params)

    same = jax.tree.map(lambda a, b: bool((a == b).all()), gradient(Segment(0, 2)), gradient(segment))
    assert all(jax.tree.leaves(same))


def test_what_is_offloaded_is_in_the_program():
    """The CPU's compiler drops the moves; in what JAX hands to it they are there, both ways."""
    program = Program(tiny.config(), tiny.program().mesh, (Segment(0, 3, ("q",), ("up",)),))
    with program.on_mesh():
        text = str(jax.make_jaxpr(program.train_step)(program.abstract_state, program.abstract_batch()))
    on_host = set(re.findall(r"<host>\[([\d,]+)\]", text))
    assert on_host == {"8,16,64", "3,8,16,64"}  # `up` of one layer and of all


@pytest.mark.parametrize(
    "save, moved, told",
    [(None, ("up",), "in a segment whose save is null"),
     ((), ("mlp_gaet",), "which no tensor of the block is called"), (("q",), ("q",), "names 'q' twice"),
     (("block_input",), (), "'block_input' in vain"), ((), ("mlp_out",), "'mlp_out' in vain")],
)  # fmt: skip
def test_names_that_cannot_be_offloaded_are_refused(graph, save, moved, told):
    check_plan(graph, (Segment(0, 3, ("q",), ("block_input", "up")),))
    with pytest.raises(InputError, match=told):
        check_plan(graph, (Segment(0, 3, save, moved),))


def test_a_plan_that_offloads_is_refused_where_it_may_not(tmp_path):
    segment = {"first_layer": 0, "num_layers": 3, "save": ["q"], "offload": ["up"]}
    (tmp_path / "plan.json").write_text(json.dumps({"segments": [segment]}))
    program = tiny.program(remat={"plan": str(tmp_path / "plan.json")})
    assert program.segments == (Segment(0, 3, ("q",), ("up",)),)
    with pytest.raises(InputError, match="offloads tensors to the host, but on CPU"):
        decide(lambda segments=None: program, compiler=Compiler("cpu"))
