"""From bytes to token ids and back."""

import hashlib
import pathlib
from typing import Protocol

import numpy as np
import tokenizers

from configs.schema import InputError

BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>", "[CLS]")


class Tokenizer(Protocol):
    """`bos_id` begins every document; ids are below `size`; `fingerprint` changes with the ids it gives."""

    size: int
    bos_id: int
    fingerprint: str

    def encode(self, raw: bytes) -> np.ndarray: ...

    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """One id a byte, and one more that begins a document."""

    size = 257
    bos_id = 256
    fingerprint = "bytes"

    def encode(self, raw: bytes) -> np.ndarray:
        return np.frombuffer(raw, np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` as the `tokenizers` library writes it. Raises InputError for one without a first token."""

    def __init__(self, path: str):
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exceptions
            raise InputError(
                f"config.data.tokenizer={path} cannot be read: {error}. It must be 'bytes' or the path of a Hugging "
                "Face tokenizer.json."
            ) from error
        # A file may ask to cut or to fill up every text, which is no way to treat documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A "<s>" that a document spells out is text: it must not become the token that begins a document.
        self._tokenizer.encode_special_tokens = True
        ids = [i for i in map(self._tokenizer.token_to_id, BOS_TOKENS) if i is not None]
        if not ids:
            raise InputError(
                f"config.data.tokenizer={path} has no token to begin a document with; one of {', '.join(BOS_TOKENS)} "
                "must be in its vocabulary."
            )
        self.bos_id = ids[0]
        # Ids of added tokens may leave gaps, so the number of tokens is not enough.
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, raw: bytes) -> np.ndarray:
        """Raises UnicodeDecodeError if `raw` is not UTF-8."""
        return np.asarray(self._tokenizer.encode(raw.decode(), add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i < self.size and i != self.bos_id], skip_special_tokens=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of `config.data.tokenizer`: 'bytes', or the path of a tokenizer.json."""
    return ByteTokenizer() if spec == "bytes" else HuggingFaceTokenizer(spec)
