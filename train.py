"""The training loop: from the newest checkpoint, or the start, to the last step."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time

import jax
from jax.sharding import Mesh

import metrics
from checkpointing import Checkpointer, check_same_data, load_parameters
from configs.schema import Config
from evaluate import evaluate
from generate import encode_prompt, sample_text
from input_pipeline import Data, load_data, order2_bits_per_byte, train_batches
from plots import loss_picture
from profiling import Profiler
from program import Program, State
from remat.planner import decide_and_compile
from remat.report import summary, write


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
        if (done := checkpoints.latest_step() or 0) >= config.steps:
            metrics.say(f"nothing to do: {done} steps are done. Raise --config.steps to go on.")
            return
        # Before anything is on the devices: what is in use there now is in use by others.
        began = time.perf_counter()
        plan, program, step_fn = decide_and_compile(functools.partial(Program, config, mesh))
        metrics.say(f"{summary(plan)} ({time.perf_counter() - began:.1f} s to plan and compile)")
        state, examples = start_state(program, data, checkpoints)
        first = int(state.step)
        if jax.process_index() == 0:
            (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
            write(plan, program, lambda: step_fn, "", workdir)
        batches = train_batches(
            data.train,
            seed=config.seed,
            microbatches=config.gradient_accumulation,
            batch_size=config.global_batch_size // config.gradient_accumulation,
            sharding=program.batch_sharding,
            first_example=examples,
            prefetch=config.data.prefetch_batches,
        )
        profiler = Profiler(workdir / "profile", config.profile.steps)
        with contextlib.closing(batches), metrics.Reporter(workdir, first, program, plan.expected_peaks) as report, profiler:
            pending = None
            for step in range(first + 1, config.steps + 1):
                batch = report.next_batch(batches)
                with profiler.step(step) as results:
                    state, values = step_fn(state, batch)
                    results.append(values)
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
        if jax.process_index() == 0 and (picture := loss_picture(workdir)):
            metrics.say(f"the losses are drawn in {picture}")
        if config.data.tokenizer == "bytes":
            baseline = order2_bits_per_byte((d.raw for d in data.train_documents), (d.raw for d in data.heldout_documents))
            metrics.say(f"an order-2 model (two bytes of context, add-one smoothing) needs {baseline:.4f} bits per byte")
        if config.sample.length:
            metrics.say("a sample:")
            metrics.say_samples(sample_text(program, state.params, data.tokenizer, config.sample), config.sample)
