"""From examples to batches on the devices, by Grain.

Dimensions, as suffixes: A microbatches of a step, B batch, L length.
"""

import functools
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset
from jax.sharding import NamedSharding

from configs.schema import InputError

Batch = dict[str, jax.Array]


class _Rows(grain.MapDataset):
    """Of every batch of `size` consecutive examples, from example `first` on, only `rows`, one after another."""

    def __init__(self, parent: grain.MapDataset, rows: np.ndarray, size: int, first: int):
        super().__init__(parent)
        self._rows, self._size, self._first = rows, size, first

    def __len__(self) -> int:
        return (len(self._parent) - self._first) // self._size * len(self._rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        batch, row = divmod(index, len(self._rows))
        return self._parent[self._first + batch * self._size + int(self._rows[row])]


class Batches:
    """An iterator of batches that prepares some ahead, in the background, up to the devices. Close it when done."""

    def __init__(self, dataset: grain.IterDataset, prefetch: int):
        self._iterator: Any = iter(ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise ValueError("These batches are closed.")
        return next(self._iterator)

    def close(self) -> None:
        if self._iterator is not None:
            self._iterator.close()
            # Grain closes once more when it is deleted, and complains if that is as late as Python's exit.
            self._iterator = None


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the rows that this process's devices need, in order; rows are counted over all dims but the last."""
    numbers = np.arange(np.prod(shape[:-1])).reshape(shape[:-1])
    indices = sharding.addressable_devices_indices_map(shape).values()
    needed = [numbers[index[:-1]].ravel() for index in indices if index is not None]
    return np.unique(np.concatenate(needed))


def train_batches(
    source: Any,
    *,
    seed: int,
    microbatches: int,
    batch_size: int,
    sharding: NamedSharding,
    prefetch: int,
    first_example: int = 0,
) -> Batches:
    """Endless batches of arrays [A, B, L], in an order that depends on `seed` and the number of the example alone.

    Row b of microbatch a of the k-th batch is example first_example + (k * A + a) * B + b of the shuffled source,
    which is shuffled anew every epoch. So one number is all that is needed to go on, on any mesh and any number
    of processes; each process reads only its own rows.

    Args:
      source: a random access source of examples, dicts of arrays [L], `inputs` among them.
      sharding: of the arrays [A, B, L].
      prefetch: batches to keep ready, while one more is being made.
    Raises:
      InputError: the source has fewer examples than one batch.
    """
    size = microbatches * batch_size
    if len(source) < size:
        raise InputError(
            f"The training data has {len(source)} examples, fewer than one batch of {size}. Lower "
            "config.global_batch_size or config.context_length, or add data."
        )
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return _batches(shuffled, (microbatches, batch_size), sharding, first_example, prefetch)


def evaluation_batches(source: Any, *, batch_size: int, sharding: NamedSharding, prefetch: int) -> Batches:
    """Batches of arrays [B, L] with every example once, in order; what fills the last batch up is zeros, weights too.

    Raises InputError if there are no examples.
    """
    if not len(source):
        raise InputError("There are no examples to evaluate. Raise config.data.heldout_percent, or add data.")
    padded = _Padded(source, -(-len(source) // batch_size) * batch_size)
    return _batches(grain.MapDataset.source(padded), (batch_size,), sharding, 0, prefetch)


class _Padded:
    """A source lengthened by examples of zeros."""

    def __init__(self, source: Any, length: int):
        self._source, self._length = source, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        example = self._source[min(index, len(self._source) - 1)]
        return example if index < len(self._source) else {k: np.zeros_like(v) for k, v in example.items()}

    def __repr__(self) -> str:
        return f"_Padded({self._source!r}, {self._length})"


def _batches(examples: grain.MapDataset, rows: tuple[int, ...], sharding: NamedSharding, first: int, prefetch: int) -> Batches:
    """Batches of arrays [*rows, L], of which this process reads the rows that its devices need."""
    size = int(np.prod(rows))
    numbers = np.arange(size).reshape(rows)
    shape = (*rows, len(examples[0]["inputs"]))
    mine = local_rows(sharding, shape)

    def on_devices(local: dict[str, np.ndarray]) -> Batch:
        def part(index, array):
            return array[np.searchsorted(mine, numbers[index[:-1]])][..., index[-1]]

        # These copies are meant, even where a transfer guard forbids those that happen by the way.
        with jax.transfer_guard_host_to_device("allow"):
            return {
                k: jax.make_array_from_callback(shape, sharding, functools.partial(part, array=v)) for k, v in local.items()
            }

    dataset = _Rows(examples, mine, size, first).batch(len(mine), drop_remainder=True)
    # One thread of our own keeps batches ahead; Grain's threads within a batch only cost here.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return Batches(dataset.to_iter_dataset(options).map(on_devices), prefetch)
