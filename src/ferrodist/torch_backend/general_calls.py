"""torch's collectives on the general path, a `CollectiveOp` each: arguments are checked, and the call is prepared."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.arguments import check_int
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.collectives.arguments import check_tensor, has_memory
from ferrodist.collectives.payloads import unpack_payloads
from ferrodist.collectives.reduce_op import Op, check_reduction
from ferrodist.errors import CollectiveMismatchError
from ferrodist.torch_backend.layouts import Source, Target, as_bytes, elements_per_item, row_size
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import CollectiveEngine

_DIGEST_SIZE = 16

_HEAD = struct.Struct(f"<Q{_DIGEST_SIZE}s")
"""A rank's count and the digest of its text; followed by as much of the text as has room in the payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A collective of torch's whose arguments have been checked."""

    op: CollectiveOp  # its `source` is one of torch's tensors, for the device
    results: list[Any]  # of `Work.result()`
    # Runs the call in its turn, when its tensors can be read; takes the engine, the timeout in seconds, the position.
    run: Callable[[CollectiveEngine, float, int], None]
    finish: Callable[[], None] = lambda: None  # called once, by the thread that waits for the end


def _call(
    op: CollectiveOp, results: list[Any], *, source: Source | None = None, target: Target | None = None
) -> CheckedCall:
    """Prepare a call that reads ``source`` and writes ``target`` in its turn."""

    def run(engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        flat_source = None if source is None else as_bytes(source.read())
        flat_out = None if target is None else as_bytes(target.flat)
        if op.kind is CollectiveKind.BROADCAST and flat_out is None:
            flat_out = flat_source
        engine.run(op.replace(source=flat_source, out=flat_out, timeout=timeout), sequence)
        if target is not None:
            target.finish()

    return CheckedCall(op=op, results=results, run=run)


class ArgumentComparison:
    """A comparison, before a call, of arguments that engines don't compare.

    ``text`` has this rank's arguments, which must be equal on all ranks; ``what`` names them in the error. ``count``
    may differ.
    """

    def __init__(self, group: Backend, name: str, what: str, text: str, count: int = 0) -> None:
        self._group = group
        self._name = name
        self._what = what
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_SIZE).digest()
        self._payload = (_HEAD.pack(count, digest) + text.encode())[:MAX_PAYLOAD]
        self._heads: list[tuple[int, bytes]] = []
        self._texts: list[str] = []
        # Under a name of its own, so that ranks in another call find a mismatch and don't take this for their data.
        op = CollectiveOp(kind=CollectiveKind.SHARE, name=f"{name}'s sizes", payload=self._payload, timeout=0)
        self.call = CheckedCall(op=op, results=[], run=partial(self._share, op))

    @property
    def counts(self) -> list[int]:
        """Each rank's ``count``, once `call` has run."""
        return [count for count, _ in self._heads]

    def guard(self, call: CheckedCall) -> CheckedCall:
        """Make a call, which is to follow `call`, raise CollectiveMismatchError on all ranks where they disagree."""

        def run(engine: CollectiveEngine, timeout: float, sequence: int) -> None:
            if len({digest for _, digest in self._heads}) != 1:
                # All ranks have reserved the position. Where nothing was compared, the group has failed: raise why.
                engine.run(CollectiveOp(kind=CollectiveKind.BARRIER, timeout=timeout), sequence)
                raise CollectiveMismatchError(
                    f"the ranks of group {self._group.name!r} disagree about the {self._what} of {self._name}: "
                    + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(self._texts))
                )
            call.run(engine, timeout, sequence)

        return replace(call, run=run)

    def _share(self, op: CollectiveOp, engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        payloads = engine.run(op.replace(timeout=timeout), sequence) or []
        self._heads = unpack_payloads(_HEAD, payloads, self._group, op.name)
        for payload in payloads:
            text = payload[_HEAD.size :].decode("ascii", "replace")
            self._texts.append(f"{text}..." if len(payload) == MAX_PAYLOAD else text)


def _op(kind: CollectiveKind, tensor: torch.Tensor | None = None, **fields: Any) -> CollectiveOp:
    """A call on the device of a tensor, still without its flat tensors and its timeout."""
    return CollectiveOp(kind=kind, source=tensor, timeout=0, **fields)


def barrier() -> CheckedCall:
    """Barrier."""
    return _call(_op(CollectiveKind.BARRIER), [])


def allreduce(tensor: torch.Tensor, op: Op) -> CheckedCall:
    """Fold a dense tensor over the ranks, in place."""
    check_movable(tensor, op)
    call = _op(CollectiveKind.ALLREDUCE, tensor, reduction=op)
    return _call(call, [tensor], source=Source(tensor), target=Target(tensor))


def reduce(group: Backend, tensor: torch.Tensor, root: int, op: Op) -> CheckedCall:
    """Fold a tensor over the ranks into the root's."""
    check_movable(tensor, op)
    target = Target(tensor) if group.rank == root else None
    return _call(
        _op(CollectiveKind.REDUCE, tensor, reduction=op, root=root), [tensor], source=Source(tensor), target=target
    )


def broadcast(group: Backend, tensor: torch.Tensor, root: int) -> CheckedCall:
    """Copy the root's tensor into every rank's."""
    check_movable(tensor)
    op = _op(CollectiveKind.BROADCAST, tensor, root=root)
    if group.rank == root:
        return _call(op, [tensor], source=Source(tensor))
    return _call(op, [tensor], target=Target(tensor))


def all_gather(group: Backend, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> list[CheckedCall]:
    """Gather into a tensor for each rank; the sizes may differ."""
    _check_list(group, outputs, tensor, "outputs")
    target = Target(*outputs)
    if target.counts[group.rank] != tensor.numel():
        raise ValueError(
            f"this rank's output has {counted(target.counts[group.rank], 'element')}, its input {tensor.numel()}: each"
            " rank's output must be as large as its input"
        )
    return _with_size_comparison(
        group, "all_gather", target.counts, _gather_into(target, [list(outputs)], tensor, target.counts)
    )


def all_gather_single(group: Backend, output: torch.Tensor, tensor: torch.Tensor) -> CheckedCall:
    """Gather into one tensor."""
    _check_whole(group, output, tensor)
    target = Target(output, input_tensor=None if _is_own_part(group, output, tensor) else tensor)
    return _gather_into(target, [output], tensor, [tensor.numel()] * group.world_size)


def _gather_into(target: Target, results: list[Any], tensor: torch.Tensor, counts: Sequence[int]) -> CheckedCall:
    check_movable(tensor)
    scale = elements_per_item(tensor)
    op = _op(CollectiveKind.ALL_GATHER, tensor, counts=[count * scale for count in counts], dim=0)
    return _call(op, results, source=Source(tensor), target=target)


def gather(
    group: Backend, outputs: Sequence[torch.Tensor] | torch.Tensor | None, tensor: torch.Tensor, root: int
) -> CheckedCall:
    """Gather into one tensor of the root's, or one for each rank, all of one size; ``outputs`` is None elsewhere."""
    target, results = None, []
    if isinstance(outputs, torch.Tensor):
        _check_whole(group, outputs, tensor)
        target = Target(outputs, input_tensor=None if _is_own_part(group, outputs, tensor) else tensor)
        results = [outputs]
    elif outputs is not None:
        _check_list(group, outputs, tensor, "outputs")
        target, results = Target(*outputs), list(outputs)
        _check_even(target.counts, tensor)
    check_movable(tensor)
    counts = [tensor.numel() * elements_per_item(tensor)] * group.world_size
    op = _op(CollectiveKind.GATHER, tensor, counts=counts, root=root)
    return _call(op, results, source=Source(tensor), target=target)


def scatter(
    group: Backend, tensor: torch.Tensor, inputs: Sequence[torch.Tensor] | torch.Tensor | None, root: int
) -> CheckedCall:
    """Scatter one tensor of the root's, or one for each rank, all of one size; ``inputs`` is None elsewhere."""
    check_movable(tensor)
    source = input_tensor = None
    if isinstance(inputs, torch.Tensor):
        _check_whole(group, inputs, tensor, ("input", "output"))
        source, input_tensor = Source(inputs), None if _is_own_part(group, inputs, tensor) else inputs
    elif inputs is not None:
        _check_list(group, inputs, tensor, "inputs")
        source = Source(*inputs)
        _check_even(source.counts, tensor)
    counts = [tensor.numel() * elements_per_item(tensor)] * group.world_size
    op = _op(CollectiveKind.SCATTER, tensor, counts=counts, root=root)
    return _call(op, [tensor], source=source, target=Target(tensor, input_tensor=input_tensor))


def reduce_scatter(group: Backend, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op) -> list[CheckedCall]:
    """Fold and scatter a tensor for each rank; the sizes may differ."""
    _check_list(group, inputs, output, "inputs")
    source = Source(*inputs)
    if source.counts[group.rank] != output.numel():
        raise ValueError(
            f"this rank's input has {counted(source.counts[group.rank], 'element')}, its output {output.numel()}: each"
            " rank's output must be as large as the inputs for it"
        )
    call = _reduce_parts(Target(output), output, source, source.counts, op)
    return _with_size_comparison(group, "reduce_scatter", source.counts, call)


def reduce_scatter_single(group: Backend, output: torch.Tensor, tensor: torch.Tensor, op: Op) -> CheckedCall:
    """Fold one tensor over the ranks, and scatter it."""
    _check_whole(group, tensor, output, ("input", "output"))
    target = Target(output, input_tensor=None if _is_own_part(group, tensor, output) else tensor)
    return _reduce_parts(target, output, Source(tensor), [output.numel()] * group.world_size, op)


def _reduce_parts(target: Target, output: torch.Tensor, source: Source, counts: Sequence[int], op: Op) -> CheckedCall:
    check_movable(output, op)
    call = _op(CollectiveKind.REDUCE_SCATTER, output, reduction=op, counts=counts, dim=0)
    return _call(call, [output], source=source, target=target)


def all_to_all_single(
    group: Backend,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> CheckedCall:
    """Exchange rows of one tensor; without splits in equal numbers."""
    check_movable(output)
    check_movable(tensor)
    _check_like(output, tensor)
    if not tensor.dim() or not output.dim():
        raise ValueError("all_to_all_single divides tensors along their first dim, which one of no dims lacks")
    send_counts = _split(group, tensor, input_splits, "input")
    receive_counts = _split(group, output, output_splits, "output")
    return _exchange(Target(output, input_tensor=tensor), [output], Source(tensor), tensor, send_counts, receive_counts)


def _split(group: Backend, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
    """The number of elements that go to each rank, or come from it."""
    size = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if size % group.world_size:
            raise ValueError(
                f"the {what} has {counted(size, 'row')}, which {group.world_size} ranks can't share evenly: pass"
                f" {what}_split_sizes"
            )
        splits = [size // group.world_size] * group.world_size
    splits = [check_int(f"{what}_split_sizes[{rank}]", count) for rank, count in enumerate(splits)]
    if len(splits) != group.world_size or min(splits) < 0 or sum(splits) != size:
        raise ValueError(
            f"{what}_split_sizes {list(splits)} must be one for each of {counted(group.world_size, 'rank')}, and"
            f" together the {counted(size, 'row')} of the {what}"
        )
    return [count * row_size(tensor) for count in splits]


def all_to_all(group: Backend, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> CheckedCall:
    """Exchange a tensor with each rank; the sizes may differ."""
    _check_number(group, inputs, "inputs")
    _check_list(group, outputs, inputs[0], "outputs")
    _check_list(group, inputs, outputs[0], "inputs")
    source, target = Source(*inputs), Target(*outputs)
    return _exchange(target, list(outputs), source, inputs[0], source.counts, target.counts)


def _exchange(  # noqa: PLR0917 - both sides' tensors and counts
    target: Target,
    results: list[Any],
    source: Source,
    like: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
) -> CheckedCall:
    scale = elements_per_item(like)
    sent, received = ([count * scale for count in counts] for counts in (send_counts, receive_counts))
    # Compared in elements: ranks may divide the same elements into rows of different sizes.
    op = _op(CollectiveKind.ALL_TO_ALL, like, counts=sent, recv_counts=received, unit=scale)
    return _call(op, results, source=source, target=target)


def _with_size_comparison(group: Backend, name: str, counts: Sequence[int], call: CheckedCall) -> list[CheckedCall]:
    """The call, after a comparison of uneven sizes; of even ones the engine compares the sum, which is enough."""
    if len(set(counts)) == 1:
        return [call]
    comparison = ArgumentComparison(group, name, "sizes of the lists", str(list(counts)))
    return [comparison.call, comparison.guard(call)]


# Checks of arguments.


def check_movable(tensor: torch.Tensor, op: Op | None = None) -> None:
    """Raise unless engines can move a tensor, or fold it by ``op``."""
    if op is not None:
        check_tensor(tensor)
        check_reduction(tensor.dtype, op)
    elif (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.device.type not in ("cpu", "cuda")
        or tensor.is_quantized
        or not has_memory(tensor)
    ):
        check_tensor(tensor)  # raises


def _check_like(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype is not other.dtype or one.device != other.device:
        raise ValueError(
            f"input and output must be of one dtype, on one device, not {other.dtype} on {other.device} and"
            f" {one.dtype} on {one.device}"
        )


def _check_whole(
    group: Backend, whole: torch.Tensor, part: torch.Tensor, names: tuple[str, str] = ("output", "input")
) -> None:
    """Raise unless the first tensor has a part like the second one for each rank."""
    check_movable(whole)
    _check_like(whole, part)
    if whole.numel() != group.world_size * part.numel():
        raise ValueError(
            f"the {names[0]} must have the {names[1]}'s {counted(part.numel(), 'element')} for each of"
            f" {counted(group.world_size, 'rank')}, not {whole.numel()}"
        )


def _check_list(group: Backend, tensors: Sequence[torch.Tensor], like: torch.Tensor, what: str) -> None:
    _check_number(group, tensors, what)
    for tensor in tensors:
        check_movable(tensor)
        _check_like(tensor, like)


def _check_number(group: Backend, tensors: Sequence[torch.Tensor], what: str) -> None:
    if len(tensors) != group.world_size:
        ranks = counted(group.world_size, "rank")
        raise ValueError(f"{what} must be one tensor for each of {ranks}, not {len(tensors)}")


def _check_even(counts: Sequence[int], tensor: torch.Tensor) -> None:
    if set(counts) != {tensor.numel()}:
        raise ValueError(
            f"the tensors of the list must have {counted(tensor.numel(), 'element')} each, as this rank's other"
            f" one, not {counts}"
        )


def _is_own_part(group: Backend, whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether a tensor is this rank's part of another, which no other rank's data overlaps."""
    return part.data_ptr() == whole.data_ptr() + group.rank * part.nbytes
