"""The backward of one microbatch in one stage, in two: first the gradients of the inputs, later the parameters'.

The rank before waits for the former, nobody for the latter; schedules without bubbles fill their gaps with them (Qi et
al., "Zero Bubble Pipeline Parallelism", 2023). Both come from the graph that autograd has anyway: models need no
change, nothing is computed twice, and gradients have the bits of an ordinary backward.

[Note: two phases]
See [Note: inside and outside] in `split_backward.py` for the words. The first phase is a backward for the inputs only.
The engine runs the inside nodes, and each computes what it is asked for: no gradients that go out. Each fork's incoming
gradients are kept, in the order in which the engine came by.

The second phase calls the forks again, now asking for the gradients that go out. Were the engine to do that, it would
run the forks' hooks a second time, and from a fork of a weight that is used twice go on through the inside to the other
use. So they are called as functions, in their order, from inside a backward in which their children outside are wanted
and nothing else is: that is what nodes look at. What they return are roots of an ordinary backward of the outside, in
which all hooks of parameters run. Gradients meet there in the order of an ordinary backward, with its bits.

[Note: whole parts]
Some parts are done in the first phase, as in an ordinary backward, and not deferred: those below a fork that computes
all or nothing (a custom Function, a fused kernel), that unpacks what it saved by hooks (a checkpoint would be computed
again), or that has hooks of its own on what it returns (they want all of it); and those where gradients of the inside
would come in another order. A re-entrant checkpoint refuses any backward that is not for all: then everything is done
in the first phase.

The graph that a backward goes through, in two: what leads to the inputs, and the rest, which leads to parameters.

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

What a node of autograd's graph keeps of the forward: whether hooks made it, and how to let it go.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ferrodist.torch_private.autograd import accumulate_grad_type, run_backward, sequence_number
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

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


class _SavedTensor(Protocol):
    """torch's ``SavedTensor``, which its types don't describe."""

    @property
    def data(self) -> object: ...

    @property
    def unpack_hook(self) -> object: ...

    def register_hooks(self, pack: Callable[[torch.Tensor], object], unpack: Callable[[object], torch.Tensor]) -> None:
        """Give the tensor to ``pack``, and keep what that returns in its place."""


def has_packed_tensors(node: Node) -> bool:
    """Whether saved-tensor hooks stand between a node and what it saved: checkpoints, or tensors in other memory."""
    return any(saved.unpack_hook is not None for saved in _saved(node))


def release_saved(nodes: Iterable[Node]) -> None:
    """Let go of what nodes have saved, as the engine does behind itself where it doesn't keep the graph.

    What hooks have packed stays theirs. To go through a node again is an error.
    """
    for node in nodes:
        for saved in _saved(node):
            if saved.unpack_hook is None and saved.data is not None:
                saved.register_hooks(_drop, _refuse)  # the only way from Python


def _saved(node: Node) -> Iterator[_SavedTensor]:
    # There is a class for each Function of Python; they are not to be kept in a cache.
    for name in ("_raw_saved_tensors",) if is_python_function(node) else _names(type(node)):
        saved = getattr(node, name)
        if isinstance(saved, (tuple, list)):
            yield from saved
        else:
            yield saved


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _drop(_: torch.Tensor) -> None:
    """Keep nothing."""


def _refuse(_: object) -> torch.Tensor:
    raise RuntimeError("this graph was used up by a backward in two phases: call the stage's forward again")


if TYPE_CHECKING:
    Gradients = tuple[torch.Tensor | None, ...]


_REENTRANT = "CheckpointFunctionBackward"
"""The node of ``torch.utils.checkpoint`` with ``use_reentrant=True``."""

_WHOLE = frozenset({
    "ConvTbcBackward", "CppFunction", "CudnnRnnBackward", "EfficientAttentionBackward",
    "FakeQuantizeLearnablePerChannelAffineBackward", "FakeQuantizeLearnablePerTensorAffineBackward",
    "FlashAttentionBackward", "LstmMpsBackward", "MiopenRnnBackward", "MkldnnRnnLayerBackward", "PreluKernelBackward",
    "ScaledDotProductCudnnAttentionBackward", "ScaledDotProductEfficientAttentionBackward",
    "ScaledDotProductFlashAttentionBackward", "ScaledDotProductFlashAttentionForCpuBackward",
    "ThnnFusedGruCellBackward", "ThnnFusedLstmCellBackward",
})  # fmt: skip
"""Nodes that compute all gradients in one kernel, whichever are wanted. ``CppFunction`` is a Function of C++."""

_PENDING_BYTES = 1 << 20
"""How much the second phase may compute before it is added to ``.grad`` and freed; it may be more of one part."""


class _Root(NamedTuple):
    """A gradient, the edge along which it goes, and the part to which that leads: -1 for the inside."""

    edge: GradientEdge
    gradient: torch.Tensor
    part: int


class _Exit(NamedTuple):
    """One of a fork's edges that go out."""

    place: int
    edge: GradientEdge
    part: int


class _Stop(NamedTuple):
    """A fork that the second phase calls, with the gradients that came to it."""

    fork: Node
    gradients: Gradients
    exits: Sequence[_Exit]

    @property
    def parts(self) -> set[int]:
        return {way.part for way in self.exits}


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """Compute the gradients of a stage's inputs, and leave those of its parameters for later.

    On return the graph is used up: of what the forward saved only that is kept which the parameters' gradients need.

    Args:
        outputs: What the stage's forward made of ``inputs`` and parameters; all require grad.
        gradients: Of the outputs; None for one that nobody used. They are kept: don't change them before
            `WeightBackward.run`.
        inputs: Leaves that require grad; may be none.

    Returns:
        The gradient of each input, or None where none reaches it, as an ordinary backward would leave it in ``.grad``
        (which stays as it was); and what is left to do, on a GPU under the stream of this call.

    Raises:
        ValueError: An argument is not as above.
    """
    _check(outputs, gradients, inputs)
    used = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    ]
    graph = trace_backward([edge.node for edge, _ in used], inputs)
    roots = [_Root(edge, gradient, graph.parts.get(edge.node, -1)) for edge, gradient in used]
    with _collecting(inputs) as found:
        if not graph.inside:
            left = WeightBackward(roots, [], [])
        elif any(type(node).__name__ == _REENTRANT for node in graph.edges):
            _run_engine(roots)
            left = WeightBackward([], [], [])
        else:
            left = _run_inside(graph, roots, inputs)
    return found, left


class WeightBackward:
    """What is left of a backward: the gradients of the parameters. Made by `backward_inputs`.

    To drop it frees what it holds. To autograd `run` is more than one backward: what is called at the end of a backward
    is called more than once.

    Args:
        roots: Edges out of which gradients go to the outside, and these.
        stops: Forks to call, in the order in which the first phase came by.
        owners: Edges that keep the graph alive; the Python objects of custom Functions' nodes don't in every torch.
    """

    def __init__(self, roots: Sequence[_Root], stops: Sequence[_Stop], owners: Sequence[GradientEdge]) -> None:
        self._roots = list(roots)
        self._stops = list(stops)
        self._owners = list(owners)
        self._has_run = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left: it was all done with the inputs, or there was nothing, or `run` has done it."""
        return not (self._roots or self._stops)

    def run(self) -> None:
        """Add the parameters' gradients to their ``.grad``, as an ordinary backward does, hooks included.

        Raises:
            RuntimeError: It has run before; or as backward raises, after which gradients may be partly added.
        """
        if self._has_run:
            raise RuntimeError("these gradients have been added; each backward_inputs() is for one run()")
        self._has_run = True
        roots, stops, owners = self._roots, self._stops, self._owners
        self._roots, self._stops, self._owners = [], [], []
        if stops:
            _resume(stops, roots)
        elif roots:
            _run_engine(roots)
        del owners


def _run_inside(graph: BackwardGraph, roots: Sequence[_Root], inputs: Sequence[torch.Tensor]) -> WeightBackward:
    """Do the first phase, with whole parts."""
    arrived: list[tuple[Node, Gradients]] = []
    handles: list[RemovableHandle] = []
    try:
        whole = graph.disordered_parts() | _watch_forks(graph, arrived, handles)
        exits = {fork: found for fork in graph.forks if (found := _find_exits(graph, fork, whole))}
        _run_engine(roots, inputs=(*inputs, *graph.leaves_of(whole)), keeps_graph=bool(exits))
    finally:  # or forks would keep themselves alive through their hooks, where the collector sees nothing
        for handle in handles:
            handle.remove()
    done = {-1, *whole}
    if exits:
        release_saved(node for node in graph.edges if node not in exits and graph.parts.get(node, -1) in done)
    return WeightBackward(
        [root for root in roots if root.part not in done],
        [_Stop(fork, gradients, exits[fork]) for fork, gradients in arrived if fork in exits],
        [root.edge for root in roots],
    )


def _watch_forks(
    graph: BackwardGraph, arrived: list[tuple[Node, Gradients]], handles: list[RemovableHandle]
) -> set[int]:
    """Have the gradients that come to forks noted; returns the parts that are to be done whole."""
    whole = {part for node, part in graph.parts.items() if has_packed_tensors(node)}
    for fork in graph.forks:
        is_whole = (
            is_python_function(fork) or type(fork).__name__.rstrip("0123456789") in _WHOLE or has_packed_tensors(fork)
        )
        if not is_whole:
            handle = fork.register_hook(_note(fork, arrived))
            handles.append(handle)
            is_whole = len(handle.hooks_dict_ref() or ()) > 1
        if is_whole:
            whole |= graph.parts_below(fork)
    return whole


def _note(fork: Node, arrived: list[tuple[Node, Gradients]]) -> Callable[[Gradients, Gradients], None]:
    def note(_: Gradients, gradients: Gradients) -> None:
        arrived.append((fork, gradients))

    return note


def _find_exits(graph: BackwardGraph, fork: Node, whole: set[int]) -> list[_Exit]:
    return [
        _Exit(place, GradientEdge(child, number), graph.parts[child])
        for place, (child, number) in enumerate(graph.edges[fork])
        if child is not None and graph.parts.get(child, -1) not in {-1, *whole}
    ]


def _resume(stops: list[_Stop], roots: list[_Root]) -> None:
    """Do the second phase; the lists are emptied on the way."""
    # The gradient of a leaf that nothing was computed of: all that this backward does is to call the leaf's hook.
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: _call_forks(stops, roots))  # type: ignore[no-untyped-call]
    wanted = dict.fromkeys(way.edge for stop in stops for way in stop.exits)
    run_backward(
        (leaf,), (leaf.detach(),), False, False, (leaf, *wanted), allow_unreachable=True, accumulate_grad=False
    )


def _call_forks(stops: list[_Stop], roots: list[_Root]) -> None:
    left = Counter(part for stop in stops for part in stop.parts)
    num_bytes = 0
    stops.reverse()
    while stops:
        added = _call_fork(stops.pop(), left)
        num_bytes += sum(root.gradient.numel() * root.gradient.element_size() for root in added)
        roots.extend(added)
        del added
        if num_bytes >= _PENDING_BYTES:
            _run_engine(_take_complete(roots, left))
            num_bytes = 0
    _run_engine(roots)


def _call_fork(stop: _Stop, left: Counter[int]) -> list[_Root]:
    call = cast("Callable[..., Gradients]", stop.fork)
    computed = call(*stop.gradients)
    release_saved([stop.fork])
    left.subtract(stop.parts)
    return [_Root(way.edge, gradient, way.part) for way in stop.exits if (gradient := computed[way.place]) is not None]


def _take_complete(roots: list[_Root], left: Counter[int]) -> list[_Root]:
    complete = [root for root in roots if not left[root.part]]
    roots[:] = [root for root in roots if left[root.part]]
    return complete


def _run_engine(roots: Sequence[_Root], *, inputs: Sequence[torch.Tensor] = (), keeps_graph: bool = False) -> None:
    """Call autograd's engine, which adds to ``.grad`` of ``inputs``, or of all leaves."""
    if not roots:
        return
    # torch.autograd.backward() wants gradients of the very shape; the engine sums what was broadcast, as between nodes.
    run_backward(
        tuple(root.edge for root in roots),
        tuple(root.gradient for root in roots),
        keeps_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@contextlib.contextmanager
def _collecting(inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Give what a backward inside the block adds to the inputs' ``.grad``, which stay as they were."""
    before = [tensor.grad for tensor in inputs]
    found: list[torch.Tensor | None] = []
    for tensor in inputs:
        tensor.grad = None
    try:
        yield found
        found.extend(tensor.grad for tensor in inputs)
    finally:
        for tensor, gradient in zip(inputs, before, strict=True):
            tensor.grad = gradient


def _check(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> None:
    if len(outputs) != len(gradients):
        have = "has" if len(outputs) == 1 else "have"
        raise ValueError(
            f"{counted(len(outputs), 'output')} {have} {counted(len(gradients), 'gradient')}: give one for each,"
            " or None"
        )
    for number, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if not output.requires_grad:
            raise ValueError(f"output {number} doesn't require grad: leave it out, as nothing depends on its gradient")
        if gradient is not None and gradient.shape != output.shape:
            shapes = f"{tuple(gradient.shape)}, and the output {tuple(output.shape)}"
            raise ValueError(f"the gradient of output {number} has the shape {shapes}: they must be the same")
    for number, tensor in enumerate(inputs):
        if not (tensor.is_leaf and tensor.requires_grad):
            raise ValueError(
                f"input {number} is no leaf that requires grad: call the stage with tensor.detach().requires_grad_()"
            )
