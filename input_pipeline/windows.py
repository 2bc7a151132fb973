"""Documents, one after another, cut into windows of equal length.

Dimensions, as suffixes: L context length, T tokens of a whole split.
"""

from collections.abc import Iterable

import numpy as np

from configs.schema import InputError
from input_pipeline.sources import Document
from input_pipeline.tokenizer import Tokenizer


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> np.ndarray:
    """All documents in one array tokens_T, each begun by the tokenizer's `bos_id`.

    Raises InputError naming a document that is not the text that the tokenizer needs.
    """
    dtype = np.min_scalar_type(tokenizer.size - 1)
    parts = []
    for document in documents:
        try:
            ids = tokenizer.encode(document.raw)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{document.name} is not UTF-8: byte {error.start} is 0x{document.raw[error.start]:02x}. Convert or remove "
                "the file, or use --config.data.tokenizer=bytes, which takes any bytes."
            ) from error
        parts += [np.array([tokenizer.bos_id], dtype), ids.astype(dtype)]
    return np.concatenate(parts)


class WindowSource:
    """A random access source of examples for Grain; example i reads tokens i * L to i * L + L, the last as a target.

    Each is a dict of arrays [L]: `inputs`, `targets` (the inputs one further), `segment_ids` (documents counted
    from 1 within the window, 0 for padding), `positions` (from 0 in each document, or where the window cut it),
    and `weights`, float32: 1 where the target is of the same document. So every token but the documents' first
    is the target of one example, and no document predicts the next.
    """

    def __init__(self, tokens_T: np.ndarray, bos_id: int, context_length: int):
        self._tokens_T, self._bos_id, self._length = tokens_T, bos_id, context_length
        # A last window of a single token would have no target.
        self._count = -(-(len(tokens_T) - 1) // context_length)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        if not 0 <= index < self._count:
            raise IndexError(f"example {index} of {self._count}")
        window = self._tokens_T[index * self._length : (index + 1) * self._length + 1].astype(np.int32)
        real = len(window) - 1
        padding = self._length - real
        inputs, targets = (np.pad(part, (0, padding)) for part in (window[:-1], window[1:]))
        is_real = np.arange(self._length) < real
        begins = (inputs == self._bos_id) & is_real
        begins[0] = True
        starts = np.maximum.accumulate(np.where(begins, np.arange(self._length), 0))
        return {
            "inputs": inputs,
            "targets": targets,
            "positions": (np.arange(self._length) - starts).astype(np.int32) * is_real,
            "segment_ids": np.cumsum(begins, dtype=np.int32) * is_real,
            "weights": ((targets != self._bos_id) & is_real).astype(np.float32),
        }

    def __repr__(self) -> str:
        return f"WindowSource({self._count} x {self._length})"
