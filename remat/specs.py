"""How the values between two sharding constraints are split: enough of the compiler's propagation for one block."""

Spec = tuple[tuple[str, ...], ...]  # for each dimension the mesh axes that split it


def propagate(equation, var, specs: list[Spec]) -> Spec:
    """How a result of an equation is split, given how its operands are."""
    primitive, rank = equation.primitive.name, var.aval.ndim
    if primitive == "sharding_constraint":
        axes = [(a,) if isinstance(a, str) else tuple(a or ()) for a in equation.params["sharding"].spec]
        return (*axes, *((),) * (rank - len(axes)))
    if primitive == "dot_general":
        (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
        free_left = [i for i in range(len(specs[0])) if i not in (*left, *left_batch)]
        free_right = [i for i in range(len(specs[1])) if i not in (*right, *right_batch)]
        wanted = [*(specs[0][i] for i in (*left_batch, *free_left)), *(specs[1][i] for i in free_right)]
        return _each_axis_once(wanted)
    if primitive == "transpose":
        return tuple(specs[0][i] for i in equation.params["permutation"])
    if primitive == "broadcast_in_dim":
        spec: list[tuple[str, ...]] = [()] * rank
        for i, to in enumerate(equation.params["broadcast_dimensions"]):
            if equation.invars[0].aval.shape[i] == var.aval.shape[to]:
                spec[to] = specs[0][i]
        return tuple(spec)
    if primitive.startswith("reduce_") or primitive in ("argmax", "argmin"):
        return tuple(s for i, s in enumerate(specs[0]) if i not in equation.params["axes"])
    if primitive in ("reshape", "squeeze"):
        return _reshaped(equation.invars[0].aval.shape, specs[0], var.aval.shape)
    same = [s for v, s in zip(equation.invars, specs, strict=True) if getattr(v.aval, "ndim", -1) == rank]
    return max(same, key=lambda s: sum(map(len, s)), default=((),) * rank)


def _reshaped(old: tuple[int, ...], spec: Spec, new: tuple[int, ...]) -> Spec:
    """Dimensions of one size keep their split, in order; a dimension that is cut up gives it to its first part."""
    result, i = [], 0
    for size in new:
        while i < len(old) and old[i] == 1 and size != 1:
            i += 1
        if i < len(old) and (old[i] == size or (size != 1 and old[i] % size == 0)):
            result.append(spec[i])
            i += 1
        else:
            result.append(())
    return _each_axis_once(result)


def _each_axis_once(wanted) -> Spec:
    seen: set[str] = set()
    spec = []
    for axes in wanted:
        spec.append(tuple(a for a in axes if a not in seen))
        seen |= set(axes)
    return tuple(spec)
