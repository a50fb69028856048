"""Checks that plain tensors, which count as replicated, are the same on all ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING

import torch
import xxhash

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import CollectiveMismatchError, add_error_context
from ferrodist.torch_private.autograd import current_graph_task, queue_callback, version_of
from ferrodist.torch_private.compilers import not_compiled
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.replication_warnings import ReplicationWarnings

    _Entry = tuple[str, str, str, str]
    """The module's path, the operator, the tensor's dtype and shape, and a digest of its elements."""

_CALL = "the call"  # in the operator's place in the entry of a forward's circumstances


@not_compiled
class ReplicaCheck:
    """Compares the plain tensors that a parallel module's code uses with distributed ones.

    Each rank records a digest of each tensor, once, and the ranks compare these at the end of the module's outermost
    forward, or of a backward: one small exchange, and none if nothing was recorded. A digest takes less time than the
    operator that reads the tensor. If ``immediate``, each tensor is compared when it is used, by an exchange of its
    own.
    """

    def __init__(
        self, mesh: DeviceMesh, *, immediate: bool, replication_warnings: ReplicationWarnings | None = None
    ) -> None:
        self.mesh, self.is_immediate = mesh, immediate
        self.replication_warnings = replication_warnings  # None: operators without a rule are refused
        self.path = ""  # the path of the module whose forward runs
        self.is_paused = False  # whether nothing is recorded
        self._entries: list[_Entry | Callable[[], _Entry]] = []
        self._due: _Entry | None = None  # the first entry that requires an exchange
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, bool]] = {}

    def record(self, operator: object, tensor: torch.Tensor, mesh: DeviceMesh, *, is_due: bool = True) -> None:
        """Record a plain tensor that an operator takes beside distributed ones.

        If it is not due, it requires no exchange: it is compared, and only then read, if there is one anyway.
        """
        if mesh.group.world_size == 1 or not tensor.numel() or self.is_paused:
            return
        is_due = is_due or self.is_immediate
        version = -1 if tensor.is_inference() else version_of(tensor)
        seen = self._seen.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == version != -1 and seen[2] >= is_due:
            return
        self._seen[id(tensor)] = (weakref.ref(tensor), version, is_due)
        is_backward = current_graph_task() != -1
        describe = functools.partial(_describe, self.path, operator, tensor, is_backward=is_backward)
        if not is_due:
            self._entries.append(describe)
            return
        entry = describe()
        if self.is_immediate:
            _compare([entry], mesh, entry)
            return
        if self._due is None:
            self._due = entry
            if is_backward:
                queue_callback(self.compare)
        self._entries.append(entry)

    def record_call(self, describe: Callable[[], tuple[str, str]]) -> None:
        """Record the circumstances of the forward that begins: in words, and a digest of what words leave out.

        They require no exchange, and are read at the end of the forward, unless ``immediate``.
        """
        if self.mesh.group.world_size == 1:
            return
        where = describe_path(self.path, is_backward=False)

        def entry() -> _Entry:
            return where, _CALL, *describe()

        if self.is_immediate:
            _compare([entry()], self.mesh, entry())
        else:
            self._entries.append(entry)

    def compare(self) -> None:
        """Compare what was recorded since the last comparison; all ranks call this, and all raise if they differ."""
        entries, due = self._entries, self._due
        self.forget()
        if due is not None:
            _compare([one() if callable(one) else one for one in entries], self.mesh, due)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which nothing is recorded: code is tried out, or other ranks record nothing."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def forget(self) -> None:
        """Drop the records."""
        self._entries, self._due = [], None
        self._seen.clear()


def check_replicated(operator: object, tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise CollectiveMismatchError on all ranks of a mesh, which all call this, unless they have the same tensor."""
    if mesh.group.world_size > 1:
        entry = _describe(None, operator, tensor, is_backward=False)
        _compare([entry], mesh, entry)


def _describe(path: str | None, operator: object, tensor: torch.Tensor, *, is_backward: bool) -> _Entry:
    where = describe_module() if path is None else describe_path(path, is_backward=is_backward)
    form = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # a tensor of one element may have any stride
    return where, str(operator), form, xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy().data)


def _compare(entries: Sequence[_Entry], mesh: DeviceMesh, due: _Entry) -> None:
    """Compare the ranks' records; ``due`` is the reason, for the error of ranks that have nothing to compare."""
    group = mesh.group
    digest = xxhash.xxh3_128_digest(repr(entries).encode())
    with add_error_context(
        lambda: (
            f"Rank {group.rank} compared the plain tensors that it has beside distributed ones, the first for"
            f" {due[1]}{due[0]}."
        ),
        "Every rank's code must mix as many with distributed ones, or return as many, or none.",
    ):
        digests = share_bytes(group, "plain tensors", digest, group.timeout)
    if all(one == digests[0] for one in digests):
        return
    ranks_entries: list[Sequence[_Entry]] = all_gather_object(list(entries), group=group)
    first = ranks_entries[0]
    for rank, other in zip(mesh.ranks, ranks_entries, strict=True):
        if other == first:
            continue
        index = next((at for at, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
        if index is None:
            index = min(len(first), len(other))
            longer, (where, operator, form, _) = (
                (mesh.ranks[0], first[index]) if len(first) > index else (rank, other[index])
            )
            what = f"rank {longer} has {form} for {operator}{where}, and the other has none there"
        elif first[index][1] == other[index][1] == _CALL:
            one, another = first[index], other[index]
            differs = ", but of other parameters" if one[:3] == another[:3] else ""
            raise CollectiveMismatchError(
                f"the ranks call a forward{one[0]} of a parallelized model in different ways: rank {mesh.ranks[0]}"
                f" {one[2]}, rank {rank} {another[2]}{differs}. Use torch.no_grad(), train() and requires_grad_() alike"
                " on all ranks, and call models in the same order",
                ranks=(rank,),
            )
        else:
            one, another = first[index], other[index]
            differs = " with other elements" if one[:3] == another[:3] else ""
            what = (
                f"rank {mesh.ranks[0]} has {one[2]} for {one[1]}{one[0]}, rank {rank} {another[2]}{differs} for"
                f" {another[1]}{another[0]}"
            )
        raise CollectiveMismatchError(
            f"plain tensors beside distributed ones count as replicated, and differ between ranks: {what}. Make it the"
            " same on all ranks, as by the same seed or inputs, or distribute it",
            ranks=(rank,),
        )


def describe_path(path: str, *, is_backward: bool) -> str:
    """The module at a path, or the backward, whose module is not known, for errors and warnings."""
    return " in backward" if is_backward else f" in module {path!r}" if path else " in the model"


def describe_module() -> str:
    """The module whose forward runs, by its path in the outermost one, for errors: found on the call stack."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(owner, torch.nn.Module):
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return ""
    kind = type(modules[0]).__name__
    path = next((name for name, one in modules[-1].named_modules() if one is modules[0]), "")
    return f" in module {path!r} ({kind})" if path else f" in {with_article(kind)}"
