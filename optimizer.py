"""The optimizers as readable optax chains, and the learning rate.

The parameters of the blocks are stacked, `[layers, ...]`. Whatever looks at more than one number at a time (a
matrix, its rows, its root mean square) must look at each layer by itself: `per_layer` sees to that.
"""

import math

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from configs.schema import Optimizer

# Decay acts on matrices. Neither rank nor size can tell: scanned layers stack norm scales to [layers, embed].
DECAYED = {"kernel", "embedding", "head"}
NOT_DECAYED = {"scale", "bias"}
# How many of a kernel's dimensions, the first ones, its product sums over: the rows of the matrix that it is.
SUMMED_DIMENSIONS = {"query": 1, "key": 1, "value": 1, "out": 2, "up": 1, "gate": 1, "down": 1}
FACTORED_FROM = 32  # the smallest row or column; below optax's 128, so that kernels with a head_dim of 64 are factored
STACKED = "block"  # the parameters under it have a leading dimension for the layers


def schedule(settings: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warmup from 0, then as `settings.schedule` says, to the final fraction at `steps`.

    cosine: half a cosine. linear: a line. wsd (MiniCPM, arXiv:2404.06395): constant, then a line over the last
    `decay_fraction` of the steps.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    final, left = peak * settings.final_learning_rate_fraction, max(steps - warmup, 1)
    if settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, left, alpha=settings.final_learning_rate_fraction)
    else:
        decay = left if settings.schedule == "linear" else min(max(round(settings.decay_fraction * steps), 1), left)
        after = optax.linear_schedule(peak, final, decay, transition_begin=left - decay)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after


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


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` for a tree with stacked parameters: each layer is transformed as if it were alone."""

    def split(tree):
        return {STACKED: tree[STACKED]}, {k: v for k, v in tree.items() if k != STACKED}

    def init(params):
        stacked, others = split(params)
        return jax.vmap(tx.init)(stacked), tx.init(others)

    def update(updates, state, params=None):
        (stacked, others), (stacked_params, other_params) = split(updates), split(params)
        stacked, stacked_state = jax.vmap(tx.update)(stacked, state[0], stacked_params)
        others, other_state = tx.update(others, state[1], other_params)
        return stacked | others, (stacked_state, other_state)

    return optax.GradientTransformation(init, update)


def _matrices(tree):
    """For Muon: which dimensions of each kernel are the rows of its matrix, and which the columns."""

    def dimensions(path, kernel):
        module = path[-2].key
        if module not in SUMMED_DIMENSIONS:
            raise ValueError(
                f"Which dimensions does the product with {jax.tree_util.keystr(path)} sum over? Add {module!r} to "
                "SUMMED_DIMENSIONS in optimizer.py."
            )
        rows = SUMMED_DIMENSIONS[module]
        return MuonDimensionNumbers(tuple(range(rows)), tuple(range(rows, kernel.ndim)))

    return jax.tree_util.tree_map_with_path(dimensions, tree)


def _muon(settings: Optimizer) -> optax.GradientTransformation:
    """Muon (Jordan, 2024, kellerjordan.github.io/posts/muon) for the kernels of the blocks, Adam for the rest.

    Scaled by 0.2 sqrt(max(rows, columns)), an update is as large as Adam's (arXiv:2502.16982), so that one
    learning rate and one weight decay serve both.
    """

    def labels(params):
        label = lambda path, _: "muon" if path[0].key == STACKED and path[-1].key == "kernel" else "adam"  # noqa: E731
        return jax.tree_util.tree_map_with_path(label, params)

    def as_large_as_adams(updates, _):
        def scaled(update, axes):
            return 0.2 * math.sqrt(max(math.prod(update.shape[i] for i in side) for side in axes)) * update

        return jax.tree.map(scaled, updates, _matrices(updates))

    orthogonal = scale_by_muon(beta=settings.momentum, weight_dimension_numbers=_matrices)
    muon = optax.chain(orthogonal, optax.stateless(as_large_as_adams))
    return optax.partition({"muon": per_layer(muon), "adam": _adam(settings)}, labels)


def _adam(settings: Optimizer) -> optax.GradientTransformation:
    """Adam (arXiv:1412.6980); with the decay of the chain below, AdamW (arXiv:1711.05101)."""
    return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.epsilon)


def _adafactor(_: Optimizer) -> optax.GradientTransformation:
    """Adafactor (arXiv:1804.04235): second moments kept as rows and columns, updates clipped to a root mean square of 1.

    Of a kernel of rank 3 the two largest dimensions are the rows and columns. Without the paper's scaling by the
    parameter's size, the learning rate means what it means for Adam.
    """
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=FACTORED_FROM)
    return per_layer(optax.chain(factored, optax.clip_by_block_rms(1.0)))


def make_optimizer(settings: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then `settings.name`, then decay on matrices only, then the learning rate."""
    scale = {"adamw": _adam, "adafactor": _adafactor, "muon": _muon}[settings.name](settings)
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity(),
        scale,
        optax.add_decayed_weights(settings.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule(settings, steps)),
    )
