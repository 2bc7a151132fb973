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
    is the target of exactly one example, and no document predicts the next. A window without a target, such as one
    of nothing but empty documents, is no example.
    """

    def __init__(self, tokens_T: np.ndarray, bos_id: int, context_length: int):
        self.context_length = context_length
        self._tokens_T, self._bos_id = tokens_T, bos_id
        is_target = tokens_T[1:] != bos_id
        self.num_targets = int(np.count_nonzero(is_target))
        begins = np.arange(0, len(is_target), context_length)
        self._begins = begins[np.logical_or.reduceat(is_target, begins)] if len(begins) else begins

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        L = self.context_length
        window = self._tokens_T[self._begins[index] : self._begins[index] + L + 1]
        inputs, targets = window[:-1], window[1:]
        is_first = inputs == self._bos_id
        is_first[0] = True
        position = np.arange(len(inputs), dtype=np.int32)
        example = {
            "inputs": inputs.astype(np.int32),
            "targets": targets.astype(np.int32),
            "positions": position - np.maximum.accumulate(position * is_first),
            "segment_ids": np.cumsum(is_first, dtype=np.int32),
            "weights": (targets != self._bos_id).astype(np.float32),
        }
        return example if len(inputs) == L else {k: np.pad(v, (0, L - len(v))) for k, v in example.items()}

    def __repr__(self) -> str:
        return f"WindowSource({len(self)} x {self.context_length})"
