"""metrics.jsonl and the events have each step once; the terminal gets a line for some; the losses get a picture."""

import dataclasses
import json
import math
import struct
import time
import types

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

import metrics
from device_kinds import device_kind
from plots import loss_picture
from tests import tiny

VALUES = {"loss": jnp.float32(2.5), "tokens": jnp.float32(128), "learning_rate": jnp.float32(1e-3)}


def _reporter(workdir, first_step, steps, log_every_steps):
    return metrics.Reporter(workdir, first_step, tiny.program(steps=steps, log_every_steps=log_every_steps))


def _rows(workdir):
    return [json.loads(line, parse_constant=pytest.fail) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with _reporter(tmp_path, 0, 5, 1) as report:
        for step in range(1, 6):
            report.step(step, VALUES)
    with _reporter(tmp_path, 3, 6, 1) as report:
        report.step(4, VALUES)
    assert _steps(path) == [1, 2, 3, 4]
    row = json.loads(path.read_text().splitlines()[-1])
    assert row["step"] == 4 and row["loss"] == 2.5 and row["tokens_per_second"] == pytest.approx(128 / row["step_seconds"])


@pytest.mark.parametrize("end", ['{"st', '{"step": 3}', "\0\0\0\0", "3"])
def test_a_line_that_was_cut_off_is_dropped_and_the_next_row_gets_its_own(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + end)
    file = metrics.MetricsFile(tmp_path, 2)
    file.write({"step": 3, "loss": 1.0})
    file.close()
    assert _steps(path) == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_cannot_be_read_costs_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff{"st\n{"step": 2}\n')
    metrics.MetricsFile(tmp_path, 10).close()
    assert _steps(path) == [1, 2]


def test_rows_can_be_read_while_the_run_goes_on(tmp_path):
    with _reporter(tmp_path, 0, 5, 1) as report:
        report.step(1, VALUES)
        assert _steps(tmp_path / "metrics.jsonl") == [1]


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        metrics, "console", metrics.Console(soft_wrap=True, highlight=False, markup=False, force_terminal=False)
    )
    with _reporter(tmp_path, 0, 5, 2) as report:
        for step in range(1, 6):
            report.step(step, VALUES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert "loss 2.500" in lines[0] and "tokens/s" in lines[0] and "learning rate 1.00e-03" in lines[0]


def test_evaluations_have_rows_of_their_own(tmp_path, capsys):
    results = {"eval_loss": 1.0, "eval_perplexity": 2.718, "eval_bits_per_byte": 1.4427, "eval_tokens": 1000.0}
    with _reporter(tmp_path, 0, 5, 1) as report:
        report.evaluation(3, results)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3} | results
    assert "step 3: held-out loss 1.0000 nats a token, perplexity 2.718, 1.4427 bits per byte" in capsys.readouterr().out


def test_a_loss_that_is_no_number_is_null_since_json_has_no_nan(tmp_path):
    with _reporter(tmp_path, 0, 5, 1) as report:
        report.step(1, VALUES | {"loss": jnp.float32(math.nan), "gradient_norm": jnp.float32(math.inf)})
    row = _rows(tmp_path)[0]
    assert row["loss"] is None and row["gradient_norm"] is None and row["tokens"] == 128


def test_the_wait_for_a_batch_is_in_the_row_of_its_step(tmp_path, capsys):
    def batches():
        for seconds in (0.0, 0.2, 0.0):
            time.sleep(seconds)
            yield {}

    with _reporter(tmp_path, 0, 3, 1) as report:
        waiting = batches()
        report.next_batch(waiting)
        report.next_batch(waiting)  # of the next step, dispatched before the first is read
        report.step(1, VALUES)
        report.next_batch(waiting)
        report.step(2, VALUES)
        report.step(3, VALUES)
    waits = [row["data_wait_seconds"] for row in _rows(tmp_path)]
    assert waits[1] >= 0.2 and waits[0] < 0.1 and waits[2] < 0.1
    assert "waiting for data" in capsys.readouterr().out


def test_flops_and_their_share_of_the_peak(tmp_path, monkeypatch, capsys):
    with _reporter(tmp_path, 0, 5, 1) as report:
        report.step(1, VALUES)
    row = _rows(tmp_path)[0]
    assert row["model_flops_per_second"] == pytest.approx(tiny.program().model_flops / row["step_seconds"])
    assert "mfu" not in row and "MFU" not in capsys.readouterr().out
    monkeypatch.setattr(metrics, "device_kind", lambda _: dataclasses.replace(device_kind("TPU v4"), peak_flops=1e9))
    with _reporter(tmp_path, 0, 5, 1) as report:
        report.step(1, VALUES)
    row = _rows(tmp_path)[0]
    assert row["mfu"] == pytest.approx(row["model_flops_per_second"] / 8e9)
    assert "MFU" in capsys.readouterr().out


def test_memory_is_that_of_the_fullest_device_where_devices_tell():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    def absent():
        raise jax.errors.JaxRuntimeError("not here")

    full, fuller = {"bytes_in_use": 5, "peak_bytes_in_use": 9}, {"bytes_in_use": 7, "peak_bytes_in_use": 8}
    assert metrics.memory_in_use([device(full), device(fuller)]) == {"device_bytes_in_use": 7, "device_peak_bytes_in_use": 9}
    assert metrics.memory_in_use([device(None), types.SimpleNamespace(memory_stats=absent)]) == {}


@pytest.mark.parametrize("peak, told", [(100, False), (104, False), (111, True), (94, True)])
def test_a_peak_that_is_not_the_plans_is_told_once(tmp_path, capsys, monkeypatch, peak, told):
    monkeypatch.setattr(metrics, "memory_in_use", lambda devices: {"device_peak_bytes_in_use": peak})
    with metrics.Reporter(tmp_path, 0, tiny.program(), (100, 105)) as report:
        for step in (1, 2, 3):
            report.step(step, VALUES)
    assert capsys.readouterr().out.count("WARNING: the fullest device has had") == told
    assert all(row["expected_peak_bytes"] == 100 for row in _rows(tmp_path)[:2])


@pytest.mark.parametrize(
    "name, peak",
    [("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v5p", 459e12), ("TPU v6 lite", 918e12),
     ("TPU7x", 1153.5e12), ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12)],
)  # fmt: skip
def test_kinds_of_devices_are_told_apart(name, peak):
    assert device_kind(name).peak_flops == peak


def test_what_is_not_in_the_table_has_no_peak():
    assert device_kind("cpu") is None and device_kind("NVIDIA L40") is None


def _events(workdir):
    """The events of a run: a file is a row of length (8 bytes), checksum (4), event, checksum (4)."""
    for path in sorted((workdir / "tensorboard").glob("*tfevents*"), key=lambda p: p.stat().st_mtime_ns):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (size,) = struct.unpack("<Q", raw[at : at + 8])
            yield Event.FromString(raw[at + 12 : at + 12 + size])
            at += 16 + size


def test_tensorboard_gets_the_same_numbers_and_hides_steps_that_are_done_again(tmp_path):
    with _reporter(tmp_path, 0, 5, 1) as report:
        for step in (1, 2, 3):
            report.step(step, VALUES)
        report.evaluation(3, {"eval_loss": 1.5, "eval_perplexity": 4.5, "eval_bits_per_byte": 2.0, "eval_tokens": 10.0})
    scalars = {(e.step, v.tag): v.simple_value for e in _events(tmp_path) for v in e.summary.value}
    assert scalars[2, "train/loss"] == 2.5 and scalars[3, "eval/loss"] == 1.5 and (3, "eval/bits_per_byte") in scalars
    rows = {(row["step"], f"train/{name}") for row in _rows(tmp_path) if "loss" in row for name in row if name != "step"}
    assert rows <= set(scalars)
    with _reporter(tmp_path, 2, 5, 1) as report:
        report.step(3, VALUES)
    starts = [e.step for e in _events(tmp_path) if e.session_log.status == e.session_log.START]
    assert starts[-1] == 3  # TensorBoard drops what it has from this step on


def test_the_picture_spans_the_whole_file(tmp_path):
    assert loss_picture(tmp_path) is None
    rows = [{"step": i, "loss": 5.0 / i} for i in range(1, 101)] + [{"step": 50, "eval_loss": 1.0}, {"step": 7, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = loss_picture(tmp_path)
    assert path == tmp_path / "loss.png" and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    before = path.read_bytes()
    assert loss_picture(tmp_path).read_bytes() != before
