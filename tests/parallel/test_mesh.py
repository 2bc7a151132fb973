"""The mesh takes the devices it is meant for, or says why not."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from configs.schema import InputError, Mesh
from parallel.mesh import _arrange, make_mesh, start
from tests import tiny


def _make(count=8, **mesh):
    config = dataclasses.replace(tiny.CONFIG, mesh=Mesh(**mesh), global_batch_size=16)
    return make_mesh(config, jax.devices()[:count])


@pytest.mark.parametrize(
    "mesh, shape",
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ({"data": -1, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ({"data": 1, "fsdp": -1, "tensor": 1}, (1, 8, 1)),
        ({"data": 4, "fsdp": 2, "tensor": -1}, (4, 2, 1)),
        ({"data": 4, "fsdp": 1, "tensor": 1, "num_devices": 4}, (4, 1, 1)),
        ({"data": -1, "fsdp": 1, "tensor": 1, "num_devices": 2}, (2, 1, 1)),
    ],
)
def test_axes_take_all_devices_or_as_many_as_asked_for(mesh, shape):
    made = _make(**mesh)
    assert tuple(made.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), shape, strict=True))
    assert len(set(made.devices.flat)) == np.prod(shape)


@pytest.mark.parametrize(
    "count, mesh, told",
    [
        (8, {"data": 4, "fsdp": 1, "tensor": 1}, "takes 4 devices, but there are 8 .*use only 4 .*num_devices=4"),
        (8, {"data": 16, "fsdp": 1, "tensor": 1}, "takes 16 devices, but there are 8 cpu devices"),
        (8, {"data": -1, "fsdp": 3, "tensor": 1}, "needs a multiple of 3 devices, but there are 8 cpu devices"),
        (1, {"data": -1, "fsdp": 2, "tensor": 2}, "needs a multiple of 4 devices, but there are 1 cpu device"),
        (8, {"data": 4, "fsdp": 2, "tensor": 1, "num_devices": 4}, "takes 8 devices, but config.mesh.num_devices=4 asks for 4"),
        (8, {"data": -1, "num_devices": 16}, "num_devices is 16, but JAX sees 8 cpu devices"),
    ],
)  # fmt: skip
def test_other_numbers_of_devices_are_refused(count, mesh, told):
    with pytest.raises(InputError, match=told):
        _make(count, **mesh)


def test_a_process_without_a_device_is_refused():
    config = dataclasses.replace(tiny.CONFIG, mesh=Mesh(data=2, fsdp=2, num_devices=4))
    with pytest.raises(InputError, match="num_devices is 4, which leaves some of the 2 processes without a device"):
        make_mesh(config, _slices(2, 4))


@pytest.mark.parametrize(
    "flags, told",
    [
        (("host:1", 0, -1), "--process_id=-1 and --num_processes=0; with --coordinator_address both are needed"),
        (("host:1", 2, 2), "--process_id=2 and --num_processes=2"),
        (("", 2, 0), "do nothing without --coordinator_address"),
        (("", 0, 1), "do nothing without --coordinator_address"),
    ],
)
def test_flags_of_several_processes_come_together(flags, told):
    with pytest.raises(InputError, match=told):
        start(tiny.CONFIG, *flags)


def _slices(slices, each, platform="gpu"):
    """Devices as those of several GPU nodes or TPU slices look; TPUs have a place in a grid, two wide."""

    def device(i):
        place = {"coords": (i % each // 2, i % each % 2, 0), "core_on_chip": 0} if platform == "tpu" else {}
        kind = "TPU v5 lite" if platform == "tpu" else "fake"
        return types.SimpleNamespace(
            id=i, slice_index=i // each, process_index=i // each, platform=platform, device_kind=kind, **place
        )

    return [device(i) for i in range(slices * each)]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "slices, each, shape, across",
    [(2, 4, (2, 2, 2), "data"), (4, 2, (4, 2, 1), "data"), (2, 4, (1, 4, 2), "fsdp"), (2, 4, (4, 2, 1), "data")],
)
def test_only_the_outermost_possible_axis_crosses_slices(slices, each, shape, across, platform):
    mixed = np.random.default_rng(0).permutation(np.array(_slices(slices, each, platform)))
    grid = _arrange(shape, list(mixed))
    where = np.vectorize(lambda device: device.slice_index)(grid)
    assert grid.shape == shape and len({d.id for d in grid.flat}) == slices * each
    crosses = [name for axis, name in enumerate(("data", "fsdp", "tensor")) if np.ptp(where, axis=axis).any()]
    assert crosses == [across]


def test_slices_that_no_axis_can_be_split_over_are_refused():
    with pytest.raises(InputError, match="in 4 slices, but no axis of the mesh data=2, fsdp=2, tensor=2 is a multiple of 4"):
        _arrange((2, 2, 2), _slices(4, 2))


def test_uneven_slices_are_refused():
    with pytest.raises(InputError, match=r"The slices have \[2, 4\] devices"):
        _arrange((2, 3, 1), _slices(2, 4)[:6])
