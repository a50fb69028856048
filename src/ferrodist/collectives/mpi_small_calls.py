"""Small collectives of groups over MPI: the elements travel in the comparison of the calls, and little else is done.

The fast path of such a group (see `fast_path`): plain tensors of up to `MAX_PAYLOAD` bytes. What a call sends is what
the general path sends, so different ranks may take different ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import compiled
from ferrodist.backends.process_group import find_group
from ferrodist.backends.signature import MAX_PAYLOAD, PAYLOAD_START
from ferrodist.collectives.call_log import reported
from ferrodist.collectives.work import collector
from ferrodist.deadline import check_timeout

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_MOST_RECORDS = 256
"""The number of calls of a group whose encoding is kept."""

_NO_FOLD = -1


@reported
def small_mpi_allreduce(
    tensor: torch.Tensor, op: Any, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> torch.Tensor | None:
    """`allreduce`, or None before anything has happened."""
    number = getattr(op, "number", _NO_FOLD)
    chosen = _find_mpi_group(group)
    if chosen is None or number < 0 or not _is_small(tensor):
        return None
    elements = compiled.eager_elements(tensor, out, 0, number, MAX_PAYLOAD)
    if elements is None:
        return None
    target = torch.empty_like(tensor) if out is None else out
    key = (CollectiveKind.ALLREDUCE, number, tensor.dtype, tensor.numel())
    records = _exchange_records(chosen, key, elements, timeout, {"source": tensor, "reduction": op})
    _check(compiled.fold_eager(target, records, chosen.world_size, PAYLOAD_START, len(elements), number))
    return target


@reported
def small_mpi_broadcast(
    tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> torch.Tensor | None:
    """`broadcast`, or None before anything has happened."""
    chosen = _find_mpi_group(group)
    if chosen is None or not _is_small(tensor) or type(root) is not int or not 0 <= root < chosen.world_size:
        return None
    elements = compiled.eager_elements(tensor, out, 0, _NO_FOLD, MAX_PAYLOAD)
    if elements is None:
        return None
    target = torch.empty_like(tensor) if out is None else out
    key = (CollectiveKind.BROADCAST, root, tensor.dtype, tensor.numel())
    payload = elements if chosen.rank == root else b""
    records = _exchange_records(chosen, key, payload, timeout, {"source": tensor, "root": root})
    _check(compiled.join_eager(target, records, chosen.world_size, PAYLOAD_START, len(elements), root, 1))
    return target


@reported
def small_mpi_all_gather(
    tensor: torch.Tensor, dim: int, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> torch.Tensor | None:
    """`all_gather` along dim 0, or None before anything has happened."""
    chosen = _find_mpi_group(group)
    if chosen is None or type(dim) is not int or dim != 0 or not _is_small(tensor) or not tensor.dim():
        return None
    num_ranks = chosen.world_size
    elements = compiled.eager_elements(tensor, out, num_ranks, _NO_FOLD, MAX_PAYLOAD)
    if elements is None:
        return None
    target = tensor.new_empty((num_ranks * len(tensor), *tensor.shape[1:])) if out is None else out
    key = (CollectiveKind.ALL_GATHER, tensor.dtype, tensor.numel())
    counts = [tensor.numel()] * num_ranks
    facts = {"source": tensor, "out": target, "counts": counts, "dim": 0}
    records = _exchange_records(chosen, key, elements, timeout, facts)
    _check(compiled.join_eager(target, records, num_ranks, PAYLOAD_START, len(elements), 0, num_ranks))
    return target


@reported
def small_mpi_barrier(group: Backend | None, timeout: float | None) -> bool:
    """`barrier`; whether it is done."""
    chosen = _find_mpi_group(group)
    if chosen is None:
        return False
    _exchange_records(chosen, (CollectiveKind.BARRIER,), b"", timeout, {})
    return True


def _find_mpi_group(group: Backend | None) -> Any:
    """The group, if it is one over MPI of several ranks, outside of `coalesce`; else None."""
    if collector.get() is not None:
        return None
    chosen = find_group(None) if group is None else group
    return chosen if getattr(chosen, "takes_mpi_small_calls", False) else None


def _is_small(tensor: Any) -> bool:
    """Return whether a value is a tensor of few bytes; the compiled module finds out whether it is plain."""
    is_tensor = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_tensor and tensor.nbytes <= MAX_PAYLOAD


def _exchange_records(
    group: Any, key: tuple[Any, ...], payload: bytes, timeout: float | None, facts: dict[str, Any]
) -> bytes:
    """All ranks' records of a call; its kind is the first of ``key``, and the rest of it follows from ``facts``."""
    limit = group.timeout if timeout is None else check_timeout(timeout)
    encoded: dict[Any, bytes] = group.encoded_calls
    record = encoded.get(key)
    if record is None:
        if len(encoded) >= _MOST_RECORDS:
            encoded.clear()
        op = CollectiveOp(kind=key[0], timeout=limit, **facts)
        record = encoded[key] = op.signature().encode()
    records: bytes = group.verifier.exchange(record, payload, limit)
    return records


def _check(is_written: bool) -> None:  # noqa: FBT001 - what is checked
    if not is_written:
        raise RuntimeError("out was resized in another thread during a collective, which had no room for its result")
