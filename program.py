"""A model on a mesh: its state, and its steps ready to be compiled.

Dimensions, as suffixes: A microbatches of a step, B batch, L length, D embed. A batch is a dict of arrays
[A, B, L]: inputs, targets, positions, segment_ids (int32) and weights (1 where the target counts).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import Config
from losses import cross_entropy_sums
from model.attention import choose_kernel
from model.stack import Segment
from model.transformer import Transformer
from optimizer import make_optimizer, schedule
from parallel.sharding import like_parameters, on_mesh, sharding, tree_shardings
from remat.plan import plan_segments
from remat.trace import model_flops

Batch = dict[str, Any]

# XLA must not recompute by itself what a plan saves: what is compiled here is what the plan says, or it is refused.
jax.config.update("jax_compiler_enable_remat_pass", False)


@flax.struct.dataclass
class State:
    """All that a step changes. `step` counts updates done."""

    step: Any
    params: Any
    opt_state: Any


class Program:
    """A model on a mesh: its state, and its steps ready to be compiled. Making one allocates nothing."""

    def __init__(self, config: Config, mesh: Mesh, segments: tuple[Segment, ...] | None = None):
        self.config, self.mesh = config, mesh
        self.segments = plan_segments(config) if segments is None else segments
        platform = mesh.devices.flat[0].platform
        kernel, self.kernel_note = choose_kernel(config.model, config.rules, config.context_length, platform)
        model = dataclasses.replace(config.model, attention_kernel=kernel)
        self.model = Transformer(model, self.segments, config.loss.gradient_dtype)
        self.tx = make_optimizer(config.optimizer, config.steps)

    def on_mesh(self):
        """Context in which to trace: activations get their shardings from it."""
        return on_mesh(self.mesh, self.config.rules)

    # State

    def _init_params(self, key: jax.Array):
        tokens = jnp.zeros((1, 1), jnp.int32)  # of a length that no other kernel takes
        model = self.model.clone(config=dataclasses.replace(self.model.config, attention_kernel="xla"))
        return model.init(key, tokens, tokens, tokens, deterministic=True)["params"]

    def _new_state(self, params) -> State:
        return State(step=jnp.zeros((), jnp.int32), params=params, opt_state=self.tx.init(params))

    @functools.cached_property
    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        with self.on_mesh():
            boxed = jax.eval_shape(lambda: self._init_params(jax.random.key(0)))
            state = jax.eval_shape(lambda boxes: self._new_state(nn.unbox(boxes)), boxed)
        params = tree_shardings(self.mesh, self.config.rules, boxed)
        split_params = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state.params, params)
        shardings = State(step=whole, params=params, opt_state=like_parameters(state.opt_state, split_params))
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings)

    @functools.cached_property
    def state_shardings(self) -> State:
        return jax.tree.map(lambda a: a.sharding, self.abstract_state)

    def init_state(self, params=None) -> State:
        """A state at step 0, every array made on the devices that hold it. `params`: instead of random ones."""
        with self.on_mesh():
            if params is not None:
                return jax.jit(self._new_state, out_shardings=self.state_shardings, donate_argnums=0)(params)
            return self.init_program(jax.random.key(self.config.seed))

    @functools.cached_property
    def init_program(self) -> Any:
        """The compiled function from a key to a new state; without its output shardings, parts would be made whole."""
        make = jax.jit(lambda key: self._new_state(nn.unbox(self._init_params(key))), out_shardings=self.state_shardings)
        key = jax.eval_shape(lambda: jax.random.key(0))
        whole = NamedSharding(self.mesh, PartitionSpec())
        with self.on_mesh():
            return make.lower(jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole)).compile()

    # Data

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of the arrays [A, B, L] of a training batch."""
        return sharding(self.mesh, self.config.rules, None, "batch", "length")

    @property
    def evaluation_sharding(self) -> NamedSharding:
        """Of the arrays [B, L] of an evaluation batch."""
        return sharding(self.mesh, self.config.rules, "batch", "length")

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a training batch."""
        c = self.config
        shape = (c.gradient_accumulation, c.global_batch_size // c.gradient_accumulation, c.context_length)
        return _arrays(shape, self.batch_sharding)

    def abstract_evaluation_batch(self) -> Batch:
        """Shapes, dtypes and shardings of an evaluation batch."""
        c = self.config
        rows = c.evaluation.batch_size or c.global_batch_size // c.gradient_accumulation
        return _arrays((rows, c.context_length), self.evaluation_sharding)

    # Steps

    def sums(self, params, batch: Batch, key: jax.Array | None, deterministic: bool, model=None) -> dict[str, jax.Array]:
        """Sums of the parts of the loss over the valid tokens of a batch [B, L]. `model`: instead of the program's own."""
        variables, model = {"params": params}, model or self.model
        inputs = batch["inputs"], batch["positions"], batch["segment_ids"]
        x_BLD: Any = model.apply(variables, *inputs, deterministic, key)
        logits: Any = functools.partial(model.apply, variables, method="logits")
        return cross_entropy_sums(logits, x_BLD, batch["targets"], batch["weights"], self.config.loss.chunk_length)

    @functools.cached_property
    def model_flops(self) -> int:
        """FLOPs of the matrix products of a step on all devices, recompute apart."""
        return model_flops(self)

    def train_step(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """One update from a batch [A, B, L]. The loss is a mean over the valid tokens of all microbatches."""
        config = self.config
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        # Known before any loss is, so that microbatches simply add up, however many tokens each of them has.
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1)

        def loss_fn(params, microbatch, key):
            sums = self.sums(params, microbatch, key, deterministic=False)
            loss = sums["nll"] / tokens
            return loss + config.loss.z_loss * sums["log_z_squared"] / tokens, {"loss": loss}

        gradient_fn = jax.grad(loss_fn, has_aux=True)
        if config.gradient_accumulation == 1:
            gradients, values = gradient_fn(state.params, jax.tree.map(lambda a: a[0], batch), key)
        else:
            gradients, values = self._accumulate(gradient_fn, state.params, batch, key)
        updates, opt_state = self.tx.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        values |= {
            "gradient_norm": optax.tree.norm(gradients),
            "parameter_norm": optax.tree.norm(params),
            "learning_rate": schedule(config.optimizer, config.steps)(state.step),
            "tokens": tokens,
        }
        return State(step=state.step + 1, params=params, opt_state=opt_state), values

    def _accumulate(self, gradient_fn: Callable, params, batch: Batch, key: jax.Array):
        """Gradients and metrics added up over the microbatches, one at a time."""

        def add(total, inputs):
            microbatch, i = inputs
            part = gradient_fn(params, microbatch, jax.random.fold_in(key, i))
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part), None

        dtype = self.config.loss.gradient_dtype
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, dtype)), params)
        zeros = jax.lax.with_sharding_constraint(zeros, self.state_shardings.params)
        total = zeros, {"loss": jnp.zeros((), jnp.float32)}
        return jax.lax.scan(add, total, (batch, jnp.arange(self.config.gradient_accumulation)))[0]

    def compile_train_step(self):
        """The compiled step `(state, batch) -> (state, metrics)`; the new state takes the old one's memory over."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        step = jax.jit(self.train_step, out_shardings=(self.state_shardings, whole), donate_argnums=0)
        with self.on_mesh():
            return step.lower(self.abstract_state, self.abstract_batch()).compile()

    @functools.cached_property
    def evaluation_step(self) -> Any:
        """The compiled function `(params, batch [B, L]) -> sums` of `sums`; without a backward pass, one for all plans."""
        plain = self.model.clone(segments=(Segment(0, self.config.model.num_layers),))
        step = jax.jit(functools.partial(self.sums, key=None, deterministic=True, model=plain))
        with self.on_mesh():
            return step.lower(self.abstract_state.params, self.abstract_evaluation_batch()).compile()


def _arrays(shape: tuple[int, ...], of: NamedSharding) -> Batch:
    dtypes = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}
    return {k: jax.ShapeDtypeStruct(shape, dtype, sharding=of) for k, dtype in dtypes.items()}
