"""Profiles of a few steps, on request: `config.profile.steps`."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax


class Profiler:
    """A context manager that records the steps from the first to the last of `steps` into `folder`.

    TensorBoard (with xprof), Perfetto and `jax.profiler.ProfileData` read what it writes.
    """

    def __init__(self, folder: pathlib.Path, steps: tuple):
        self._folder, self._steps, self._on = folder, steps, False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_) -> None:
        if self._on:  # training ended, or failed, within the range
            jax.profiler.stop_trace()
            self._on = False

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[list]:
        """Dispatch step `step` inside it, and append what it returns to the list."""
        results: list = []
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._on:
            jax.profiler.start_trace(self._folder)
            self._on = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield results
        if self._on and step == self._steps[1]:
            jax.block_until_ready(results)  # or the device would do part of its work after the profile's end
            self.__exit__()
