"""Views whose local shard is a copy: writes to them, and to the viewed tensors, are propagated or refused.

[Note: views]
A view of a distributed tensor has a shard that is a view of the tensor's shard, so that a write to one is seen in the
other. From the wrappers autograd knows which tensor is a view of which, and its offset in the full tensor's memory. Two
kinds of views have shards with memory of their own. If shards had to be redistributed first, a write to the view is an
error, and so is a read of it after a write to the tensor. If only this rank's shard has strides that make its view a
copy, which other ranks can't know, a write to either is copied to the other. Views that backward formulas take are not
tracked: they are of tensors that nobody else has.
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.autograd import increment_version
from ferrodist.torch_private.tensors import no_torch_dispatch, storage_identity

VIEW_COPIES: dict[int, list[weakref.ref[ViewCopy]]] = {}
"""The copies of each storage, by the storage's identity; ranks that are threads share them."""


class ViewKind(Enum):
    """The storage of a view's shard."""

    SHARED = "in the memory of the viewed tensor's shard"
    COPIED = "in memory of its own, on this rank alone"
    MOVED = "in memory of its own, on every rank"
    UNSPECIFIED = "as MOVED, where torch itself does not promise shared memory"


def actual_kind(kind: ViewKind, view: torch.Tensor, viewed: torch.Tensor) -> ViewKind:
    """The kind of a view, given the kind that it has if its shard has memory of its own."""
    if kind is ViewKind.COPIED and storage_identity(view) == storage_identity(viewed):
        return ViewKind.SHARED
    return kind


class ViewCopy:
    """The memory of its own that a view's shard has; the views of that view share the `ViewCopy`.

    ``parent`` is the viewed tensor's own `ViewCopy`, if that is a view with a copy too. ``owner`` is the viewed tensor,
    if torch does not promise that it and the view share memory: the copy needs no update once that tensor is gone.
    """

    __slots__ = ("__weakref__", "_owner", "_source", "copy", "is_moved", "is_stale", "parent", "views")

    def __init__(self, viewed: Any, copy: torch.Tensor, kind: ViewKind) -> None:
        has_promise = kind is not ViewKind.UNSPECIFIED
        self._source = viewed._local if has_promise else None
        self._owner = None if has_promise else weakref.ref(viewed)
        self.copy, self.is_moved, self.parent = copy, kind is not ViewKind.COPIED, viewed._view_copy
        self.is_stale = False  # whether the source was written after its elements were moved: no view can be read then
        self.views: list[weakref.ref[Any]] = []  # all tensors whose shards are in the copy

    @property
    def source(self) -> torch.Tensor | None:
        """The viewed tensor's shard; None if that is gone."""
        if self._owner is None:
            return self._source
        owner = self._owner()
        return None if owner is None else owner._local

    @property
    def takes_writes(self) -> bool:
        """Return whether a write to the copy can be brought to the viewed tensor."""
        if self.source is None:
            return True
        return not self.is_moved and (self.parent is None or self.parent.takes_writes)

    def write_back(self) -> None:
        """Bring a write to the copy to the source, and to all other copies of the source."""
        source = self.source
        if source is None:
            return
        source.copy_(self.copy.reshape(source.shape))
        _refresh(storage_identity(source), except_copy=self)
        if self.parent is not None:
            self.parent.write_back()

    def refresh(self) -> None:
        """Bring a write to the source to the copy, or invalidate the views if they have other elements."""
        source = self.source
        if source is None:
            return
        if not self.is_moved:
            self.copy.copy_(source.reshape(self.copy.shape))
        elif not self.is_stale:
            self.is_stale = True
            for view in [one() for one in self.views]:
                if view is not None:
                    view._invalidate()
        _refresh(storage_identity(self.copy))


def register_view(view: Any, view_copy: ViewCopy) -> None:
    """Register a view, so that writes to it and to its source are propagated as long as the view lives."""
    view._view_copy = view_copy
    is_new = not view_copy.views
    view_copy.views = [*[one for one in view_copy.views if one() is not None], weakref.ref(view)]
    source = view_copy.source
    if source is None or not is_new:
        return
    key = storage_identity(source)

    def forget(gone: Any) -> None:
        left = [one for one in VIEW_COPIES.get(key, ()) if one is not gone]
        if left:
            VIEW_COPIES[key] = left
        else:
            VIEW_COPIES.pop(key, None)

    VIEW_COPIES[key] = [*VIEW_COPIES.get(key, ()), weakref.ref(view_copy, forget)]


def rebind(tensor: Any, source: Any) -> Any:
    """Let a tensor share memory with another, and take its shape and spec too."""
    with no_torch_dispatch():
        torch.ops.aten.set_.source_Tensor(tensor, source)  # the wrapper's own shape and strides
    local = source._local  # which raises if it is out of date
    tensor._revive()
    tensor._local, tensor._spec, tensor._view_copy = local, source._spec, None
    if source._view_copy is not None:
        register_view(tensor, source._view_copy)
    return tensor


def count_write(tensor: Any) -> None:
    """Let autograd see a write to a tensor's shard, which local operators may have saved for their gradients."""
    if not tensor._local.is_inference():
        increment_version((tensor._local,))


def after_write(tensor: Any) -> None:
    """Bring a write to a tensor to all others that share memory with the full tensor."""
    count_write(tensor)
    if tensor._view_copy is not None:
        tensor._view_copy.write_back()
    if VIEW_COPIES:
        _refresh(storage_identity(tensor._local))


def _refresh(storage: int, except_copy: ViewCopy | None = None) -> None:
    """Bring a write to a storage to its copies, without ``except_copy``."""
    for one in VIEW_COPIES.get(storage, ()):
        view_copy = one()
        if view_copy is not None and view_copy is not except_copy:
            view_copy.refresh()


def check_writable(func: torch._ops.OpOverload, tensor: Any) -> None:
    """Raise if a write to a tensor would be lost, or would write one element in the place of many.

    torch refuses the latter by the local shard, which may have one element, or none, on some ranks.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is not None and 0 in spec.stride and 0 not in spec.shape:
        is_repeated = any(size > 1 and not step for size, step in zip(spec.shape, spec.stride, strict=True))
        # Operators such as transpose_ write no element.
        if is_repeated and not (torch.Tag.inplace_view in func.tags or str(func.overloadpacket) in _WRITING_ONE_VALUE):
            raise RuntimeError(
                f"{func}: unsupported operation: more than one element of the written-to tensor, {spec}, refers to a"
                " single memory location. Please clone() the tensor before performing the operation."
            )
    view_copy = getattr(tensor, "_view_copy", None)
    if view_copy is not None and not view_copy.takes_writes:
        raise UnsupportedOpError(
            f"{func} would write to a view whose shards had to be redistributed, {tensor._spec}, so that the viewed"
            " tensor would not change: redistribute() that tensor first, so that the dims that the view splits or"
            " joins are replicated, or write to a clone() of the view"
        )


_WRITING_ONE_VALUE = tuple(
    f"aten.{name}_" for name in ("fill", "zero", "_foreach_zero", "masked_fill", "index_fill", "index_put")
)
"""Operators that torch lets write to expanded tensors, as they write one value."""
