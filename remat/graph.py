"""One block as a graph: what its backward pass needs, and what it costs to compute again whatever is not saved.

Read off a trace of the real block on the real mesh: someone who adds a tensor to the block and names it needs to
touch nothing else. All bytes, FLOPs and seconds are those of one device.

Seconds are modelled, not timed (roofline, doi:10.1145/1498765.1498785): a matrix product or a kernel takes the longer
of its FLOPs at the device's peak and its bytes at the memory's bandwidth; element by element work takes what it writes;
a product that sums over devices takes a ring all-reduce of its result.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from device_kinds import DeviceKind
from remat.specs import Spec, propagate
from remat.trace import inner_jaxprs, matmul_flops


@dataclasses.dataclass(frozen=True)
class Need:
    """What one layer needs for its backward pass, where the names in `saved` are saved.

    Attributes:
      saved: those that save something; a name whose tensor nobody asks for any more is not among them.
      saved_bytes: of theirs, and of the layer's input where it is still needed.
      offloaded, offloaded_bytes: those that wait on the host, and their bytes; not among the saved ones.
      flops, seconds: of what is computed again; FLOPs of matrix products, seconds modelled.
      keeps_input: whether the layer's input is among the bytes that are kept.
    """

    saved: frozenset[str]
    saved_bytes: int
    flops: float
    seconds: float
    offloaded: frozenset[str] = frozenset()
    offloaded_bytes: int = 0
    keeps_input: bool = True


@dataclasses.dataclass
class _Equation:
    inputs: list[int]
    name: str | None  # set if it names a tensor
    flops: float = 0.0
    seconds: float = 0.0


class BlockGraph:
    """The equations of a block's forward pass, inlined, and the values that its backward pass asks for.

    Args:
      jaxpr: of a function from a block's inputs to its output and the residuals of its backward pass.
      specs: of each input how the mesh splits it.
      carry: the position of the input that comes from the layer before.
      axis_sizes: devices on each mesh axis.
      lanes: numbers that a named tensor's last dimension is filled up to a multiple of, in memory. On TPU 128.
    """

    def __init__(self, jaxpr, specs: list[Spec], carry: int, axis_sizes: dict[str, int], kind: DeviceKind, lanes: int = 1):
        self._axis_sizes, self._kind, self._lanes = axis_sizes, kind, lanes
        self._equations: list[_Equation] = []
        self._producer: dict[int, int] = {}  # of a value: its equation
        self._bytes: list[int] = []  # of a value
        self._specs: list[Spec] = []
        env: dict = {}
        for var, spec in zip(jaxpr.jaxpr.invars, specs, strict=True):
            env[var] = self._value(var.aval, spec)
        for var in jaxpr.jaxpr.constvars:
            env[var] = self._value(var.aval, ((),) * var.aval.ndim)
        self._carry = env[jaxpr.jaxpr.invars[carry]]
        self._reads: list[tuple[int, str]] = []  # (value, primitive that reads it)
        self._inline(jaxpr.jaxpr, env, local=False)
        outputs = [env[v] for v in jaxpr.jaxpr.outvars if not hasattr(v, "val")]
        self._residuals = list(dict.fromkeys(outputs[1:]))
        self._charge_for_writes()

    # Building

    def _value(self, aval, spec: Spec, local: bool = False) -> int:
        shards = 1 if local else math.prod(self._axis_sizes[axis] for axes in spec for axis in axes)
        self._bytes.append(-(-aval.size * _itemsize(aval.dtype) // shards))
        self._specs.append(spec)
        return len(self._bytes) - 1

    def _inline(self, jaxpr, env: dict, local: bool) -> None:
        """Adds the equations of a jaxpr; those of calls are put in their place. `local`: shapes are a device's own."""
        for equation in jaxpr.eqns:
            primitive = equation.primitive.name
            called = next(iter(inner_jaxprs(equation)), None)
            if called is not None and primitive not in ("scan", "while", "cond", "pallas_call"):
                inputs = equation.invars[len(equation.invars) - len(called.invars) :]
                inside = {v: env[a] for v, a in zip(called.invars, inputs, strict=True) if not hasattr(a, "val") and a in env}
                for var in (*called.constvars, *(v for v in called.invars if v not in inside)):
                    inside[var] = self._value(var.aval, ((),) * var.aval.ndim, local)
                self._inline(called, inside, local or primitive == "shard_map")
                for var, out in zip(equation.outvars, called.outvars, strict=True):
                    if hasattr(out, "val"):
                        env[var] = self._value(var.aval, ((),) * var.aval.ndim, local)
                    else:
                        env[var] = inside[out]
                continue
            self._add(equation, primitive, env, local)

    def _add(self, equation, primitive: str, env: dict, local: bool) -> None:
        inputs = [env[v] for v in equation.invars if not hasattr(v, "val")]
        name = equation.params["name"] if primitive == "name" else None
        node = _Equation(inputs, name)
        specs = [self._specs[env[v]] if not hasattr(v, "val") else ((),) * v.aval.ndim for v in equation.invars]
        for var in equation.outvars:
            spec = ((),) * var.aval.ndim if local else propagate(equation, var, specs)
            env[var] = self._value(var.aval, spec, local)
            self._producer[env[var]] = len(self._equations)
            if name:
                self._fill_lanes(env[var], var.aval.shape, () if local else spec)
        if primitive == "dot_general":
            self._charge_for_product(node, equation, specs, env, local)
        elif primitive == "pallas_call" or "dot_product_attention" in primitive:
            node.flops = _kernel_flops(equation)
            node.seconds = self._roofline(node.flops, [*inputs, *(env[v] for v in equation.outvars)])
        elif primitive == "scan":
            node.flops = float(matmul_flops(equation.params["jaxpr"].jaxpr) * equation.params["length"])
        self._reads += [(i, primitive) for i in inputs]
        self._equations.append(node)

    def _fill_lanes(self, value: int, shape: tuple[int, ...], spec: Spec) -> None:
        last = -(-shape[-1] // math.prod(self._axis_sizes[axis] for axis in (spec[-1] if spec else ())))
        self._bytes[value] = self._bytes[value] * (-(-last // self._lanes) * self._lanes) // last

    def _charge_for_product(self, node: _Equation, equation, specs: list[Spec], env: dict, local: bool) -> None:
        (left, right), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        flops = 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in left)
        kept = {axis for axes in self._specs[env[equation.outvars[0]]] for axis in axes}
        # An axis that splits what is summed over, on both sides and nowhere else: each device has a part of the sum.
        summed = {a for i, j in zip(left, right, strict=True) for a in set(specs[0][i]) & set(specs[1][j])} - kept
        node.flops = flops if local else flops / math.prod(self._axis_sizes[axis] for axis in kept | summed)
        operands = [env[v] for v in (*equation.invars, *equation.outvars) if not hasattr(v, "val")]
        node.seconds = self._roofline(node.flops, operands)
        devices = math.prod(self._axis_sizes[axis] for axis in summed)
        out_bytes = self._bytes[env[equation.outvars[0]]]
        node.seconds += 2 * (devices - 1) / devices * out_bytes / self._kind.link_bandwidth

    def _roofline(self, flops: float, values: list[int]) -> float:
        moved = sum(self._bytes[v] for v in values)
        return max(flops / self._kind.peak_flops, moved / self._kind.memory_bandwidth)

    def _charge_for_writes(self) -> None:
        """Element by element work is fused into what reads it, unless a product, a kernel or the backward pass does."""
        written = {v for v, reader in self._reads if reader in ("dot_general", "pallas_call") or "attention" in reader}
        for value in written | set(self._residuals):
            if value in self._producer:
                equation = self._equations[self._producer[value]]
                if not equation.flops and equation.name is None:
                    equation.seconds += self._bytes[value] / self._kind.memory_bandwidth

    # Asking

    @functools.cached_property
    def names(self) -> list[str]:
        """All activation names, in the order in which they are computed."""
        return list(dict.fromkeys(e.name for e in self._equations if e.name))

    def bytes_of(self, name: str) -> int:
        """Of all tensors of this name."""
        return sum(self._bytes[v] for v, e in self._producer.items() if self._equations[e].name == name)

    @functools.cached_property
    def useful_names(self) -> list[str]:
        """The names whose tensors the backward pass asks for and would have to compute."""
        found = self._names_of(self._expand(frozenset())[1])
        return [n for n in self.names if n in found and any(map(self._costs, self._local_of(n)))]

    @functools.cached_property
    def input_name(self) -> str | None:
        """The name that the layer's input has inside the block."""
        return next((n for n in self.names if not any(map(self._costs, self._local_of(n))) and self._is_input(n)), None)

    def _is_input(self, name: str) -> bool:
        return any(self._local(v)[2] and not self._local(v)[1] for v in self._local_of(name))

    @functools.cached_property
    def forward_seconds(self) -> float:
        """Of one layer's forward pass; modelled."""
        return sum(e.seconds for e in self._equations)

    def why_useless(self, name: str) -> str:
        """For a name that is not among the useful ones, the reason."""
        if name not in self._names_of(self._expand(frozenset())[1]):
            return "the backward pass does not need it"
        return "the layer's input is kept anyway, and costs nothing to name again"

    def need(self, saved: frozenset[str]) -> Need:
        """What the layer needs where `saved` is saved. Names substitute for one another: only this search can tell."""
        equations, named, carry = self._expand(saved)
        kept = [v for v in named if self._name(v) in saved]
        return Need(
            saved=frozenset(self._names_of(kept)),
            saved_bytes=sum(self._bytes[v] for v in kept) + (self._bytes[self._carry] if carry else 0),
            flops=sum(self._equations[e].flops for e in equations),
            seconds=sum(self._equations[e].seconds for e in equations),
            keeps_input=carry,
        )

    def _expand(self, saved: frozenset[str]) -> tuple[set[int], set[int], bool]:
        """Equations to compute again, named values met, and whether the layer's input is met."""
        passed, met, carry = self._search(self._residuals)
        equations, named, todo = set(passed), set(met), list(met)
        while todo:
            value = todo.pop()
            if self._name(value) in saved:
                continue
            more, found, found_carry = self._local(value)
            equations |= more
            carry |= found_carry
            todo += [v for v in found if v not in named]
            named |= found
        return equations, named, carry

    def _name(self, value: int) -> str | None:
        return self._equations[self._producer[value]].name if value in self._producer else None

    def _names_of(self, values) -> set[str]:
        return {n for n in map(self._name, values) if n}

    def _costs(self, value: int) -> bool:
        equations, named, _ = self._local(value)
        return bool(named) or any(self._equations[e].seconds for e in equations)

    def _local_of(self, name: str) -> list[int]:
        return [v for v, e in self._producer.items() if self._equations[e].name == name]

    @functools.cache  # noqa: B019 (a graph lives as long as the plan is made)
    def _local(self, value: int) -> tuple[frozenset[int], frozenset[int], bool]:
        """The search from what a named value is computed of."""
        equation = self._producer[value]
        found = self._search(self._equations[equation].inputs)
        return found[0] | {equation}, found[1], found[2]

    def _search(self, values) -> tuple[frozenset[int], frozenset[int], bool]:
        """Back from values to the nearest named ones: equations passed, named values, whether the carry was met."""
        equations, named, carry, todo, seen = set(), set(), False, list(values), set()
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            carry |= value == self._carry
            if value not in self._producer:
                continue
            equation = self._producer[value]
            if self._equations[equation].name:
                named.add(value)
                continue
            equations.add(equation)
            todo += self._equations[equation].inputs
        return frozenset(equations), frozenset(named), carry


def _itemsize(dtype) -> int:
    return dtype.itemsize if hasattr(dtype, "itemsize") else 8  # a dropout key


def _kernel_flops(equation) -> float:
    """Of a kernel that holds its scores on the chip: the products inside, once a step of its grid, or q k v by shape."""
    if equation.primitive.name != "pallas_call":
        (b, t, n, h), s = equation.invars[0].aval.shape, equation.invars[1].aval.shape[1]
        return 4.0 * b * n * t * s * h
    grid = equation.params["grid_mapping"].grid
    return float(matmul_flops(equation.params["jaxpr"]) * math.prod(grid))


def subsets(names: list[str]) -> Iterator[frozenset[str]]:
    """All sets of these names."""
    return (frozenset(c) for size in range(len(names) + 1) for c in itertools.combinations(names, size))
