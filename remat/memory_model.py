"""How much memory a train step takes under a mix of policies: a formula, corrected by compiled programs."""

import numpy as np

from remat.graph import Need
from remat.ledger import Parts

# A saved tensor is held by every layer, but no longer made again by the layer whose backward pass runs; of the
# second, about this share is seen in compiled programs (docs/planning.md).
RELIEF = 0.5


class MemoryModel:
    """Bytes on a device at the peak of a step whose last n layers are under a second, richer policy.

    The peak is where the backward pass enters a segment: all segments up to it still hold what they saved, and the
    gradients of it and of those behind it have their place. So with k = L - n layers under the first policy

        max(k * first + n * second + n * g - relief,  k * first + L * g - relief)

    on top of state, batch and loss, where g are a layer's gradients and the relief is what the layer at work need
    not make again.

    Args:
      min_segment: layers that a segment has at least, where there are two; fewer take an infinity here.
    Attributes:
      offset: what compiled programs have shown beyond the formula.
    """

    def __init__(self, front: list[Need], num_layers: int, parts: Parts, min_segment: int = 1):
        self._saved = np.array([need.saved_bytes for need in front], float)
        self._layers, self._min_segment, self.offset = num_layers, min_segment, 0.0
        self._gradients = parts.block_gradient_bytes / num_layers
        self._fixed = parts.fixed_bytes - parts.block_gradient_bytes

    def __call__(self, first, second, n):
        """From arrays: index of the first policy, index of the second, layers under the second."""
        a, b, n = self._saved[first], self._saved[second], np.asarray(n)
        entering_second = (self._layers - n) * a + n * (b + self._gradients) - RELIEF * b
        entering_first = (self._layers - n) * a + self._layers * self._gradients - RELIEF * a
        peak = np.where(n > 0, np.maximum(entering_first, entering_second), entering_first)
        too_short = (n > 0) & (np.minimum(n, self._layers - n) < self._min_segment)
        return np.where(too_short, np.inf, self._fixed + peak + self.offset)
