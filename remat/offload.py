"""Saved tensors that wait in the host's memory: what that costs, and whether the gradients come out right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from device_kinds import DeviceKind
from remat.graph import BlockGraph, Need


def with_offload(graph: BlockGraph, needs: list[Need], kind: DeviceKind, host_bytes_per_layer: float) -> list[Need]:
    """The policies that some of their saved tensors, or the layer's input, make by waiting on the host instead.

    A copy hides behind the work of a layer: out behind its forward pass, back behind the backward pass of the layer
    before. What is longer is waited for; modelled. Of two choices that move equally many bytes one is enough.

    Args:
      needs: policies without offloading.
      host_bytes_per_layer: what a layer may keep on the host.
    Returns:
      Only those that are not beaten in bytes on the device and in seconds, by one another or by `needs`.
    """
    found: list[tuple[float, float, int, int]] = []  # bytes left on the device, seconds, policy, set as bits
    names = [_movable(graph, need) for need in needs]
    for i, (need, movable) in enumerate(zip(needs, names, strict=True)):
        sizes = np.array([graph.bytes_of(n) for n in movable], float)
        sets = np.arange(1, 2 ** len(movable))
        moved, first = np.unique(((sets[:, None] >> np.arange(len(movable))) & 1) @ sizes, return_index=True)
        copy = moved / kind.host_bandwidth
        waits = np.maximum(copy - graph.forward_seconds, 0)
        waits += np.maximum(copy - 2 * graph.forward_seconds - need.seconds, 0)
        usable = moved <= host_bytes_per_layer
        found += [
            (need.saved_bytes - m, need.seconds + w, i, int(sets[f]))
            for m, w, f in zip(moved[usable], waits[usable], first[usable], strict=True)
        ]
    plain = [(float(n.saved_bytes), n.seconds, i, 0) for i, n in enumerate(needs)]
    best, kept = np.inf, []
    for device_bytes, seconds, i, bits in sorted(found + plain):
        if seconds < best:
            best = seconds
            if bits:
                kept.append(_moved(graph, needs[i], names[i], bits, int(device_bytes), seconds))
    return kept


def _movable(graph: BlockGraph, need: Need) -> list[str]:
    """Names whose tensors a policy keeps."""
    own = [graph.input_name] if graph.input_name and need.keeps_input else []
    return [*own, *(n for n in graph.names if n in need.saved)]


def _moved(graph: BlockGraph, need: Need, names: list[str], bits: int, device_bytes: int, seconds: float) -> Need:
    offloaded = frozenset(n for i, n in enumerate(names) if bits >> i & 1)
    return dataclasses.replace(
        need,
        saved=need.saved - offloaded,
        saved_bytes=device_bytes,
        seconds=seconds,
        offloaded=offloaded,
        offloaded_bytes=need.saved_bytes - device_bytes,
    )


def why_not(mesh, allowed: str) -> str:
    """Why nothing may be offloaded on the devices of a mesh; empty if it may.

    Args:
      allowed: `memory.offload`. "checked" runs a small model here, with and without, and compares the gradients:
        compilers have got them wrong (docs/planning.md).
    """
    device = mesh.devices.flat[0]
    if allowed == "never":
        return "config.memory.offload is 'never'"
    if device.platform == "cpu":
        return "on CPU the devices' memory is the host's"
    if allowed == "assumed":
        return ""
    if device not in jax.devices():
        return "the devices are not here to check its gradients; config.memory.offload='assumed' goes without"
    return check_gradients()


def check_gradients(width: int = 256, layers: int = 3) -> str:
    """Whether offloading changes gradients on the devices here: what went wrong, empty if nothing did."""

    def gradient(policy):
        def layer(x, w):
            return jnp.tanh(checkpoint_name(x @ w, "saved")), None

        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        loss = lambda w, x: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)  # noqa: E731
        w = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
        return jax.jit(jax.grad(loss))(w, jax.random.normal(jax.random.key(1), (width, width)))

    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["saved"], offload_src="device", offload_dst="pinned_host"
    )
    try:
        moved, kept = np.asarray(gradient(offload)), np.asarray(gradient(policies.save_only_these_names("saved")))
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return f"a small model with offloading does not run here: {str(error).splitlines()[0]}"
    if not np.allclose(moved, kept, rtol=1e-5, atol=1e-6):
        return f"the gradients of a small model with offloading are off by up to {np.abs(moved - kept).max():.2g} here"
    return ""
