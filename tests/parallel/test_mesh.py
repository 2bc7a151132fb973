"""The mesh takes the devices it is meant for, or says why not."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from configs.schema import InputError, Mesh
from parallel.mesh import _arrange, make_mesh
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


def _slices(slices, each):
    """Devices as those of several TPU slices or GPU nodes look."""
    return [
        types.SimpleNamespace(id=i, slice_index=i // each, process_index=i // each, platform="gpu", device_kind="fake")
        for i in range(slices * each)
    ]


@pytest.mark.parametrize(
    "slices, each, shape, across",
    [(2, 4, (2, 2, 2), "data"), (4, 2, (4, 2, 1), "data"), (2, 4, (1, 4, 2), "fsdp"), (2, 4, (4, 2, 1), "data")],
)
def test_only_the_outermost_possible_axis_crosses_slices(slices, each, shape, across):
    grid = _arrange(shape, _slices(slices, each))
    where = np.vectorize(lambda device: device.slice_index)(grid)
    assert grid.shape == shape and len({d.id for d in grid.flat}) == slices * each
    for axis, name in enumerate(("data", "fsdp", "tensor")):
        same = np.ptp(where, axis=axis).max() == 0 if shape[axis] > 1 else True
        assert same == (name != across)


def test_slices_that_no_axis_can_be_split_over_are_refused():
    with pytest.raises(InputError, match="come in 3 slices, but no axis of the mesh data=2, fsdp=2, tensor=2"):
        _arrange((2, 2, 2), _slices(3, 3)[:-1] + _slices(1, 1)[:0] + _slices(3, 3)[-1:])


def test_uneven_slices_are_refused():
    with pytest.raises(InputError, match=r"The slices have \[2, 4\] devices"):
        _arrange((2, 3, 1), _slices(2, 4)[:6])
