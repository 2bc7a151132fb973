"""The best mix against trying everything."""

import itertools

import numpy as np
import pytest

from remat.graph import Need
from remat.solve import Mix, best_mix, pareto_front


def _need(saved_bytes, seconds, name=None):
    return Need(frozenset([name or f"{saved_bytes}"]), saved_bytes, seconds * 1e9, seconds)


def _random_front(seed, count=12):
    rng = np.random.default_rng(seed)
    return pareto_front([_need(int(b), float(s), name=str(i)) for i, (b, s) in enumerate(rng.uniform(1, 100, (count, 2)))])


def _extra(front, layers):
    saved = np.array([need.saved_bytes for need in front])
    return lambda first, second, n: (layers - n) * saved[first] + n * saved[second] + 5.0 * ((n > 0) & (n < layers))


def _by_trying(front, layers, extra, budget):
    """The fewest seconds of all pairs, in any order, and splits."""
    best = np.inf
    for (i, a), (j, b) in itertools.product(enumerate(front), repeat=2):
        for n in range(layers + 1):
            if extra(np.array([i]), np.array([j]), np.array([n if i != j else 0]))[0] <= budget:
                best = min(best, (layers - n) * a.seconds + n * b.seconds)
    return best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_the_mix_is_the_best_there_is(seed, layers):
    front = _random_front(seed)
    extra = _extra(front, layers)
    for budget in np.linspace(layers * front[0].saved_bytes, layers * front[-1].saved_bytes + 1, 9):
        mix = best_mix(front, layers, extra, budget)
        assert mix.seconds == pytest.approx(_by_trying(front, layers, extra, budget))
        assert mix.second.saved_bytes >= mix.first.saved_bytes


def test_nothing_fits():
    front = _random_front(0)
    assert best_mix(front, 4, _extra(front, 4), front[0].saved_bytes) is None


def test_a_pair_that_is_not_neighbours_can_win():
    """With whole layers: one of three layers under the richest policy takes less time than all under the middle one."""
    saved = np.array([0, 10, 30])
    front = [_need(0, 10.0), _need(10, 9.0), _need(30, 2.0)]
    mix = best_mix(front, 3, lambda a, b, n: (3 - n) * saved[a] + n * saved[b], 30)
    assert (mix.first.saved_bytes, mix.second.saved_bytes, mix.num_second) == (0, 30, 1)


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_what_no_other_beats(seed):
    rng = np.random.default_rng(seed)
    needs = [_need(int(b), float(s), name=str(i)) for i, (b, s) in enumerate(rng.integers(1, 12, (40, 2)))]

    def beats(a, b):
        less = a.saved_bytes <= b.saved_bytes and a.seconds <= b.seconds
        return less and (a.saved_bytes, a.seconds) != (b.saved_bytes, b.seconds)

    key = lambda n: (n.saved_bytes, n.seconds)  # noqa: E731
    expected = {key(n) for n in needs if not any(beats(other, n) for other in needs)}
    assert [key(n) for n in pareto_front(needs)] == sorted(expected)


def test_segments_put_the_richer_policy_last():
    mix = Mix(_need(1, 2.0, name="q"), _need(9, 1.0, name="up"), 2, 5)
    assert [(s.first_layer, s.num_layers, s.save) for s in mix.segments(["q", "up"])] == [(0, 3, ("q",)), (3, 2, ("up",))]
    assert mix.seconds == 8.0 and mix.saved_bytes == 21
    whole = Mix(mix.first, mix.first, 0, 5)
    assert [(s.first_layer, s.num_layers, s.save) for s in whole.segments(["q", "up"])] == [(0, 5, ("q",))]


def test_a_hundred_layers_and_three_hundred_policies_are_searched_exactly():
    front = pareto_front([_need(i, 1000.0 / (i + 1)) for i in range(300)])
    assert len(front) == 300
    mix = best_mix(front, 100, _extra(front, 100), 100 * 50)
    assert mix.seconds == pytest.approx(100 * front[50].seconds)
