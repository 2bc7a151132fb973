"""metrics.jsonl has each step once; the terminal gets a line for some."""

import json

import jax.numpy as jnp
import pytest

import metrics

VALUES = {"loss": jnp.float32(2.5), "tokens": jnp.float32(128), "learning_rate": jnp.float32(1e-3)}


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with metrics.Reporter(tmp_path, 0, 5, 1) as report:
        for step in range(1, 6):
            report.step(step, VALUES)
    with metrics.Reporter(tmp_path, 3, 6, 1) as report:
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
    with metrics.Reporter(tmp_path, 0, 5, 1) as report:
        report.step(1, VALUES)
        assert _steps(tmp_path / "metrics.jsonl") == [1]


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        metrics, "console", metrics.Console(soft_wrap=True, highlight=False, markup=False, force_terminal=False)
    )
    with metrics.Reporter(tmp_path, 0, 5, 2) as report:
        for step in range(1, 6):
            report.step(step, VALUES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert "loss 2.500" in lines[0] and "tokens/s" in lines[0] and "learning rate 1.00e-03" in lines[0]


def test_evaluations_have_rows_of_their_own(tmp_path, capsys):
    results = {"eval_loss": 1.0, "eval_perplexity": 2.718, "eval_bits_per_byte": 1.4427, "eval_tokens": 1000.0}
    with metrics.Reporter(tmp_path, 0, 5, 1) as report:
        report.evaluation(3, results)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3} | results
    assert "step 3: held-out loss 1.0000 nats a token, perplexity 2.718, 1.4427 bits per byte" in capsys.readouterr().out
