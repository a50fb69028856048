"""Loading a checkpoint into a state of any sharding, on any number of ranks.

    manifest --rank 0 reads, all get it--> plan with `into` --agree--> each rank reads its boxes --agree--> done

With ``one_reads`` rank 0 reads every byte once and sends it to the ranks that need it, for slow or metered storage. All
ranks then go through their boxes in the order of the files, so that no message waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.autograd.graph import increment_version

from ferrodist.arguments import check_bool, check_type
from ferrodist.checkpoint.collective_steps import all_or_none, call_on_all, resolve_group_or_alone, run_on_rank0
from ferrodist.checkpoint.format.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.checkpoint.load_plan import LoadPlanner
from ferrodist.checkpoint.reader import CheckpointReader, put_elements, read_manifest
from ferrodist.checkpoint.save_plan import Span
from ferrodist.checkpoint.shard_metadata import ShardMetadata
from ferrodist.checkpoint.storage import Storage, open_storage
from ferrodist.collectives.objects import all_gather_object, gather_object
from ferrodist.collectives.p2p import recv_into, send
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import CollectiveMismatchError, DistCheckpointError
from ferrodist.tensor.box import Box
from ferrodist.tensor.dtensor import DTensor

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend

_MESSAGE_BYTES = 32 << 20


@torch.no_grad()
def load_distributed(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    group: Backend | None = None,
    strict: bool = True,
    verify: bool = True,
    one_reads: bool = False,
    shards: ShardMetadata | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Load a checkpoint, or a part of it; every rank of the group calls this.

    Each rank reads only the bytes of its own shards, whatever the number of ranks and the placements were when the
    checkpoint was saved.

    Args:
        path: The checkpoint.
        into: The wanted state, nested as it was saved; parts may be left out. Tensors are filled in place, in their own
            dtypes; modules, `OptimizerState` and objects with ``load_state_dict()`` load their part; a `Placed` becomes
            a `DTensor`; any other value, and an empty dict or list, is replaced by the saved value with full tensors.
            None is the full state.
        group: The ranks that load; as for `save_distributed`.
        strict: Raise for wanted values that were not saved, and for saved tensors that a module or optimizer doesn't
            have.
        one_reads: Have rank 0 read for all ranks, each byte once, and send it on; for storage that is slower than the
            network between ranks.
        shards: The sharding of plain tensors in ``into``.
        verify: Check the hashes of all blocks read: a fifth of the time of a load from memory, little of one from a
            disk.
        storage_options: Options of fsspec's file system, if the path is a URL.
        timeout: Seconds within which all ranks must be done; None takes FERRODIST_TIMEOUT's, or
            `DEFAULT_COLLECTIVE_TIMEOUT`.

    Returns:
        ``into`` with the loaded values; its tensors, modules and objects are the same objects.

    Raises:
        DistCheckpointError: On all ranks: the checkpoint is missing, doesn't fit, or is damaged. Some tensors may
            have been filled already.
        TypeError, ValueError: An argument is wrong.
    """
    group, deadline = resolve_group_or_alone(group), Deadline(resolve_timeout(timeout))
    storage = call_on_all(lambda: open_storage(path, storage_options), "open a checkpoint", str(path), group, deadline)
    manifest = _share_manifest(storage, group, deadline)
    with all_or_none("load a checkpoint", storage.url, group, deadline):
        check_bool("strict", strict)
        check_bool("one_reads", one_reads)
        check_type(shards, (ShardMetadata, type(None)), "shards must be ShardMetadata or None")
        if shards:
            shards.check(group.world_size)
        planner = LoadPlanner(manifest, group.rank, group.world_size, shards)
        build = planner.match(manifest.tree, into)
    check_complete(planner, storage.url, group, deadline, strict=strict, one_reads=one_reads)
    fill_targets(
        planner, CheckpointReader(storage, manifest, verify=verify), storage, group, deadline, one_reads=one_reads
    )
    with all_or_none("load the state of objects", storage.url, group, deadline, about_arguments=False):
        return build()


def fill_targets(
    planner: LoadPlanner,
    reader: CheckpointReader,
    storage: Storage,
    group: Backend,
    deadline: Deadline,
    *,
    one_reads: bool = False,
) -> None:
    """Read the planned boxes into their tensors and close the storage; every rank calls this."""
    with all_or_none("load a checkpoint", storage.url, group, deadline, about_arguments=False):
        try:
            targets = sorted(planner.targets, key=lambda target: reader.manifest.position(target[0]))
            boxes = [(key, box, view) for key, _, shard in targets for box, view in shard.boxes]
            if one_reads:
                _read_on_rank0(reader, boxes, storage.url, group, deadline)
            else:
                for key, box, view in boxes:
                    reader.read_box(key, box, view)
            for _, tensor, _ in targets:
                local = tensor._local if isinstance(tensor, DTensor) else tensor  # to_local() would keep a history
                if not local.is_inference():
                    increment_version(local)  # autograd has not seen the write
        finally:
            storage.close()


def _share_manifest(storage: Storage, group: Backend, deadline: Deadline) -> Manifest:
    """Return rank 0's manifest on all ranks, since the folder may change while they read it."""
    manifests: list[Manifest] = []  # rank 0's, which needs no decoding

    def read() -> bytes:
        manifests.append(read_manifest(storage))
        return encode_manifest(manifests[0])

    data = run_on_rank0(read, "read a checkpoint", storage.url, group, deadline)
    return manifests[0] if manifests else decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")


def check_complete(
    planner: LoadPlanner, where: str, group: Backend, deadline: Deadline, *, strict: bool, one_reads: bool
) -> None:
    """Raise on all ranks if wanted values were not saved or saved tensors have no target, on ranks with ``strict``.

    So do ranks of which only some have ``one_reads``.
    """
    report = (planner.missing[:10], len(planner.missing), planner.unexpected) if strict else ([], 0, {})
    answers = all_gather_object((*report, one_reads), group=group, timeout=deadline.remaining())
    for rank, (names, count, _, reads) in enumerate(answers):
        if reads != answers[0][3]:
            raise CollectiveMismatchError(
                f"the ranks load {where} in different ways: rank 0 with one_reads={answers[0][3]}, rank {rank} with"
                f" one_reads={reads}. Pass the same on all ranks",
                ranks=(rank,),
            )
        if names:
            raise DistCheckpointError(
                f"{where} lacks {_abbreviate(names, count)}, which rank {rank} wants: load with strict=False to leave"
                " what is missing as it is",
                ranks=(rank,),
            )
    unexpected = {key: state_path for _, _, found, _ in answers for key, state_path in found.items()}
    if not unexpected:
        return
    here = sorted(planner.used & set(unexpected)) if strict else []
    for used in all_gather_object(here, group=group, timeout=deadline.remaining()):
        for key in used:
            unexpected.pop(key, None)
    if unexpected:
        raise DistCheckpointError(
            f"{where} has {_abbreviate(list(unexpected.values()), len(unexpected))}, which no rank loads:"
            " load with strict=False to leave it out"
        )


def _abbreviate(names: Sequence[str], count: int) -> str:
    shown = ", ".join(names[:3])
    return shown if count <= 3 else f"{shown} and {count - 3} more"


def _read_on_rank0(
    reader: CheckpointReader,
    wanted: Iterable[tuple[str, Box, torch.Tensor]],
    where: str,
    group: Backend,
    deadline: Deadline,
) -> None:
    """Fill tensors on all ranks with data that rank 0 reads; every rank calls this."""
    manifest = reader.manifest
    own_views: dict[Span, list[torch.Tensor]] = {}
    for key, box, view in wanted:
        if box.numel:
            own_views.setdefault(Span(key, box.offsets, box.shape), []).append(view)
    gathered = gather_object(msgspec.msgpack.encode(list(own_views)), group=group, timeout=deadline.remaining())
    with all_or_none("make room to read a checkpoint", where, group, deadline):
        # The other ranks that need each box, on rank 0; elsewhere this rank's boxes, without receivers.
        receivers: dict[Span, list[int]] = {request: [] for request in own_views}
        for rank, encoded in enumerate(gathered or ()):
            for request in msgspec.msgpack.decode(encoded, type=list[Span]) if rank else ():
                receivers.setdefault(request, []).append(rank)
        buffer = torch.empty(_max_message_bytes(receivers, manifest), dtype=torch.uint8, device="cpu")
    failure: Exception | None = None
    for request, chunk, inner in _chunks(receivers, manifest):
        dtype = _dtype(request, manifest)
        data = buffer[: chunk.numel * dtype.itemsize].view(dtype).view(chunk.shape)
        if group.rank == 0:
            failure = _read_or_clear(reader, request.key, chunk, data, failure)
            for rank in receivers[request]:
                send(data, rank, group=group, timeout=deadline.remaining())
        else:
            recv_into(data, 0, group=group, timeout=deadline.remaining())
        for view in own_views.get(request, ()):
            failure = failure or _catch(partial(put_elements, inner.take(view), data, request.key))
    if failure is not None:
        raise failure


def _read_or_clear(
    reader: CheckpointReader, key: str, chunk: Box, data: torch.Tensor, failure: Exception | None
) -> Exception | None:
    """Read a chunk, and return the error; after one send zeros: old numbers could overflow a receiver's dtype."""
    failure = failure or _catch(partial(reader.read_box, key, chunk, data))
    if failure is not None:
        data.zero_()
    return failure


def _catch(act: Callable[[], None]) -> Exception | None:
    """Return the error of a call, since other ranks still wait for data and are told at the end."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - raised when all is sent
        return error
    return None


def _max_message_bytes(requests: Iterable[Span], manifest: Manifest) -> int:
    """The size of the longest message, one or more rows."""
    sizes = [chunk.numel * _dtype(request, manifest).itemsize for request, chunk, _ in _chunks(requests, manifest)]
    return max(sizes, default=0)


def _dtype(request: Span, manifest: Manifest) -> torch.dtype:
    return dtype_from_name(manifest.tensors[request.key].dtype)


def _chunks(requests: Iterable[Span], manifest: Manifest) -> Iterator[tuple[Span, Box, Box]]:
    """Split all requests into chunks of some rows: as boxes of the saved tensor, and of the request.

    They come by position in the files, in the same order on all ranks.
    """
    for request in sorted(requests, key=lambda each: (manifest.position(each.key), each.key, each.offsets, each.shape)):
        whole = Box(request.offsets, request.shape)
        if not request.shape:
            yield request, whole, whole
            continue
        row = whole.numel // request.shape[0] * _dtype(request, manifest).itemsize
        rows_per_chunk = max(1, _MESSAGE_BYTES // row)
        for begin in range(0, request.shape[0], rows_per_chunk):
            count = min(rows_per_chunk, request.shape[0] - begin)
            chunk = Box((request.offsets[0] + begin, *request.offsets[1:]), (count, *request.shape[1:]))
            yield request, chunk, chunk.within(whole)
