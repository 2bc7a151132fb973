"""AdamW as a readable optax chain, and its learning rate schedule."""

import jax
import optax

from configs.schema import Optimizer

# Decay acts on matrices. Neither rank nor size can tell: scanned layers stack norm scales to [layers, embed].
DECAYED = {"kernel", "embedding", "head"}
NOT_DECAYED = {"scale", "bias"}


def schedule(settings: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warmup from 0, then half a cosine down to the final fraction at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=max(steps, settings.warmup_steps + 1),
        end_value=settings.learning_rate * settings.final_learning_rate_fraction,
    )


def decay_mask(params):
    """True for the parameters that weight decay acts on.

    Raises ValueError for a parameter whose name is in neither list: a new kind of parameter must be put in one.
    """

    def decays(path, _):
        name = path[-1].key
        if name not in DECAYED | NOT_DECAYED:
            raise ValueError(
                f"Does weight decay act on {jax.tree_util.keystr(path)}? Add {name!r} to DECAYED or NOT_DECAYED in "
                "optimizer.py."
            )
        return name in DECAYED

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(settings: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (arXiv:1711.05101) with decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity(),
        optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.epsilon),
        optax.add_decayed_weights(settings.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule(settings, steps)),
    )
