"""The graph that a backward goes through, in two: what leads to the inputs, and the rest, which leads to parameters.

[Note: inside and outside]
*Inside* are the nodes on a way from the outputs to the inputs; the gradients of the inputs need these, and no others.
What leads to an inside node is inside too, so the rest, *outside*, never leads back in. A *fork* is an inside node from
which gradients also go out. A *part* is what hangs together outside: a weight and its transposition, or all that
several uses of one weight touch. Gradients meet within a part, and nowhere between two.

The engine runs what is ready in the order of the nodes' numbers, youngest first, and adds gradients that meet in the
order in which they come. Sums of more than two depend on it.

[Note: deep graphs]
A node that Python has seen has a Python object for the rest of its life, and torch (2.13) frees a chain of such nodes
by recursion: a program whose graph is tens of thousands of nodes deep would overflow its stack when it drops an output
that was traced. So the outputs' nodes of a large graph hold on to some nodes below them, in the dict that autograd
gives to each node, which goes after the node's edges: the recursion ends at each of these, and goes on from it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch.autograd.function import BackwardCFunction

from ferrodist.torch_private.autograd import accumulate_grad_type, sequence_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch.autograd.graph import Node

__all__ = ["BackwardGraph", "is_python_function", "trace_backward"]

_LEAF = accumulate_grad_type

_DEEP = 10_000
"""From how many nodes on a graph is deep; see [Note: deep graphs]."""
_STRIDE = 997
"""Of the nodes held, in the order of the walk; a prime, or regular graphs might show only side branches."""


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """What a backward goes through; see [Note: inside and outside].

    Args:
        edges: Where the gradients of each node go. The nodes' Python objects live as long as this: what follows
            counts on each staying the same.
        parents: The nodes from which gradients come to each.
        inside: The nodes on a way to the inputs.
        parts: The number of the part of each of the others.
        forks: The inside nodes from which gradients go out.
    """

    edges: Mapping[Node, tuple[tuple[Node | None, int], ...]]
    parents: Mapping[Node, Sequence[Node]]
    inside: frozenset[Node]
    parts: Mapping[Node, int]
    forks: Sequence[Node]

    def parts_below(self, fork: Node) -> set[int]:
        """The parts to which a fork's gradients go."""
        return {self.parts[child] for child, _ in self.edges[fork] if child is not None and child in self.parts}

    def disordered_parts(self) -> set[int]:
        """Those where gradients come from inside after others, so that they add up differently if inside goes first."""
        found = set()
        for node, part in self.parts.items():
            above = self.parents[node]
            if len(above) > 1:
                inside = [sequence_number(parent) for parent in above if parent in self.inside]
                outside = [sequence_number(parent) for parent in above if parent in self.parts]
                if inside and outside and min(inside) < max(outside):
                    found.add(part)
        return found

    def leaves_of(self, parts: set[int]) -> list[torch.Tensor]:
        """The tensors that these parts lead to."""
        nodes = (node for node, part in self.parts.items() if part in parts)
        return [node.variable for node in nodes if type(node) is _LEAF]  # type: ignore[attr-defined]


def is_python_function(node: Node) -> bool:
    """Whether a node is of a ``torch.autograd.Function``."""
    return isinstance(cast("object", node), BackwardCFunction)


def trace_backward(roots: Iterable[Node], inputs: Sequence[torch.Tensor]) -> BackwardGraph:
    """Walk the graph behind ``roots``, which takes one to two microseconds a node."""
    edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    waiting = list(parents)
    wanted = {id(tensor) for tensor in inputs}
    ends = []
    while waiting:
        node = waiting.pop()
        following = edges[node] = node.next_functions
        if type(node) is _LEAF and id(node.variable) in wanted:  # type: ignore[attr-defined]
            ends.append(node)
        for child, _ in following:
            if child is not None:
                above = parents.get(child)
                if above is None:
                    parents[child] = [node]
                    waiting.append(child)
                else:
                    above.append(node)
    if len(edges) > _DEEP:
        held = list(edges)[::_STRIDE]
        for node, above in parents.items():
            if not above:  # so nothing below leads back to it
                node.metadata["held by ferrodist"] = held  # type: ignore[index]
    inside = _ancestors(ends, parents)
    parts = _number_parts(edges, parents, inside)
    forks = dict.fromkeys(parent for node in parts for parent in parents[node] if parent in inside)
    return BackwardGraph(edges=edges, parents=parents, inside=inside, parts=parts, forks=tuple(forks))


def _ancestors(ends: Sequence[Node], parents: Mapping[Node, Sequence[Node]]) -> frozenset[Node]:
    found, waiting = set(ends), list(ends)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return frozenset(found)


def _number_parts(
    edges: Mapping[Node, tuple[tuple[Node | None, int], ...]],
    parents: Mapping[Node, Sequence[Node]],
    inside: frozenset[Node],
) -> dict[Node, int]:
    parts: dict[Node, int] = {}
    number = 0
    for first in edges:
        if first in inside or first in parts:
            continue
        parts[first] = number
        waiting = [first]
        while waiting:
            node = waiting.pop()
            children = [child for child, _ in edges[node] if child is not None]
            for other in (*children, *parents[node]):
                if other not in inside and other not in parts:
                    parts[other] = number
                    waiting.append(other)
        number += 1
    return parts
