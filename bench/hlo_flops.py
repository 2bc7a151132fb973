"""FLOPs of the matrix products in a compiled program's text, with the turns of its loops multiplied out.

XLA's own cost analysis counts the body of a loop once. Here every computation is counted as often as it is called: a
loop's turns are read off its counter (start, step, bound). Two FLOPs are one multiplication and one addition.
"""

import collections
import dataclasses
import math
import re


def _find(pattern: str, text: str) -> str:
    """What the group of a pattern matches first. Raises ValueError if nothing does."""
    if found := re.search(pattern, text):
        return found[1]
    raise ValueError(f"hlo_flops: no {pattern} in {text[:200]}")


@dataclasses.dataclass
class Instruction:
    name: str
    type: str
    op: str
    operands: list[str]
    text: str  # attributes included

    @property
    def shape(self) -> list[int]:
        return [int(d) for d in _find(r"^\w+\[([\d,]*)\]", self.type).split(",") if d]


class Program:
    """The computations of an optimised HLO module, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.entry = ""
        current = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                current = header[2]
                self.computations[current] = {}
                self.entry = current if header[1] else self.entry
            elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line):
                instruction = _parse(found[2], found[3])
                self.computations[current][instruction.name] = instruction
                if found[1]:
                    self.roots[current] = instruction

    def calls(self) -> dict[str, float]:
        """How often each computation runs in one run of the program."""
        order, seen = [], set()

        def visit(name):
            if name not in seen:
                seen.add(name)
                for called, _ in self._called(name):
                    visit(called)
                order.append(name)

        visit(self.entry)
        times = collections.defaultdict(float, {self.entry: 1.0})
        for name in reversed(order):
            for called, turns in self._called(name):
                times[called] += times[name] * turns
        return dict(times)

    def _called(self, name: str) -> list[tuple[str, int]]:
        found = []
        for instruction in self.computations[name].values():
            turns = self._turns(name, instruction) if instruction.op == "while" else 1
            for attribute in re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", instruction.text):
                found.append((attribute, turns))
            for several in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", instruction.text):
                found += [(one.strip().lstrip("%"), 1) for one in several.split(",")]
        return [(called, turns) for called, turns in found if called in self.computations]

    def _turns(self, where: str, loop: Instruction) -> int:
        """How often a loop turns. Raises ValueError if its counter cannot be read."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known[1])
        condition, body = (_find(rf"{k}=%?([\w.\-]+)", loop.text) for k in ("condition", "body"))
        compare = self.roots[condition]
        inside = self.computations[condition]
        if compare.op == "fusion":  # the comparison is a computation of its own
            called = _find(r"calls=%?([\w.\-]+)", compare.text)
            outer, compare = compare, self.roots[called]
            parameters = {i.name: int(_find(r"parameter\((\d+)", i.text)) for i in self.computations[called].values()
                          if i.op == "parameter"}  # fmt: skip
            values = [inside[outer.operands[parameters[o]]] if o in parameters else self.computations[called][o]
                      for o in compare.operands]  # fmt: skip
        else:
            values = [inside[o] for o in compare.operands]
        counter = next(v for v in values if v.op == "get-tuple-element")
        place = int(_find(r"index=(\d+)", counter.text))
        limit = next((c for v in values if v is not counter and (c := self._constant(where, loop, v)) is not None), None)
        start = self._constant(where, loop, counter)
        step = self._step(body, place)
        if limit is None or start is None or step is None or "direction=LT" not in compare.text:
            raise ValueError(f"hlo_flops: the turns of the loop {loop.name} cannot be read: {compare.text[:200]}")
        return -(-(limit - start) // step)

    def _constant(self, where: str, loop: Instruction, value: Instruction) -> int | None:
        """A number, or an entry of what the loop starts from that is one."""
        if value.op == "get-tuple-element":
            place = int(_find(r"index=(\d+)", value.text))
            start = self.computations[where][loop.operands[0]]
            if start.op != "tuple":
                return None
            value = self.computations[where][start.operands[place]]
            while value.op in ("copy", "bitcast"):
                value = self.computations[where][value.operands[0]]
        found = re.search(r"constant\((-?\d+)\)", value.text) if value.op == "constant" else None
        return int(found[1]) if found else None

    def _step(self, body: str, place: int) -> int | None:
        """What a turn adds to the counter."""
        inside = self.computations[body]
        value = inside[self.roots[body].operands[place]]
        while value.op in ("copy", "bitcast"):
            value = inside[value.operands[0]]
        if value.op == "fusion":
            called = _find(r"calls=%?([\w.\-]+)", value.text)
            value, inside = self.roots[called], self.computations[called] | inside
        if value.op != "add":
            return None
        for operand in value.operands:
            if found := re.search(r"constant\((\d+)\)", inside[operand].text):
                return int(found[1])
        return None


def _parse(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    op = rest[: rest.index("(")]
    inner = rest[len(op) + 1 : _closing(rest, len(op))]
    return Instruction(name, type_, op, re.findall(r"%([\w.\-]+)", inner), rest)


def _closing(text: str, at: int) -> int:
    """The place of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"hlo_flops: no closing parenthesis in {text[:200]}")


def matmul_flops(text: str) -> float:
    """Of all matrix products that a program does on one device; kernels written by hand apart."""
    program = Program(text)
    total = 0.0
    for name, times in program.calls().items():
        for instruction in program.computations[name].values():
            if instruction.op == "dot":
                total += times * _dot_flops(instruction, program.computations[name])
            elif instruction.op == "convolution":
                total += times * _convolution_flops(instruction, program.computations[name])
    return total


def kernel_calls(text: str, pattern: str) -> float:
    """How often kernels run whose custom call, or its name, has this pattern in it."""
    program = Program(text)
    return sum(
        times
        * sum(1 for i in program.computations[name].values() if i.op == "custom-call" and re.search(pattern, i.name + i.text))
        for name, times in program.calls().items()
    )


def _dot_flops(instruction: Instruction, inside: dict[str, Instruction]) -> float:
    left = inside[instruction.operands[0]].shape
    summed = _find(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    return 2.0 * math.prod(instruction.shape) * math.prod(left[int(d)] for d in summed.split(",") if d)


def _convolution_flops(instruction: Instruction, inside: dict[str, Instruction]) -> float:
    """TPU compilers write products as convolutions; what the window meets in the padding is no work."""
    labels = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)[0]
    left, right, out = (dict(zip(label, shape, strict=True)) for label, shape in
                        zip(labels, (inside[instruction.operands[0]].shape, inside[instruction.operands[1]].shape,
                                              instruction.shape), strict=True))  # fmt: skip
    window = re.search(r"window=\{([^}]*)\}", instruction.text)
    attributes = dict(a.split("=") for a in window[1].split(" ")) if window else {}
    count = len([d for d in out if d.isdigit()])

    def of(key, default):
        return attributes.get(key, "x".join([default] * count)).split("x") if count else []

    groups = {k: int(v) for k, v in re.findall(r"(feature_group_count|batch_group_count)=(\d+)", instruction.text)}
    total = 2.0 * out["b"] * out["f"] * right["i"] / groups.get("batch_group_count", 1)
    for i in range(count):
        low = int(of("pad", "0_0")[i].split("_")[0])
        stride, lhs, rhs = int(of("stride", "1")[i]), int(of("lhs_dilate", "1")[i]), int(of("rhs_dilate", "1")[i])
        size, length = int(of("size", "1")[i]), left[str(i)]
        places = (o * stride + w * rhs - low for o in range(out[str(i)]) for w in range(size))
        total *= sum(1 for p in places if p % lhs == 0 and 0 <= p // lhs < length)
    return total
