"""From a config to batches on the devices: documents, tokens, windows, and Grain."""

import dataclasses
import hashlib

from configs.schema import Config, InputError
from input_pipeline.baseline import order2_bits_per_byte
from input_pipeline.loader import evaluation_batches, train_batches
from input_pipeline.sources import Document, load_documents
from input_pipeline.tokenizer import Tokenizer, load_tokenizer
from input_pipeline.windows import WindowSource, tokenize

__all__ = ["Data", "evaluation_batches", "load_data", "model_tokenizer", "order2_bits_per_byte", "train_batches"]


@dataclasses.dataclass(frozen=True)
class Data:
    """Both splits. `fingerprint` tells whether data is the same as when a checkpoint was written."""

    train: WindowSource
    heldout: WindowSource
    tokenizer: Tokenizer
    train_documents: list[Document]
    heldout_documents: list[Document]
    heldout_bytes_per_token: float  # of the tokens that are predicted
    fingerprint: dict


def model_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer that `config.data` says. Raises InputError if the model's vocabulary is too small for it."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.size > config.model.vocab_size:
        raise InputError(
            f"config.model.vocab_size is {config.model.vocab_size}, but the tokenizer {config.data.tokenizer!r} has ids up "
            f"to {tokenizer.size - 1}; it must be at least {tokenizer.size}."
        )
    return tokenizer


def load_data(config: Config) -> Data:
    """Reads and tokenizes what `config.data` says. Raises InputError for whatever cannot be used."""
    tokenizer = model_tokenizer(config)
    train, heldout = load_documents(config.data)
    tokens = tokenize(train, tokenizer)
    heldout_windows = WindowSource(tokenize(heldout, tokenizer), tokenizer.bos_id, config.context_length)
    if not heldout_windows.num_targets:
        raise InputError(
            f"The tokenizer {config.data.tokenizer!r} makes no token of the {len(heldout)} held-out documents. Take another "
            "config.data.tokenizer, or hold out more with config.data.heldout_percent."
        )
    return Data(
        train=WindowSource(tokens, tokenizer.bos_id, config.context_length),
        heldout=heldout_windows,
        tokenizer=tokenizer,
        train_documents=train,
        heldout_documents=heldout,
        heldout_bytes_per_token=sum(len(d.raw) for d in heldout) / heldout_windows.num_targets,
        fingerprint={
            "source": config.data.source,
            "tokenizer": tokenizer.fingerprint,
            "documents": len(train),
            "tokens": len(tokens),
            "context_length": config.context_length,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
        },
    )
