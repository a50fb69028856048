"""One rank reads for all: where storage is slow, or each reader costs, every byte is read once and sent on.

All ranks go through their boxes in one order, that of the files; so each message comes when it is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from ferrodist.checkpoint.dtypes import dtype_from_name
from ferrodist.checkpoint.outcome import agree_on
from ferrodist.checkpoint.reader import put_elements
from ferrodist.collectives.objects import gather_object
from ferrodist.collectives.point_to_point import recv_into, send
from ferrodist.tensor.regions import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.manifest import Manifest
    from ferrodist.checkpoint.reader import CheckpointReader
    from ferrodist.deadline import Deadline

__all__ = ["Need", "read_for_all"]

_CHUNK_BYTES = 32 << 20


class Need(msgspec.Struct, frozen=True, array_like=True):
    """A box of a saved tensor that a rank wants."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def read_for_all(
    reader: CheckpointReader,
    manifest: Manifest,
    wanted: Sequence[tuple[str, Box, torch.Tensor]],
    *,
    where: str,
    group: Backend,
    deadline: Deadline,
) -> None:
    """Fill tensors on all ranks with what rank 0 reads; every rank calls this.

    Args:
        reader: Reads; on rank 0 only.
        manifest: The checkpoint's.
        wanted: Boxes of saved tensors, and what of this rank they fill.
        where: The checkpoint, for messages.
        group: The ranks.
        deadline: When all must be done.

    Raises:
        DistCheckpointError: A rank has no memory for it; or, when everything was sent, something could not be read, on
            rank 0, or doesn't fit.
        DistributedError: A rank was lost, or is late.
    """
    own: dict[Need, list[torch.Tensor]] = {}
    for key, box, view in wanted:
        if box.numel:
            own.setdefault(Need(key, box.offsets, box.shape), []).append(view)
    gathered = gather_object(msgspec.msgpack.encode(list(own)), group=group, timeout=deadline.remaining())
    with agree_on("make room to read a checkpoint", where, group, deadline):
        receivers = _receivers(own, gathered or [])
        room = torch.empty(_most_bytes(receivers, manifest), dtype=torch.uint8, device="cpu")
    if group.rank == 0:
        failure = _read_and_send(reader, manifest, own, receivers, room, group=group, deadline=deadline)
    else:
        failure = _receive(own, manifest, room, group=group, deadline=deadline)
    if failure is not None:
        raise failure


def _receivers(own: Iterable[Need], gathered: Sequence[bytes]) -> dict[Need, list[int]]:
    """Which other ranks want what rank 0 reads; elsewhere what this rank wants, and nobody."""
    receivers: dict[Need, list[int]] = {need: [] for need in own}
    for rank, encoded in enumerate(gathered):
        for need in msgspec.msgpack.decode(encoded, type=list[Need]) if rank else ():
            receivers.setdefault(need, []).append(rank)
    return receivers


def _receive(
    own: Mapping[Need, Sequence[torch.Tensor]],
    manifest: Manifest,
    room: torch.Tensor,
    *,
    group: Backend,
    deadline: Deadline,
) -> Exception | None:
    """Fill what this rank wants; why it could not."""
    failure: Exception | None = None
    for need, chunk, inner in _chunks(own, manifest):
        data = _in(room, need, chunk, manifest)
        recv_into(data, 0, group=group, timeout=deadline.remaining())
        failure = failure or _try_to(partial(_keep, need, data, inner, own[need]))
    return failure


def _read_and_send(
    reader: CheckpointReader,
    manifest: Manifest,
    own: Mapping[Need, Sequence[torch.Tensor]],
    receivers: Mapping[Need, Sequence[int]],
    room: torch.Tensor,
    *,
    group: Backend,
    deadline: Deadline,
) -> Exception | None:
    """Read what all ranks want; why that could not be done."""
    failure: Exception | None = None
    for need, chunk, inner in _chunks(receivers, manifest):
        data = _in(room, need, chunk, manifest)
        failure = failure or _try_to(partial(reader.read_box, need.key, chunk, data))
        for rank in receivers[need]:
            send(data, rank, group=group, timeout=deadline.remaining())
        failure = failure or _try_to(partial(_keep, need, data, inner, own.get(need, ())))
    return failure


def _try_to(act: Callable[[], None]) -> Exception | None:
    """Why it can't be done, for other ranks wait for all that they want, and learn of it then."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised when all is sent
        return error
    return None


def _most_bytes(needs: Iterable[Need], manifest: Manifest) -> int:
    """Of one message: some rows, and where they are long one row, of the tensor with the longest ones."""
    sizes = [chunk.numel * _dtype(need, manifest).itemsize for need, chunk, _ in _chunks(needs, manifest)]
    return max(sizes, default=0)


def _dtype(need: Need, manifest: Manifest) -> torch.dtype:
    return dtype_from_name(manifest.tensors[need.key].dtype)


def _in(room: torch.Tensor, need: Need, box: Box, manifest: Manifest) -> torch.Tensor:
    """A tensor for the elements of a box, at the beginning of the room."""
    dtype = _dtype(need, manifest)
    return room[: box.numel * dtype.itemsize].view(dtype).view(box.shape)


def _keep(need: Need, data: torch.Tensor, inner: Box, views: Iterable[torch.Tensor]) -> None:
    for view in views:
        put_elements(inner.take(view), data, need.key)


def _in_order(needs: Iterable[Need], manifest: Manifest) -> list[Need]:
    """As they lie in the files, and the same on all ranks."""
    return sorted(needs, key=lambda need: (*manifest.place(need.key), need.key, need.offsets, need.shape))


def _chunks(needs: Iterable[Need], manifest: Manifest) -> Iterator[tuple[Need, Box, Box]]:
    """All needs in parts of some rows: as boxes of the saved tensor, and of what is wanted."""
    for need in _in_order(needs, manifest):
        whole = Box(need.offsets, need.shape)
        if not need.shape:
            yield need, whole, whole
            continue
        row = whole.numel // need.shape[0] * _dtype(need, manifest).itemsize
        at_once = max(1, _CHUNK_BYTES // row)
        for begin in range(0, need.shape[0], at_once):
            count = min(at_once, need.shape[0] - begin)
            chunk = Box((need.offsets[0] + begin, *need.offsets[1:]), (count, *need.shape[1:]))
            yield need, chunk, chunk.within(whole)
