"""The train step and the loop.

Dimensions, as suffixes: A microbatches of a step, B batch, L length, D embed. A batch is a dict of arrays
[A, B, L]: inputs, targets, positions, segment_ids (int32) and weights (1 where the target counts).
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import metrics
from checkpointing import Checkpointer, check_same_data, load_parameters
from configs.schema import Config, InputError
from evaluate import evaluate
from generate import encode_prompt, sample_text
from input_pipeline import Data, load_data, model_tokenizer, order2_bits_per_byte, train_batches
from losses import cross_entropy_sums
from model.attention import choose_kernel
from model.transformer import Transformer
from optimizer import make_optimizer, schedule
from parallel.sharding import like_parameters, on_mesh, sharding, tree_shardings
from remat.plan import plan_segments

Batch = dict[str, Any]


@flax.struct.dataclass
class State:
    """All that a step changes. `step` counts updates done."""

    step: Any
    params: Any
    opt_state: Any


class Program:
    """A model on a mesh: its state, and its steps ready to be compiled. Making one allocates nothing."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.segments = plan_segments(config)
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
        """The jitted function from a key to a new state; without its output shardings, parts would be made whole."""
        return jax.jit(lambda key: self._new_state(nn.unbox(self._init_params(key))), out_shardings=self.state_shardings)

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
        dtypes = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), jnp.int32) | {"weights": jnp.float32}
        return {k: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding) for k, dtype in dtypes.items()}

    # Steps

    def sums(self, params, batch: Batch, key: jax.Array | None, deterministic: bool) -> dict[str, jax.Array]:
        """Sums of the parts of the loss over the valid tokens of a batch [B, L]."""
        variables = {"params": params}
        inputs = batch["inputs"], batch["positions"], batch["segment_ids"]
        x_BLD: Any = self.model.apply(variables, *inputs, deterministic, key)
        logits: Any = functools.partial(self.model.apply, variables, method="logits")
        return cross_entropy_sums(logits, x_BLD, batch["targets"], batch["weights"], self.config.loss.chunk_length)

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
    def evaluation_step(self) -> Callable[[Any, Batch], dict[str, jax.Array]]:
        return jax.jit(functools.partial(self.sums, key=None, deterministic=True))


def describe_checkpoint(program: Program, data: Data, examples: int) -> dict:
    """What is stored beside the state: enough to go on with the data, and to tell what the state is of."""
    return {
        "config": dataclasses.asdict(program.config),
        "plan": {"segments": [dataclasses.asdict(segment) for segment in program.segments]},
        "data": {"examples": examples, "seed": program.config.seed, **data.fingerprint},
    }


def start_state(program: Program, data: Data, checkpoints: Checkpointer) -> tuple[State, int]:
    """The state to go on from and the number of examples consumed: the newest checkpoint's, or a new one."""
    config, step = program.config, checkpoints.latest_step()
    if step is not None:
        stored = checkpoints.read_meta(step)["data"]
        check_same_data(step, stored, describe_checkpoint(program, data, stored["examples"])["data"])
        state = checkpoints.restore(step, program.abstract_state)
        metrics.say(f"resuming from the checkpoint of step {step}")
        return state, stored["examples"]
    if config.init_from:
        convert = config.checkpoint.convert_dtype
        params = load_parameters(config.init_from, program.abstract_state.params, convert_dtype=convert)
        metrics.say(f"parameters taken from {config.init_from}")
        return program.init_state(params), 0
    return program.init_state(), 0


def train(config: Config, mesh: Mesh, workdir: pathlib.Path) -> None:
    """Trains up to `config.steps`, from the newest checkpoint in the workdir if there is one."""
    program, data = Program(config, mesh), load_data(config)
    metrics.say(metrics.describe_run(program, data))
    if config.sample.length:  # better refused now than after the training
        encode_prompt(data.tokenizer, config.sample.prompt, config.context_length)
    with Checkpointer(workdir, config.checkpoint) as checkpoints:
        state, examples = start_state(program, data, checkpoints)
        first = int(state.step)
        if first >= config.steps:
            metrics.say(f"nothing to do: {first} steps are done. Raise --config.steps to go on.")
            return
        if jax.process_index() == 0:
            (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        began = time.perf_counter()
        step_fn = program.compile_train_step()
        metrics.say(f"compiled the train step in {time.perf_counter() - began:.1f} s")
        batches = train_batches(
            data.train,
            seed=config.seed,
            microbatches=config.gradient_accumulation,
            batch_size=config.global_batch_size // config.gradient_accumulation,
            sharding=program.batch_sharding,
            first_example=examples,
            prefetch=config.data.prefetch_batches,
        )
        with contextlib.closing(batches), metrics.Reporter(workdir, first, config.steps, config.log_every_steps) as report:
            pending = None
            for step in range(first + 1, config.steps + 1):
                state, values = step_fn(state, next(batches))
                examples += config.global_batch_size
                # The step before is read only now, when this one is under way: the devices never wait for the host.
                if pending:
                    report.step(*pending)
                pending = step, values
                last = step == config.steps
                evaluating = last or (config.evaluation.every_steps and step % config.evaluation.every_steps == 0)
                saving = last or checkpoints.should_save(step)
                if evaluating or saving:
                    report.step(*pending)
                    pending = None
                if evaluating:
                    report.evaluation(step, evaluate(program, state.params, data))
                if saving:  # after the rows of this step are written: whoever goes on from here finds them there
                    checkpoints.save(step, state, describe_checkpoint(program, data, examples))
                if evaluating or saving:
                    report.restart_clock()
        if config.data.tokenizer == "bytes":
            baseline = order2_bits_per_byte((d.raw for d in data.train_documents), (d.raw for d in data.heldout_documents))
            metrics.say(f"an order-2 model (two bytes of context, add-one smoothing) needs {baseline:.4f} bits per byte")
        if config.sample.length:
            metrics.say("a sample:")
            metrics.say_samples(sample_text(program, state.params, data.tokenizer, config.sample), config.sample)


def newest_parameters(program: Program, workdir: pathlib.Path) -> tuple[int, Any]:
    """The step and the parameters of the newest checkpoint. Raises InputError if there is none."""
    with Checkpointer(workdir, program.config.checkpoint, read_only=True) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise InputError(f"There is no checkpoint in {workdir}: train first, or give another --workdir.")
    folder, convert = workdir / "checkpoints" / str(step), program.config.checkpoint.convert_dtype
    return step, load_parameters(str(folder), program.abstract_state.params, convert_dtype=convert)


def evaluate_newest(config: Config, mesh: Mesh, workdir: pathlib.Path) -> None:
    """Prints the evaluation of the newest checkpoint; writes nothing."""
    program, data = Program(config, mesh), load_data(config)
    step, params = newest_parameters(program, workdir)
    metrics.say(f"step {step}: {metrics.describe(evaluate(program, params, data))}")


def generate_newest(config: Config, mesh: Mesh, workdir: pathlib.Path) -> None:
    """Prints samples from the newest checkpoint; writes nothing."""
    program, tokenizer = Program(config, mesh), model_tokenizer(config)
    encode_prompt(tokenizer, config.sample.prompt, config.context_length)
    _, params = newest_parameters(program, workdir)
    metrics.say_samples(sample_text(program, params, tokenizer, config.sample), config.sample)
