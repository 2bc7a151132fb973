"""The best mix of policies over the layers of a stack, exactly, under a budget of bytes.

All layers are alike, so under one budget two policies are enough: the layers before n under one, those from n on
under a richer one, whose residuals die first in the backward pass. The fractional optimum mixes two neighbours of the
lower hull of (bytes, seconds); with whole layers another pair can win, so all pairs of the Pareto front are tried.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from model.stack import Segment
from remat.graph import Need


@dataclasses.dataclass(frozen=True)
class Mix:
    """`first` for the first layers, `second` for the last `num_second`; `first` alone if that is 0."""

    first: Need
    second: Need
    num_second: int
    num_layers: int

    @property
    def seconds(self) -> float:
        """Of recompute in one step, all layers together; modelled."""
        return (self.num_layers - self.num_second) * self.first.seconds + self.num_second * self.second.seconds

    @property
    def flops(self) -> float:
        """Of recompute in one step, all layers together."""
        return (self.num_layers - self.num_second) * self.first.flops + self.num_second * self.second.flops

    @property
    def saved_bytes(self) -> int:
        return (self.num_layers - self.num_second) * self.first.saved_bytes + self.num_second * self.second.saved_bytes

    @property
    def offloaded_bytes(self) -> int:
        first, second = self.first.offloaded_bytes, self.second.offloaded_bytes
        return (self.num_layers - self.num_second) * first + self.num_second * second

    @property
    def num_segments(self) -> int:
        return 2 if 0 < self.num_second < self.num_layers else 1

    def segments(self, order: Sequence[str]) -> tuple[Segment, ...]:
        """As the model takes them; the names of each in this order."""
        split = self.num_layers - self.num_second
        parts = [(0, split, self.first), (split, self.num_second, self.second)]

        def named(names):
            return tuple(name for name in order if name in names)

        return tuple(Segment(at, n, named(p.saved), named(p.offloaded)) for at, n, p in parts if n)


def pareto_front(needs: Sequence[Need]) -> list[Need]:
    """Those that no other beats: less or equal in bytes on the device and in seconds, and less in one; by bytes."""
    front: list[Need] = []
    for need in sorted(needs, key=lambda n: (n.saved_bytes, n.seconds, len(n.saved), sorted(n.saved))):
        if not front or need.seconds < front[-1].seconds:
            front.append(need)
    return front


def best_mix(
    front: Sequence[Need],
    num_layers: int,
    extra_bytes: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    budget: float,
) -> Mix | None:
    """The mix that takes the fewest seconds among those whose memory fits, None if none does.

    Args:
      extra_bytes: what a mix needs, from arrays (index of the first policy, index of the second, layers under the second).
      budget: in the same bytes.
    """
    count = len(front)
    first, second = (a.ravel() for a in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    richer = first < second  # the front is sorted by saved bytes
    first, second = np.r_[np.arange(count), first[richer]], np.r_[np.arange(count), second[richer]]
    seconds = np.array([need.seconds for need in front])
    best: tuple[float, float, int, int, int] | None = None
    for n in range(num_layers):
        if n == 0:
            a, b = first[:count], second[:count]
        else:
            a, b = first[count:], second[count:]
        if not len(a):
            continue
        needed = extra_bytes(a, b, np.full(len(a), n))
        total = np.where(needed <= budget, (num_layers - n) * seconds[a] + n * seconds[b], np.inf)
        i = int(np.lexsort((needed, total))[0])
        candidate = (float(total[i]), float(needed[i]), n, int(a[i]), int(b[i]))
        # A second segment must pay: at equal time the plan with one is kept.
        if np.isfinite(total[i]) and (best is None or candidate[0] < best[0] * (1 - 1e-9)):
            best = candidate
    if best is None:
        return None
    _, _, n, a, b = best
    return Mix(front[a], front[b], n, num_layers)
