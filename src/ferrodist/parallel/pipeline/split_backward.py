"""The backward of one microbatch in one stage, in two phases: first the gradients of the inputs, later the parameters'.

The previous rank waits for the former, nobody for the latter; schedules without bubbles fill their gaps with them (Qi
et al., "Zero Bubble Pipeline Parallelism", 2023). Both use the graph that autograd records anyway: models need no
change, nothing is computed twice, and gradients have the bits of an ordinary backward.

[Note: inside and outside]
Nodes on a path from the outputs to the inputs are *inside*; the gradients of the inputs need these, and no others.
Whatever leads to an inside node is inside too, so the rest, *outside*, never leads back in. A *branch* is an inside
node from which gradients also go outside. A *component* is a connected component of the outside: a weight and its
transposition, or all nodes of several uses of one weight. Gradients meet within a component, and never between two.

The engine runs ready nodes in the order of their sequence numbers, youngest first, and adds gradients that meet in the
order in which they come. Sums of more than two depend on it.

[Note: two phases]
The first phase is a backward for the inputs only. The engine runs the inside nodes, and each computes only the
requested gradients, none that go outside. The incoming gradients of each branch are retained, in the order in which the
engine reaches the branches.

The second phase calls the branches again, now requesting the gradients that go outside. If the engine did that, it
would run the branches' hooks a second time, and from a branch of a weight that is used twice go through the inside to
the other use. So they are called as functions, in their order, from inside a backward that requests their outside
children and nothing else: nodes look at that request. Their results are roots of an ordinary backward of the outside,
in which all hooks of parameters run. Gradients meet there in the order of an ordinary backward, with its bits.

[Note: components that are not deferred]
Some components are computed in the first phase, as in an ordinary backward: those below a branch that computes all or
nothing (a custom Function, a fused kernel), that unpacks saved tensors by hooks (a checkpoint would be recomputed), or
that has hooks of its own on its results (they expect all of them); and those where gradients from inside would arrive
in another order. A re-entrant checkpoint refuses any backward for some of the inputs: then everything is computed in
the first phase.

[Note: deep graphs]
A node that Python has seen has a Python object for the rest of its life, and torch (2.13) frees a chain of such nodes
by recursion: a program whose graph is tens of thousands of nodes deep would overflow its stack when it drops a traced
output. So the outputs' nodes of a large graph own some nodes below them, in the dict that autograd gives to each node,
which is freed after the node's edges: the recursion ends at each of these, and continues from it later.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ferrodist.torch_private.autograd import accumulate_grad_type, run_backward, sequence_number
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    Gradients = tuple[torch.Tensor | None, ...]

_ACCUMULATE_GRAD = accumulate_grad_type

_DEEP = 10_000  # number of nodes from which a graph is deep; see [Note: deep graphs]
_STRIDE = 997  # distance of owned nodes in the walk; a prime, or regular graphs might show only side branches


class BackwardGraph(NamedTuple):
    """The graph of a backward; see [Note: inside and outside].

    For each node there are the next functions (``edges``) and the nodes from which gradients come (``parents``); from
    ``branches`` gradients go outside. The nodes' Python objects live as long as this, since later code relies on each
    staying the same.
    """

    edges: Mapping[Node, tuple[tuple[Node | None, int], ...]]
    parents: Mapping[Node, Sequence[Node]]
    inside: set[Node]
    components: Mapping[Node, int]
    branches: Sequence[Node]

    def out_of_order_components(self) -> set[int]:
        """Components where gradients from inside arrive after others, so that sums differ if the inside runs first."""
        found = set()
        for node, component in self.components.items():
            node_parents = self.parents[node]
            if len(node_parents) > 1:
                inside = [sequence_number(parent) for parent in node_parents if parent in self.inside]
                outside = [sequence_number(parent) for parent in node_parents if parent in self.components]
                if inside and outside and min(inside) < max(outside):
                    found.add(component)
        return found


def is_python_function(node: Node) -> bool:
    """True if a node belongs to a ``torch.autograd.Function``."""
    return isinstance(cast("object", node), BackwardCFunction)


def trace_backward(roots: Iterable[Node], inputs: Sequence[torch.Tensor]) -> BackwardGraph:
    """Walk the graph behind ``roots``, which takes one to two microseconds for each node."""
    edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    queue = list(parents)
    wanted = {id(tensor) for tensor in inputs}
    leaves = []
    while queue:
        node = queue.pop()
        next_edges = edges[node] = node.next_functions
        if type(node) is _ACCUMULATE_GRAD and id(node.variable) in wanted:  # type: ignore[attr-defined]
            leaves.append(node)
        for child, _ in next_edges:
            if child is not None:
                node_parents = parents.get(child)
                if node_parents is None:
                    parents[child] = [node]
                    queue.append(child)
                else:
                    node_parents.append(node)
    if len(edges) > _DEEP:
        owned = list(edges)[::_STRIDE]
        for node, node_parents in parents.items():
            if not node_parents:  # so nothing below leads back to it
                node.metadata["owned by ferrodist"] = owned  # type: ignore[index]
    inside, queue = set(leaves), leaves
    while queue:
        ancestors = [parent for parent in parents[queue.pop()] if parent not in inside]
        inside.update(ancestors)
        queue += ancestors
    components = _find_components(edges, parents, inside)
    branches = dict.fromkeys(parent for node in components for parent in parents[node] if parent in inside)
    return BackwardGraph(edges=edges, parents=parents, inside=inside, components=components, branches=tuple(branches))


def _find_components(
    edges: Mapping[Node, tuple[tuple[Node | None, int], ...]],
    parents: Mapping[Node, Sequence[Node]],
    inside: set[Node],
) -> dict[Node, int]:
    components: dict[Node, int] = {}
    index = 0
    for first in edges:
        if first in inside or first in components:
            continue
        components[first] = index
        queue = [first]
        while queue:
            node = queue.pop()
            children = [child for child, _ in edges[node] if child is not None]
            for other in (*children, *parents[node]):
                if other not in inside and other not in components:
                    components[other] = index
                    queue.append(other)
        index += 1
    return components


def has_packed_tensors(node: Node) -> bool:
    """True if a node's saved tensors have hooks: checkpoints, or tensors offloaded to other memory."""
    return any(saved.unpack_hook is not None for saved in _saved(node))


def release_saved(nodes: Iterable[Node]) -> None:
    """Free the saved tensors of nodes, as the engine does; results of pack hooks stay."""
    for node in nodes:
        for saved in _saved(node):
            if saved.unpack_hook is None and saved.data is not None:
                saved.register_hooks(_drop, _refuse)  # the only way from Python


def _saved(node: Node) -> Iterator[Any]:
    """The ``SavedTensor`` objects of a node, which torch's types don't describe."""
    # Each Function of Python has a class of its own; a cache would hold these classes.
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
    """Store nothing."""


def _refuse(_: object) -> torch.Tensor:
    raise RuntimeError("this graph was freed by a backward in two phases: call the stage's forward again")


_REENTRANT = "CheckpointFunctionBackward"  # the node of ``torch.utils.checkpoint`` with ``use_reentrant=True``

_ALL_OR_NOTHING = frozenset({
    "ConvTbcBackward", "CppFunction", "CudnnRnnBackward", "EfficientAttentionBackward",
    "FakeQuantizeLearnablePerChannelAffineBackward", "FakeQuantizeLearnablePerTensorAffineBackward",
    "FlashAttentionBackward", "LstmMpsBackward", "MiopenRnnBackward", "MkldnnRnnLayerBackward", "PreluKernelBackward",
    "ScaledDotProductCudnnAttentionBackward", "ScaledDotProductEfficientAttentionBackward",
    "ScaledDotProductFlashAttentionBackward", "ScaledDotProductFlashAttentionForCpuBackward",
    "ThnnFusedGruCellBackward", "ThnnFusedLstmCellBackward",
})  # fmt: skip
"""Nodes that compute all gradients in one kernel, whichever are requested. ``CppFunction`` is a Function of C++."""

_PENDING_BYTES = 1 << 20  # of gradients that are computed before they are added to .grad; one component may exceed it


class _Root(NamedTuple):
    """A gradient, its edge, and the component at the other end: -1 for the inside."""

    edge: GradientEdge
    gradient: torch.Tensor
    component: int


class _OutEdge(NamedTuple):
    """An edge of a branch that goes outside, with its position among the node's edges."""

    position: int
    edge: GradientEdge
    component: int


class _DeferredNode(NamedTuple):
    """A branch that the second phase calls, with its incoming gradients."""

    branch: Node
    gradients: Gradients
    out_edges: Sequence[_OutEdge]

    @property
    def components(self) -> set[int]:
        return {out_edge.component for out_edge in self.out_edges}


def backward_inputs(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """Compute the gradients of a stage's inputs, leaves that require grad, and defer those of its parameters.

    On return the graph is used up: of the saved tensors only those stay that the parameters' gradients need. An
    output's gradient may be None, and must not change before `WeightBackward.run`. An input that no gradient reaches
    gets None, and ``.grad`` of inputs stays unchanged.
    """
    _check(outputs, gradients, inputs)
    used = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    ]
    graph = trace_backward([edge.node for edge, _ in used], inputs)
    roots = [_Root(edge, gradient, graph.components.get(edge.node, -1)) for edge, gradient in used]
    with _collecting(inputs) as found:
        if not graph.inside:
            remaining = WeightBackward(roots, [], [])
        elif any(type(node).__name__ == _REENTRANT for node in graph.edges):
            _run_engine(roots)
            remaining = WeightBackward([], [], [])
        else:
            remaining = _run_inside(graph, roots, inputs)
    return found, remaining


class WeightBackward:
    """The deferred rest of a backward: the gradients of the parameters. Made by `backward_inputs`.

    Dropping it frees its memory. Autograd calls the callbacks at the end of a backward more than once in `run`.
    ``owners`` keep the graph alive: the Python objects of custom Functions' nodes don't in every torch.
    """

    def __init__(
        self, roots: Sequence[_Root], deferred: Sequence[_DeferredNode], owners: Sequence[GradientEdge]
    ) -> None:
        self._roots, self._deferred, self._owners = list(roots), list(deferred), list(owners)
        self._has_run = False

    def run(self) -> None:
        """Add the parameters' gradients to their ``.grad``, as an ordinary backward does, hooks included."""
        if self._has_run:
            raise RuntimeError("these gradients have been added already; each backward_inputs() allows one run()")
        self._has_run = True
        roots, deferred, owners = self._roots, self._deferred, self._owners
        self._roots, self._deferred, self._owners = [], [], []
        if deferred:
            _run_deferred(deferred, roots)
        elif roots:
            _run_engine(roots)
        del owners


def _run_inside(graph: BackwardGraph, roots: Sequence[_Root], inputs: Sequence[torch.Tensor]) -> WeightBackward:
    """Run the first phase, with components that are not deferred."""
    arrived: list[tuple[Node, Gradients]] = []
    handles: list[RemovableHandle] = []
    try:
        not_deferred = graph.out_of_order_components() | _hook_branches(graph, arrived, handles)
        out_edges = {
            branch: found for branch in graph.branches if (found := _find_out_edges(graph, branch, not_deferred))
        }
        nodes = (node for node, component in graph.components.items() if component in not_deferred)
        leaves = [node.variable for node in nodes if type(node) is _ACCUMULATE_GRAD]  # type: ignore[attr-defined]
        _run_engine(roots, inputs=(*inputs, *leaves), retain_graph=bool(out_edges))
    finally:  # otherwise branch nodes would hold themselves through their hooks, unseen by Python's garbage collector
        for handle in handles:
            handle.remove()
    done = {-1, *not_deferred}
    if out_edges:
        release_saved(node for node in graph.edges if node not in out_edges and graph.components.get(node, -1) in done)
    return WeightBackward(
        [root for root in roots if root.component not in done],
        [_DeferredNode(branch, gradients, out_edges[branch]) for branch, gradients in arrived if branch in out_edges],
        [root.edge for root in roots],
    )


def _hook_branches(
    graph: BackwardGraph, arrived: list[tuple[Node, Gradients]], handles: list[RemovableHandle]
) -> set[int]:
    """Hook branches to record their incoming gradients; returns the components that can't be deferred."""
    not_deferred = {component for node, component in graph.components.items() if has_packed_tensors(node)}
    for branch in graph.branches:
        if not _is_all_or_nothing(branch):
            handle = branch.register_hook(lambda _, gradients, branch=branch: arrived.append((branch, gradients)))
            handles.append(handle)
            has_other_hooks = len(handle.hooks_dict_ref() or ()) > 1
            if not has_other_hooks:
                continue
        children = (child for child, _ in graph.edges[branch] if child is not None)
        not_deferred.update(graph.components[child] for child in children if child in graph.components)
    return not_deferred


def _is_all_or_nothing(branch: Node) -> bool:
    """True for a node that can't compute some of its gradients in the first phase and the others in the second."""
    return (
        is_python_function(branch)
        or type(branch).__name__.rstrip("0123456789") in _ALL_OR_NOTHING
        or has_packed_tensors(branch)
    )


def _find_out_edges(graph: BackwardGraph, branch: Node, not_deferred: set[int]) -> list[_OutEdge]:
    return [
        _OutEdge(position, GradientEdge(child, index), graph.components[child])
        for position, (child, index) in enumerate(graph.edges[branch])
        if child is not None and graph.components.get(child, -1) not in {-1, *not_deferred}
    ]


def _run_deferred(deferred: list[_DeferredNode], roots: list[_Root]) -> None:
    """Run the second phase; the lists are emptied on the way."""
    # A leaf that nothing was computed from: this backward only calls the leaf's hook.
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: _call_branches(deferred, roots))  # type: ignore[no-untyped-call]
    wanted = dict.fromkeys(out_edge.edge for node_call in deferred for out_edge in node_call.out_edges)
    run_backward(
        (leaf,), (leaf.detach(),), False, False, (leaf, *wanted), allow_unreachable=True, accumulate_grad=False
    )


def _call_branches(deferred: list[_DeferredNode], roots: list[_Root]) -> None:
    remaining = Counter(component for node_call in deferred for component in node_call.components)
    num_bytes = 0
    deferred.reverse()
    while deferred:
        added = _call_branch(deferred.pop(), remaining)
        num_bytes += sum(root.gradient.numel() * root.gradient.element_size() for root in added)
        roots.extend(added)
        del added
        if num_bytes >= _PENDING_BYTES:
            _run_engine([root for root in roots if not remaining[root.component]])
            roots[:] = [root for root in roots if remaining[root.component]]
            num_bytes = 0
    _run_engine(roots)


def _call_branch(node_call: _DeferredNode, remaining: Counter[int]) -> list[_Root]:
    call = cast("Callable[..., Gradients]", node_call.branch)
    computed = call(*node_call.gradients)
    release_saved([node_call.branch])
    remaining.subtract(node_call.components)
    return [
        _Root(out_edge.edge, gradient, out_edge.component)
        for out_edge in node_call.out_edges
        if (gradient := computed[out_edge.position]) is not None
    ]


def _run_engine(roots: Sequence[_Root], *, inputs: Sequence[torch.Tensor] = (), retain_graph: bool = False) -> None:
    """Call autograd's engine, which adds to ``.grad`` of ``inputs``, or of all leaves."""
    if not roots:
        return
    # torch.autograd.backward() requires equal shapes; the engine also sums broadcast gradients, as between nodes.
    run_backward(
        tuple(root.edge for root in roots),
        tuple(root.gradient for root in roots),
        retain_graph,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@contextlib.contextmanager
def _collecting(inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Collect the gradients that a backward inside the block adds to the inputs, whose ``.grad`` stays unchanged."""
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
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if not output.requires_grad:
            raise ValueError(
                f"output {index} doesn't require grad: leave it out, since nothing depends on its gradient"
            )
        if gradient is not None and gradient.shape != output.shape:
            shapes = f"{tuple(gradient.shape)}, and the output {tuple(output.shape)}"
            raise ValueError(f"the gradient of output {index} has the shape {shapes}: they must be the same")
    for index, tensor in enumerate(inputs):
        if not (tensor.is_leaf and tensor.requires_grad):
            raise ValueError(
                f"input {index} is not a leaf that requires grad: call the stage with tensor.detach().requires_grad_()"
            )
