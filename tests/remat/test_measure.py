"""Peaks on record: a plan asked for again compiles nothing, and a record is never taken for another program's."""

import functools
import json
import types

import numpy as np
import pytest

from parallel import agree
from program import Program
from remat import measure
from remat.measure import Compiler, Records, fingerprint
from remat.planner import decide, decide_and_compile
from tests import tiny

SMALL = {"model": {"num_layers": 2}, "mesh": {"data": 1, "fsdp": 1, "tensor": 1}, "global_batch_size": 2}


def _program(**changes):
    return tiny.program(**{**SMALL, **changes})


def test_a_record_is_read_again_and_a_damaged_one_is_none(tmp_path):
    records = Records(tmp_path / "peaks")
    assert records.read("a") is None
    records.write("a", 7 * 2**40)
    assert records.read("a") == 7 * 2**40 and Records(tmp_path / "peaks").read("a") == 7 * 2**40
    (tmp_path / "peaks/a.json").write_text("{")
    assert records.read("a") is None
    assert sorted(p.name for p in (tmp_path / "peaks").iterdir()) == ["a.json"]


def test_without_a_place_for_records_all_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    records = Records(tmp_path / "file" / "peaks")
    records.write("a", 1)
    assert records.read("a") is None and Records(None).read("a") is None


def test_the_fingerprint_is_of_all_that_decides_what_is_compiled(monkeypatch, tmp_path):
    base = fingerprint(_program())
    assert base == fingerprint(_program())
    assert base == fingerprint(_program(memory={"limit_gib": 3.0}, log_every_steps=3))  # no part of the program
    others = [_program(global_batch_size=4), _program(model={"num_layers": 3}), _program(optimizer={"name": "adafactor"})]
    found = [fingerprint(p) for p in others] + [fingerprint(_program(), "evaluation_step")]
    found.append(fingerprint(Program(tiny.config(**SMALL, remat={"plan": "names:q"}), _program().mesh)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=1")
    found.append(fingerprint(_program()))
    monkeypatch.undo()
    monkeypatch.setattr(measure, "versions", lambda: {"jax": "another"})
    found.append(fingerprint(_program()))
    monkeypatch.undo()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/layers.py").write_text("changed")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    found.append(fingerprint(_program()))
    assert len({base, *found}) == len(found) + 1


@pytest.fixture
def plans(tmp_path):
    """A function that plans with the records of this test."""
    config = tiny.config(**SMALL, remat={"plan": "auto"}, memory={"reserve_gib": 0.0})
    make = functools.partial(Program, config, _program().mesh)
    return lambda: decide(make, compiler=Compiler("cpu", Records(tmp_path)))


def test_a_plan_that_was_made_before_compiles_nothing(plans, tmp_path, monkeypatch):
    first, _, _ = plans()
    assert first.num_compiles == 1
    monkeypatch.setattr(Program, "compile_train_step", lambda self: pytest.fail("compiled"))
    monkeypatch.setattr(Program, "evaluation_step", property(lambda self: pytest.fail("compiled")))
    again, _, compiler = plans()
    assert again.num_compiles == compiler.num_compiles == 0
    assert again.segments == first.segments and again.compiled_peak_bytes == first.compiled_peak_bytes and again.verified
    assert again.beside_step == first.beside_step


def test_a_record_that_lies_is_found_out_before_training(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tiny.config(**SMALL, remat={"plan": "auto"})
    make = functools.partial(Program, config, _program().mesh)
    truth, _, _ = decide_and_compile(make)
    for path in (tmp_path / "meshfit/peaks").iterdir():
        path.write_text(json.dumps({"peak_bytes": 5}))
    plan, program, step = decide_and_compile(make)
    assert plan.compiled_peak_bytes == truth.compiled_peak_bytes and plan.num_compiles == 1
    assert int(step(program.init_state(), tiny.batch(program))[0].step) == 1


def test_the_highest_peak_of_all_processes_counts_and_a_record_only_if_all_have_one(monkeypatch):
    program, compiler = _program(), Compiler("cpu", Records(None))
    compiler._records = types.SimpleNamespace(read=lambda name: 5, write=lambda name, peak: None)
    monkeypatch.setattr(agree, "gathered_bytes", lambda own: np.array([own, [9]]))
    assert compiler.peak(program) == 9
    monkeypatch.setattr(agree, "gathered_bytes", lambda own: np.array([own, [0]]))
    monkeypatch.setattr(measure, "compile_and_measure", lambda make, platform: ("step", 77))
    assert compiler.peak(program) == 77 and compiler.compiled(program) == "step" and compiler.num_compiles == 1
