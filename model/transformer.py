"""The decoder: embed, a scanned stack of checkpointed blocks, norm, head.

Dimensions, as suffixes: B batch, L length, D embed, V vocab.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from configs.schema import Model
from model.layers import Block, RMSNorm, dropout, project
from model.stack import Segment, run_segments, static_bool
from parallel.sharding import constrain


class Transformer(nn.Module):
    """A decoder-only language model.

    `segments` say what the blocks save for the backward pass; they change memory and time, never the
    parameters or the gradients.
    """

    config: Model
    segments: Sequence[Segment]
    gradient_dtype: str = "float32"

    def setup(self):
        c = self.config
        dtype = jnp.dtype(c.param_dtype)
        init = nn.initializers.normal
        table = nn.with_logical_partitioning(init(c.embed_dim**-0.5 if c.tie_embeddings else 1.0), ("vocab", "embed"))
        self.embedding: Any = self.param("embedding", table, (c.vocab_size, c.embed_dim), dtype)
        self.block = Block(c, self.gradient_dtype)
        self.final_norm = RMSNorm(c.norm_epsilon, c.param_dtype)
        if not c.tie_embeddings:
            head = nn.with_logical_partitioning(init(c.embed_dim**-0.5), ("embed", "vocab"))
            self.head: Any = self.param("head", head, (c.embed_dim, c.vocab_size), dtype)

    def __call__(self, tokens_BL, positions_BL, segment_ids_BL, deterministic: bool, key=None):
        """Hidden states x_BLD after the last norm, in the compute dtype; `logits` turns them into logits.

        Args:
          tokens_BL, positions_BL, segment_ids_BL: int32. Tokens attend to earlier ones of the same segment.
          deterministic: a Python bool; True turns dropout off.
          key: the step's dropout key; needed when there is dropout.
        """
        c, deterministic = self.config, static_bool(deterministic, "Transformer")
        if deterministic or c.dropout_rate == 0:
            key = None
        elif key is None:
            raise ValueError("dropout needs a key: pass key=jax.random.key(...), or deterministic=True")
        # Gathered over fsdp before the look-up; looked up before the cast, so that its gradient adds up in float32.
        table_VD = constrain(self.embedding, "vocab", None)
        x_BLD = jnp.take(table_VD, tokens_BL, axis=0).astype(c.compute_dtype)
        if c.tie_embeddings:
            x_BLD = x_BLD * jnp.asarray(c.embed_dim**0.5, x_BLD.dtype)
        x_BLD = constrain(x_BLD, "batch", "length", "embed")
        x_BLD = dropout(x_BLD, c.dropout_rate, key, c.num_layers, deterministic)
        x_BLD = run_segments(
            self.block, self.segments, c.num_layers, x_BLD, key, positions_BL, segment_ids_BL,
            deterministic=deterministic,
        )  # fmt: skip
        return self.final_norm(x_BLD)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Logits_BLV in float32, of hidden states x_BLD."""
        c = self.config
        kernel_DV = self.embedding.T if c.tie_embeddings else self.head
        logits_BLV = project("BLD,DV->BLV", x_BLD, kernel_DV, self.gradient_dtype, jnp.promote_types(x_BLD.dtype, jnp.float32))
        logits_BLV = constrain(logits_BLV, "batch", "length", "vocab")
        if c.logit_soft_cap:
            logits_BLV = c.logit_soft_cap * jnp.tanh(logits_BLV / c.logit_soft_cap)
        return logits_BLV
