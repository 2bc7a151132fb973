"""The formula for the peak, in its three places, and what is counted on top."""

import numpy as np
import pytest

from remat.graph import Need
from remat.ledger import Parts
from remat.memory_model import MemoryModel

PARTS = Parts(
    params_bytes=1000, optimizer_bytes=2000, gradient_bytes=1100, batch_bytes=10, loss_bytes=500, block_gradient_bytes=800,
    beside_bytes=30,
)  # fmt: skip
FIXED = 1000 + 2000 + 300 + 10
FRONT = [Need(frozenset(), 100, 0.0, 2.0), Need(frozenset("q"), 300, 0.0, 1.0)]


def _peak(model, first, second, n):
    return float(model([first], [second], np.array([n]))[0])


def test_one_policy_peaks_where_the_backward_pass_begins():
    model = MemoryModel(FRONT, 8, PARTS, work_bytes=600)
    assert _peak(model, 0, 0, 0) == FIXED + 8 * 100 + 800 + 600 - 50
    assert _peak(model, 1, 1, 0) == FIXED + 8 * 300 + 800 + 600 - 150


def test_two_policies_peak_where_either_segment_is_entered():
    model = MemoryModel(FRONT, 8, PARTS, work_bytes=600)
    # Six poor layers still hold theirs, the rich two theirs, and only these have gradients yet.
    assert _peak(model, 0, 1, 6) == FIXED + 2 * 100 + 6 * (300 + 100) + 600 - 150
    # With one rich layer the first segment is the higher one: the rich layer's tensors are gone, all gradients there.
    assert _peak(model, 0, 1, 1) == FIXED + 7 * 100 + 800 + 600 - 50


def test_a_large_loss_is_the_peak():
    model = MemoryModel(FRONT, 8, PARTS, work_bytes=0)
    model._loss = 5000
    assert _peak(model, 0, 1, 4) == FIXED + 4 * 100 + 4 * 300 + 5000


def test_what_was_compiled_moves_everything_and_short_segments_are_ruled_out():
    model = MemoryModel(FRONT, 8, PARTS, work_bytes=600, min_segment=2)
    before = _peak(model, 0, 1, 4)
    model.offset = 77
    assert _peak(model, 0, 1, 4) == before + 77
    assert np.isinf([_peak(model, 0, 1, 1), _peak(model, 0, 1, 7)]).all()
    assert np.isfinite([_peak(model, 0, 1, 0), _peak(model, 0, 1, 2), _peak(model, 0, 1, 6)]).all()


@pytest.mark.parametrize("n, more", [(0, 0), (4, 2 * 40)])
def test_what_waits_on_the_host_is_on_the_device_for_two_layers(n, more):
    moved = Need(frozenset("q"), 300, 0.0, 1.0, frozenset("k"), 40)
    plain, with_host = MemoryModel(FRONT, 8, PARTS, 600), MemoryModel([FRONT[0], moved], 8, PARTS, 600)
    assert _peak(with_host, 0, 1, n) - _peak(plain, 0, 1, n) == more
