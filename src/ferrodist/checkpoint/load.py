"""Loading a checkpoint into what is there, however it lies, on however many ranks.

manifest --rank 0 reads, all get it--> match with `into` --agree--> each rank reads what it needs --agree--> done

One rank reads for all: where storage is slow, or each reader costs, every byte is read once and sent on.

All ranks go through their boxes in one order, that of the files; so each message comes when it is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ferrodist.checkpoint.consensus import all_or_none, run_on_rank0
from ferrodist.checkpoint.format.dtypes import dtype_from_name
from ferrodist.checkpoint.format.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from ferrodist.checkpoint.load_plan import LoadPlanner
from ferrodist.checkpoint.reader import CheckpointReader, put_elements
from ferrodist.checkpoint.retention import read_manifest
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.state import tell_autograd
from ferrodist.collectives.objects import all_gather_object, broadcast_object, gather_object
from ferrodist.collectives.p2p import recv_into, send
from ferrodist.errors import DistCheckpointError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.local_shards import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.storage.base import Storage
    from ferrodist.deadline import Deadline
    from ferrodist.tensor.local_shards import LocalShard

_CHUNK_BYTES = 32 << 20


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
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
    own: dict[ReadRequest, list[torch.Tensor]] = {}
    for key, box, view in wanted:
        if box.numel:
            own.setdefault(ReadRequest(key, box.offsets, box.shape), []).append(view)
    gathered = gather_object(msgspec.msgpack.encode(list(own)), group=group, timeout=deadline.remaining())
    with all_or_none("make room to read a checkpoint", where, group, deadline):
        receivers = _receivers(own, gathered or [])
        room = torch.empty(_most_bytes(receivers, manifest), dtype=torch.uint8, device="cpu")
    if group.rank == 0:
        failure = _read_and_send(reader, manifest, own, receivers, room, group=group, deadline=deadline)
    else:
        failure = _receive(own, manifest, room, group=group, deadline=deadline)
    if failure is not None:
        raise failure


def _receivers(own: Iterable[ReadRequest], gathered: Sequence[bytes]) -> dict[ReadRequest, list[int]]:
    """Which other ranks want what rank 0 reads; elsewhere what this rank wants, and nobody."""
    receivers: dict[ReadRequest, list[int]] = {need: [] for need in own}
    for rank, encoded in enumerate(gathered):
        for need in msgspec.msgpack.decode(encoded, type=list[ReadRequest]) if rank else ():
            receivers.setdefault(need, []).append(rank)
    return receivers


def _receive(
    own: Mapping[ReadRequest, Sequence[torch.Tensor]],
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
    own: Mapping[ReadRequest, Sequence[torch.Tensor]],
    receivers: Mapping[ReadRequest, Sequence[int]],
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


def _most_bytes(needs: Iterable[ReadRequest], manifest: Manifest) -> int:
    """Of one message: some rows, and where they are long one row, of the tensor with the longest ones."""
    sizes = [chunk.numel * _dtype(need, manifest).itemsize for need, chunk, _ in _chunks(needs, manifest)]
    return max(sizes, default=0)


def _dtype(need: ReadRequest, manifest: Manifest) -> torch.dtype:
    return dtype_from_name(manifest.tensors[need.key].dtype)


def _in(room: torch.Tensor, need: ReadRequest, box: Box, manifest: Manifest) -> torch.Tensor:
    """A tensor for the elements of a box, at the beginning of the room."""
    dtype = _dtype(need, manifest)
    return room[: box.numel * dtype.itemsize].view(dtype).view(box.shape)


def _keep(need: ReadRequest, data: torch.Tensor, inner: Box, views: Iterable[torch.Tensor]) -> None:
    for view in views:
        put_elements(inner.take(view), data, need.key)


def _in_order(needs: Iterable[ReadRequest], manifest: Manifest) -> list[ReadRequest]:
    """As they lie in the files, and the same on all ranks."""
    return sorted(needs, key=lambda need: (*manifest.place(need.key), need.key, need.offsets, need.shape))


def _chunks(needs: Iterable[ReadRequest], manifest: Manifest) -> Iterator[tuple[ReadRequest, Box, Box]]:
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


if TYPE_CHECKING:
    _Target = tuple[str, torch.Tensor, LocalShard]


@torch.no_grad()
def load(
    storage: Storage,
    into: Any,
    group: Backend,
    *,
    strict: bool,
    verify: bool,
    one_reads: bool,
    shards: ShardMetadata | None,
    deadline: Deadline,
) -> Any:
    """See `load_distributed`."""
    manifest = _share_manifest(storage, group, deadline)
    with all_or_none("load a checkpoint", storage.url, group, deadline):
        shards = shards or ShardMetadata(num_ranks=group.world_size)
        shards.check(group.world_size)
        matching = LoadPlanner(manifest, group.rank, group.world_size, shards)
        build = matching.match(manifest.tree, into)
    _check_complete(matching if strict else None, storage.url, group, deadline)
    with all_or_none("load a checkpoint", storage.url, group, deadline, about_arguments=False):
        reader = CheckpointReader(storage, manifest, verify=verify)
        try:
            targets = sorted(matching.targets, key=lambda target: manifest.place(target[0]))
            boxes = [(key, box, view) for key, _, part in targets for box, view in part.boxes]
            if one_reads:
                read_for_all(reader, manifest, boxes, where=storage.url, group=group, deadline=deadline)
            else:
                for key, box, view in boxes:
                    reader.read_box(key, box, view)
            for _, tensor, _ in targets:
                # to_local() would keep a history
                tell_autograd(tensor._local if isinstance(tensor, DTensor) else tensor)
        finally:
            storage.close()
    taken = []
    with all_or_none("take what a checkpoint has", storage.url, group, deadline, about_arguments=False):
        taken.append(build())
    return taken[0]


def _share_manifest(storage: Storage, group: Backend, deadline: Deadline) -> Manifest:
    """Rank 0's, on all ranks: the folder may change while they read it."""
    own = run_on_rank0(lambda: read_manifest(storage), "read a checkpoint", storage.url, group, deadline)
    data = broadcast_object(None if own is None else encode_manifest(own), group=group, timeout=deadline.remaining())
    return own if own is not None else decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")


def _check_complete(matching: LoadPlanner | None, where: str, group: Backend, deadline: Deadline) -> None:
    """Raise, on all ranks, if a rank wants what is not there, or if a module has no place for what is there.

    Args:
        matching: Of this rank; None if it doesn't mind.
        where: The checkpoint.
        group: The ranks.
        deadline: When the others must have come.
    """
    own = ([], 0, {}) if matching is None else (matching.missing[:10], len(matching.missing), matching.unexpected)
    answers = all_gather_object(own, group=group, timeout=deadline.remaining())
    for rank, (names, number, _) in enumerate(answers):
        if names:
            raise DistCheckpointError(
                f"{where} lacks {_listed(names, number)}, which rank {rank} wants: load with strict=False to leave what"
                " is missing as it is",
                ranks=(rank,),
            )
    unexpected = {key: place for _, _, found in answers for key, place in found.items()}
    if not unexpected:
        return
    here = [] if matching is None else sorted(matching.used & set(unexpected))
    for used in all_gather_object(here, group=group, timeout=deadline.remaining()):
        for key in used:
            unexpected.pop(key, None)
    if unexpected:
        raise DistCheckpointError(
            f"{where} has {_listed(list(unexpected.values()), len(unexpected))}, for which no rank has a place: load"
            " with strict=False to leave it out"
        )


def _listed(names: Sequence[str], number: int) -> str:
    shown = ", ".join(names[:3])
    return shown if number <= 3 else f"{shown} and {number - 3} more"
