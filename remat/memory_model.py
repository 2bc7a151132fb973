"""How much memory a train step takes under a mix of policies: a formula, corrected by compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np

from remat.graph import BlockGraph, Need
from remat.ledger import Parts

# A saved tensor is held by every layer, but no longer made again by the layer whose backward pass runs; of the
# second, about this share is seen in compiled programs (docs/planning.md).
RELIEF = 0.5
# Layers whose offloaded tensors are on the device at one time.
TRANSIT = 2


class MemoryModel:
    """Bytes on a device at the peak of a step whose last n layers are under a second, richer policy.

    The peak is where the backward pass enters a segment (all segments up to it still hold what they saved, and the
    gradients of it and of those behind it have their place), or where the loss is made. With k = L - n layers under
    the first policy, on top of the state, the batch and the gradients of what is no block,

        max(k * first + n * second + n * g + work - relief,
            k * first + L * g + work - relief,
            k * first + n * second + loss)

    where g are a layer's gradients, and the relief is what the layer at work need not make again. What waits on the
    host is on the device for two layers: the one at work, and the one on its way.

    Args:
      work_bytes: of a layer at work, see `work_bytes`.
      min_segment: layers that a segment has at least, where there are two; fewer take an infinity here.
    Attributes:
      offset: what compiled programs have shown beyond the formula.
    """

    def __init__(self, front: list[Need], num_layers: int, parts: Parts, work_bytes: float, min_segment: int = 1):
        self._saved = np.array([need.saved_bytes for need in front], float)
        self._offloaded = np.array([need.offloaded_bytes for need in front], float)
        self._layers, self._min_segment, self.offset = num_layers, min_segment, 0.0
        self._gradients = parts.block_gradient_bytes / num_layers
        self._fixed = parts.fixed_bytes - parts.block_gradient_bytes - parts.loss_bytes
        self._work, self._loss = work_bytes, parts.loss_bytes

    def __call__(self, first, second, n):
        """From arrays: index of the first policy, index of the second, layers under the second."""
        a, b, n = self._saved[first], self._saved[second], np.asarray(n)
        k, g, two = self._layers - n, self._gradients, n > 0
        entering_first = k * a + self._layers * g + self._work - RELIEF * a
        entering_second = np.where(two, k * a + n * (b + g) + self._work - RELIEF * b, 0)
        peak = np.maximum(np.maximum(entering_first, entering_second), k * a + n * b + self._loss)
        offloaded = np.where(two, np.maximum(self._offloaded[first], self._offloaded[second]), self._offloaded[first])
        too_short = two & (np.minimum(n, k) < self._min_segment)
        return np.where(too_short, np.inf, self._fixed + peak + TRANSIT * offloaded + self.offset)


def work_bytes(program, graph: BlockGraph) -> float:
    """What a layer needs while its backward pass is at work: its tensors and their gradients, and two copies of its
    weights in the compute dtype (one at work, one on its way), gathered over fsdp.

    The twos are what compiled programs have shown (docs/planning.md), not a law.
    """
    tensors = sum(graph.bytes_of(name) for name in graph.names)
    size = jnp.dtype(program.config.model.compute_dtype).itemsize
    split = program.mesh.shape["tensor"]
    weights = sum(p.size for p in jax.tree.leaves(program.abstract_state.params["block"])) / program.config.model.num_layers
    return 2 * tensors + 2 * weights * size / split
