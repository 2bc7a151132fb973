"""The order of examples is a function of seed and number alone; evaluation counts each once."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from configs.schema import InputError
from input_pipeline.loader import evaluation_batches, local_rows, train_batches
from tests import tiny


class Numbers:
    """Example i is the number i, over and over; remembers what it was asked for."""

    def __init__(self, count, length=4, broken_at=None):
        self.count, self.length, self.broken_at, self.asked = count, length, broken_at, []

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i == self.broken_at:
            raise OSError("shard gone")
        self.asked.append(int(i))
        return {"inputs": np.full(self.length, i, np.int32), "weights": np.ones(self.length, np.float32)}

    def __repr__(self):
        return "Numbers"


def _sharding(mesh=(2, 2, 2), leading=True):
    program = tiny.program(mesh=dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)))
    return program.batch_sharding if leading else program.evaluation_sharding


def _numbers(batches, count):
    with contextlib.closing(batches):
        return [np.asarray(next(batches)["inputs"])[..., 0] for _ in range(count)]


def _train(source, count, **changes):
    arguments = {"seed": 0, "microbatches": 1, "batch_size": 8, "sharding": _sharding(), "first_example": 0, "prefetch": 2}
    return _numbers(train_batches(source, **(arguments | changes)), count)


def test_an_epoch_has_every_example_once_and_the_next_another_order():
    order = np.concatenate(_train(Numbers(24), 6)).ravel()
    assert sorted(order[:24]) == sorted(order[24:]) == list(range(24))
    assert list(order[:24]) != list(order[24:])
    assert list(order[:24]) != sorted(order[:24])


def test_the_seed_decides_the_order():
    a, same, other = (np.concatenate(_train(Numbers(24), 3, seed=s)) for s in (0, 0, 1))
    assert (a == same).all() and (a != other).any()


@pytest.mark.parametrize("first", [8, 13, 40])
def test_going_on_from_a_number_of_examples_skips_and_repeats_nothing(first):
    order = np.concatenate(_train(Numbers(20), 8)).ravel()
    rest = np.concatenate(_train(Numbers(20), 2, first_example=first)).ravel()
    np.testing.assert_array_equal(rest, order[first : first + 16])


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 4, 2), (1, 1, 1)])
def test_the_mesh_does_not_change_the_batches(mesh):
    for a, b in zip(_train(Numbers(40), 4), _train(Numbers(40), 4, sharding=_sharding(mesh)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_microbatches_cut_the_same_batch():
    whole = np.concatenate(_train(Numbers(40), 3)).ravel()
    cut = _train(Numbers(40), 3, microbatches=2, batch_size=4)
    assert cut[0].shape == (2, 4)
    np.testing.assert_array_equal(np.concatenate(cut).ravel(), whole)


def test_batches_are_on_the_devices_split_as_asked():
    sharding = _sharding()
    batches = train_batches(Numbers(40), seed=0, microbatches=1, batch_size=8, sharding=sharding, first_example=0, prefetch=1)
    with contextlib.closing(batches):
        batch = next(batches)["inputs"]
    assert batch.sharding == sharding and batch.addressable_shards[0].data.shape == (1, 2, 4)


def test_batches_are_prepared_ahead_and_no_thread_is_left():
    before, source = threading.active_count(), Numbers(400)
    batches = train_batches(source, seed=0, microbatches=1, batch_size=8, sharding=_sharding(), first_example=0, prefetch=3)
    next(batches)
    for _ in range(200):
        if len(source.asked) >= 8 * 4:
            break
        time.sleep(0.01)
    ahead = len(source.asked)
    batches.close()
    assert 8 * 3 < ahead <= 8 * 7
    for _ in range(200):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_an_error_of_the_source_reaches_the_caller():
    with pytest.raises(OSError, match="shard gone"):
        _train(Numbers(40, broken_at=7), 8)


def test_too_few_examples_are_refused():
    with pytest.raises(InputError, match="has 7 examples, fewer than one batch of 8"):
        _train(Numbers(7), 1)


@pytest.mark.parametrize("count", [1, 7, 8, 20])
def test_evaluation_has_every_example_once_and_fills_up_with_weight_0(count):
    batches = evaluation_batches(Numbers(count), batch_size=8, sharding=_sharding(leading=False), prefetch=2)
    with contextlib.closing(batches):
        got = [jax.tree.map(np.asarray, batch) for batch in batches]
    assert all(batch["inputs"].shape == (8, 4) for batch in got)
    inputs, weights = (np.concatenate([batch[k] for batch in got]) for k in ("inputs", "weights"))
    assert list(inputs[weights[:, 0] > 0][:, 0]) == list(range(count))
    assert weights.sum() == count * 4


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(InputError, match="no examples to evaluate"):
        evaluation_batches(Numbers(0), batch_size=8, sharding=_sharding(leading=False), prefetch=2)


def test_closing_twice_is_fine_and_closed_batches_say_so():
    batches = evaluation_batches(Numbers(9), batch_size=8, sharding=_sharding(leading=False), prefetch=2)
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_a_split_of_the_length_and_a_transfer_guard_change_nothing():
    spec = jax.sharding.PartitionSpec(None, ("data", "fsdp"), "tensor")
    split = jax.sharding.NamedSharding(_sharding().mesh, spec)
    with jax.transfer_guard("disallow"):
        batches = train_batches(Numbers(40), seed=0, microbatches=1, batch_size=8, sharding=split, prefetch=0)
        with contextlib.closing(batches):
            batch = next(batches)["inputs"]
    assert batch.addressable_shards[0].data.shape == (1, 2, 2)
    np.testing.assert_array_equal(np.asarray(batch)[..., 0], _train(Numbers(40), 1)[0])


def test_rows_of_all_devices_are_all_rows_once():
    assert list(local_rows(_sharding(), (2, 8, 4))) == list(range(16))


TWO_PROCESSES = """
import sys; sys.path.insert(0, {root!r})
import jax, numpy as np
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("localhost:{port}", 2, int(sys.argv[1]))
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from input_pipeline.loader import train_batches
from tests.input_pipeline.test_loader import Numbers
source = Numbers(40)
for shape, spec in (((4, 1), P(None, "data", None)), ((2, 2), P(None, "data", None)), ((1, 4), P(None, None, "tensor"))):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    source.asked.clear()
    batches = train_batches(source, seed=0, microbatches=1, batch_size=8, sharding=NamedSharding(mesh, spec),
                            first_example=3, prefetch=1)
    batch = next(batches)["inputs"]
    batches.close()
    rows = multihost_utils.process_allgather(batch, tiled=True)[0, :, 0]
    read = 8 if shape == (1, 4) else 4  # of the first batch; before it, one look for the length of an example
    print(shape, list(map(int, rows)), source.asked[1 : 1 + read], file=open(sys.argv[2], "a"))
"""


def test_each_of_two_processes_reads_only_its_rows_of_the_same_batch(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    root = str(tiny.__file__).rsplit("/tests/", 1)[0]
    code = TWO_PROCESSES.format(root=root, port=port)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(i), str(tmp_path / str(i))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [run.communicate(timeout=120)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    # Told in files: the output has lines of the collectives' library in the middle of others.
    results = [(tmp_path / str(i)).read_text().splitlines() for i in range(2)]
    expected = list(map(int, _train(Numbers(40), 1, first_example=3)[0].ravel()))
    for process, out in enumerate(results):
        half = expected[4 * process : 4 * process + 4]
        assert out == [
            f"(4, 1) {expected} {half}",
            f"(2, 2) {expected} {half}",
            f"(1, 4) {expected} {expected}",  # its devices hold a part of every row
        ]
