"""Where documents come from. To add a source, write a function that returns documents and put it in `SOURCES`."""

import glob
import hashlib
import itertools
import pathlib
import sysconfig
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from configs.schema import Data, InputError


class Document(NamedTuple):
    """`name` is the same on every machine that has the document: it decides which split it is in."""

    name: str
    raw: bytes


def stdlib(_: Data) -> list[Document]:
    """The source files of Python's own standard library, which every machine that runs this has.

    The few that are not UTF-8, made to test Python itself, are left out: most tokenizers could not read them.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts)]
    documents = [Document(p.relative_to(root).as_posix(), _read(p)) for p in paths]
    return [d for d in documents if _is_utf8(d.raw)]


def text(data: Data) -> list[Document]:
    """One document for every file that the glob `data.path` matches.

    Raises InputError if it matches none, or one that cannot be read.
    """
    paths = [p for p in map(pathlib.Path, glob.glob(data.path, recursive=True)) if not p.is_dir()]
    if not paths:
        raise InputError(f"config.data.path={data.path} matches no file; it must be a glob, such as 'books/**/*.txt'.")
    # Names are relative to the folder before the first wildcard: neither moving that folder nor adding files
    # anywhere in it changes which of the others are held out.
    parts = pathlib.Path(data.path).parts[:-1]
    root = pathlib.Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    return [Document(p.relative_to(root).as_posix(), _read(p)) for p in sorted(set(paths))]


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"The document {path} cannot be read: {error.strerror}. Make it readable, or leave it out of config.data."
        ) from error


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def synthetic(_: Data, documents: int = 200) -> list[Document]:
    """Made-up text, for trying things out: words of a small made-up vocabulary, some following others more often."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    words = [rng.choice(letters, rng.integers(2, 9)).tobytes() for _ in range(64)]
    following = rng.integers(0, len(words), (len(words), 4))
    made = []
    for number in range(documents):
        word, text = 0, []
        for choice in rng.integers(0, 4, rng.integers(300, 3000)):
            word = following[word, choice]
            text.append(words[word])
        made.append(Document(f"{number:04}", b" ".join(text) + b".\n"))
    return made


SOURCES: dict[str, Callable[[Data], list[Document]]] = {"stdlib": stdlib, "text": text, "synthetic": synthetic}


def is_heldout(name: str, percent: float) -> bool:
    """A fixed rule: the hash of a document's name is uniform, and its lowest `percent` are held out."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


def load_documents(data: Data) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each sorted by name; empty ones are left out.

    Raises InputError if one of the two would be empty.
    """
    documents = sorted(d for d in SOURCES[data.source](data) if d.raw)
    heldout = [d for d in documents if is_heldout(d.name, data.heldout_percent)]
    train = [d for d in documents if not is_heldout(d.name, data.heldout_percent)]
    if not train or not heldout:
        raise InputError(
            f"data.source={data.source!r} has {len(documents)} documents that are not empty, of which {len(heldout)} are "
            f"held out with config.data.heldout_percent={data.heldout_percent}; at least one must be held out and one "
            "left for training. Change the percentage, or add documents."
        )
    return train, heldout
