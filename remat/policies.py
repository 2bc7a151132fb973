"""The policies that a block may have: all sets of its names, and which of them may wait on the host."""

from device_kinds import NOMINAL, device_kind
from remat.graph import BlockGraph, Need, subsets
from remat.ledger import GIB
from remat.offload import why_not, with_offload
from remat.solve import pareto_front

# The sets of so many names are searched in some seconds; every further name doubles that.
MAX_NAMES = 14


def searched_names(graph: BlockGraph, most: int = MAX_NAMES) -> list[str]:
    """The useful names, or if there are more than can be searched those that save the most seconds a byte, each by itself."""
    nothing = graph.need(frozenset())

    def worth(name):
        need = graph.need(frozenset([name]))
        return (nothing.seconds - need.seconds) / max(graph.bytes_of(name), 1)

    best = sorted(graph.useful_names, key=worth, reverse=True)[:most]
    return [name for name in graph.useful_names if name in best]


def policies(program, graph: BlockGraph) -> tuple[list[Need], str]:
    """The policies that no other beats, by bytes; and why none of them offloads, empty if some may."""
    needs = [graph.need(names) for names in subsets(searched_names(graph))]
    memory = program.config.memory
    why = why_not(program.mesh, memory.offload)
    if not why:
        kind = device_kind(program.mesh.devices.flat[0].device_kind) or NOMINAL
        host_bytes = memory.host_limit_gib * GIB or 0.8 * kind.host_bytes  # the rest is for everything else there
        needs += with_offload(graph, needs, kind, host_bytes / program.config.model.num_layers)
    return pareto_front(needs), why
