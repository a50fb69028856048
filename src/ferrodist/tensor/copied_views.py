"""Views whose parts are copies: none is read after it is out of date, none is written where the write would be lost.

[Note: views]
A view of a distributed tensor has a part that is a view of the tensor's part, so that what is written to one is seen in
the other; autograd knows from the wrappers which is a view of which, and where in the whole tensor's memory it starts.
Two kinds of views have parts with memory of their own. Where the parts had to be moved first, writing to the view is an
error, and so is reading it after the tensor was written. Where this rank's part alone lies in memory so that its view
takes a copy, which the other ranks can't know, what is written to either is copied to the other. Views that backward
formulas take are not watched: they are of tensors that nobody else has.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.tensors import no_torch_dispatch, storage_identity

VIEW_COPIES: dict[int, list[weakref.ref[ViewCopy]]] = {}
"""The copies of what lies in a storage, by the storage's identity; ranks that are threads share it."""


class ViewKind(Enum):
    """Where a view's part lies."""

    SHARED = "in the memory of the viewed tensor's part"
    COPIED = "in memory of its own, on this rank alone"
    MOVED = "in memory of its own, on every rank"
    UNSPECIFIED = "as MOVED, where torch itself gives no promise that it shares memory"


def actual_kind(kind: ViewKind, view: torch.Tensor, viewed: torch.Tensor) -> ViewKind:
    """The kind of a view, of which it is known what it is if it has memory of its own."""
    if kind is ViewKind.COPIED and storage_identity(view) == storage_identity(viewed):
        return ViewKind.SHARED
    return kind


class ViewCopy:
    """The memory that a view's part has of its own. The view has it, and so have the views of that view.

    Args:
        source: The part of the tensor that was viewed.
        copy: The view's part.
        is_moved: Whether it is of other elements than the source, which other ranks had.
        parent: The same for the tensor that was viewed, if that is such a view itself.
        owner: The tensor that was viewed, if torch gives no promise that it and the view share memory: then the copy
            is nobody's concern once that tensor is gone. None where torch promises it.
    """

    __slots__ = ("__weakref__", "_owner", "_source", "copy", "is_moved", "is_stale", "parent", "views")

    def __init__(
        self, source: torch.Tensor, copy: torch.Tensor, *, is_moved: bool, parent: ViewCopy | None, owner: Any = None
    ) -> None:
        self._source = source if owner is None else None
        self._owner = None if owner is None else weakref.ref(owner)
        self.copy, self.is_moved, self.parent = copy, is_moved, parent
        self.is_stale = False
        """Whether the source was written after elements were moved: then no view can be read."""
        self.views: list[weakref.ref[Any]] = []
        """All tensors whose parts lie in the copy."""

    @staticmethod
    def of(viewed: Any, copy: torch.Tensor, kind: ViewKind) -> ViewCopy:
        """What a view of a tensor has."""
        owner = viewed if kind is ViewKind.UNSPECIFIED else None
        is_moved = kind is not ViewKind.COPIED
        return ViewCopy(viewed._local, copy, is_moved=is_moved, parent=viewed._view_copy, owner=owner)

    @property
    def source(self) -> torch.Tensor | None:
        """The part of the tensor that was viewed; None where that is gone."""
        if self._owner is None:
            return self._source
        owner = self._owner()
        return None if owner is None else owner._local

    @property
    def takes_writes(self) -> bool:
        """Whether what is written to the copy can be brought to where it belongs."""
        if self.source is None:
            return True
        return not self.is_moved and (self.parent is None or self.parent.takes_writes)

    def write_back(self) -> None:
        """Copy what was written to the copy to the source, and to all other copies of that."""
        source = self.source
        if source is None:
            return
        source.copy_(self.copy.reshape(source.shape))
        _refresh(storage_identity(source), but=self)
        if self.parent is not None:
            self.parent.write_back()

    def refresh(self) -> None:
        """Copy what was written to the source, or give the views up where they are of other elements."""
        source = self.source
        if source is None:
            return
        if not self.is_moved:
            self.copy.copy_(source.reshape(self.copy.shape))
        elif not self.is_stale:
            self.is_stale = True
            for view in [one() for one in self.views]:
                if view is not None:
                    view._give_up()
        _refresh(storage_identity(self.copy))


def track(view: Any, part: ViewCopy) -> None:
    """Keep a view's part and what it is a copy of in step, as long as the view lives."""
    view._view_copy = part
    is_new = not part.views
    part.views = [*[one for one in part.views if one() is not None], weakref.ref(view)]
    source = part.source
    if source is None or not is_new:
        return
    key = storage_identity(source)

    def forget(gone: Any) -> None:
        left = [one for one in VIEW_COPIES.get(key, ()) if one is not gone]
        if left:
            VIEW_COPIES[key] = left
        else:
            VIEW_COPIES.pop(key, None)

    VIEW_COPIES[key] = [*VIEW_COPIES.get(key, ()), weakref.ref(part, forget)]


def rebind(tensor: Any, source: Any) -> Any:
    """Have a tensor share memory with another, whose shape and layout it takes too."""
    with no_torch_dispatch():
        torch.ops.aten.set_.source_Tensor(tensor, source)  # the wrapper's own shape and stride
    tensor._local, tensor._spec, tensor._view_copy = source._local, source._spec, None
    if source._view_copy is not None:
        track(tensor, source._view_copy)
    return tensor


def after_write(tensor: Any) -> None:
    """Bring what was written to a tensor to all others that share memory with the whole."""
    if tensor._view_copy is not None:
        tensor._view_copy.write_back()
    if VIEW_COPIES:
        _refresh(storage_identity(tensor._local))


def _refresh(storage: int, but: ViewCopy | None = None) -> None:
    """Bring what was written to a storage to the copies of it."""
    for one in VIEW_COPIES.get(storage, ()):
        part = one()
        if part is not None and part is not but:
            part.refresh()


def check_writable(func: torch._ops.OpOverload, tensor: Any) -> None:
    """Raise if what is written to a tensor would be lost, or be written to one element for many.

    torch refuses the latter by the part that each rank has, which may be of one element, or of none, on some.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is not None and 0 in spec.stride and not _may_write_expanded(func):
        repeated = any(size > 1 and not step for size, step in zip(spec.shape, spec.stride, strict=True))
        if repeated and 0 not in spec.shape:
            raise RuntimeError(
                f"{func}: unsupported operation: more than one element of the written-to tensor, {spec}, refers to a"
                " single memory location. Please clone() the tensor before performing the operation."
            )
    copied = getattr(tensor, "_view_copy", None)
    if copied is not None and not copied.takes_writes:
        raise UnsupportedOpError(
            f"{func} would write to a view whose parts had to be moved, {tensor._spec}, so that the"
            " tensor that it is a view of would not change: redistribute() that tensor first, so that what"
            " the view cuts or joins is whole, or write to a clone() of the view"
        )


def _may_write_expanded(func: torch._ops.OpOverload) -> bool:
    """Whether torch lets an operator write to expanded tensors: one value, or as transpose_ no element."""
    return torch.Tag.inplace_view in func.tags or str(func.overloadpacket) in _WRITING_ONE_VALUE


_WRITING_ONE_VALUE = (
    "aten.fill_",
    "aten.zero_",
    "aten._foreach_zero_",
    "aten.masked_fill_",
    "aten.index_fill_",
    "aten.index_put_",
)


def describe_stale(spec: object) -> str:
    """Say of a view that was given up why it can't be read."""
    return (
        f"the tensor was written of which this is a view whose parts had to be moved, {spec}, so that the view is out"
        " of date: take the view again after writing, or redistribute() the tensor first, so that what the view cuts"
        " or joins is whole"
    )
