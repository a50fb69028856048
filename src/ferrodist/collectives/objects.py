"""Collectives and point-to-point of Python objects, encoded by msgpack, or by pickle if allowed.

Decoding msgpack runs no code. It carries plain data, and all else is refused before anything is sent:

    sent                                     arrives as
    None, bool, int, float, str, bytes       itself
    list, dict                               itself; a subclass as a list or a dict
    tuple                                    a list; as a key of a dict a tuple
    NumPy scalar                             the equal bool, int, float, str or bytes
    dataclass, msgspec struct                a dict of the fields that are set; an ``array_like`` struct as a list

An int has 64 bits, signed or unsigned. A key of a dict is None, bool, int, float, str, bytes or a tuple of these. All
else raises TypeError, also times, UUIDs, Decimals, Enums, sets and byte arrays, which msgspec would encode as text,
values and lists.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
import time
from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
import numpy as np
import torch

from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.all_gather import all_gather_with_sizes, share_parts
from ferrodist.collectives.arguments import check_root, check_tensor, group_and_timeout, prepare_out, python_value
from ferrodist.collectives.engines.host import host_engine_of, share_bytes
from ferrodist.collectives.gather import gather_call, scatter_call
from ferrodist.collectives.p2p import recv, send
from ferrodist.collectives.payloads import (
    abort_for_disagreement,
    abort_for_protocol_error,
    check_sizes,
    elements_after,
    few_elements,
    unpack_payloads,
)
from ferrodist.collectives.profiling import profiled
from ferrodist.collectives.reduce import broadcast
from ferrodist.collectives.work import execute, refuse_in_coalesce
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError
from ferrodist.torch_private.modes import functorch_level
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.base import Backend

_PLAIN = {type(None), bool, int, float, str, bytes, msgspec.UnsetType}


def _replace(value: Any) -> Any:
    """Return the replacement of a value that msgspec does not know."""
    replacement = python_value(value)
    if isinstance(replacement, np.generic) or replacement is value:
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return replacement


def _check_values(values: Iterable[Any]) -> None:
    """Raise TypeError for values that msgspec encodes, but that would be decoded as something else."""
    left = [values]
    while left:
        members = list(left.pop())
        if set(map(type, members)) <= _PLAIN:
            continue
        for value in members:
            if type(value) is not dict and type(python_value(value)) in _PLAIN:
                continue
            if isinstance(value, (list, tuple)):
                left.append(value)
            elif isinstance(value, dict):
                _check_keys(value)
                left.append(value.values())
            elif isinstance(value, msgspec.Struct):
                left.append(getattr(value, name, None) for name in value.__struct_fields__)
            elif dataclasses.is_dataclass(value):
                left.append(getattr(value, field.name, None) for field in dataclasses.fields(value))
            else:
                raise TypeError(f"{with_article(type(value).__name__)} would arrive as something else")


def _check_keys(keys: Iterable[Any]) -> None:
    if set(map(type, keys)) <= _PLAIN:  # nearly always
        return
    while others := [key for key in keys if type(python_value(key)) not in _PLAIN]:
        for key in others:
            if not isinstance(key, tuple):
                name = with_article(type(key).__name__)
                raise TypeError(f"{name} as a key of a dict would arrive as something else, or not at all")
        keys = chain.from_iterable(others)


@profiled
def all_gather_object(
    value: Any, *, group: Backend | None = None, allow_pickle: bool = False, timeout: float | None = None
) -> list[Any]:
    """Give every rank the objects of all ranks, in rank order.

    Args:
        value: This rank's object.
        group: The group, on all of whose ranks this is called; None is the default group.
        allow_pickle: Encode with pickle, and so run code that other ranks choose when decoding. On all ranks or on
            none.
        timeout: Seconds; None takes the group's.

    Raises:
        TypeError: msgpack can't encode the object, or would change its type; raised before anything is sent.
        ValueError: The object is nested too deeply; raised before anything is sent.
        ProtocolError: The received bytes can't be decoded; the group has failed. Or they are a pickle that is not
            allowed, or not an object; then the group goes on.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    encoded = _to_bytes(value, allow_pickle)
    began = time.monotonic()
    found = compiled.fast_gather_object(encoded, None, chosen, limit) if functorch_level() is None else None
    if type(found) is tuple:
        return _decode_all(dict(enumerate(found)), allow_pickle, chosen)
    tensor, deadline = _checked(encoded), Deadline(limit, elapsed=time.monotonic() - began)
    sizes, parts = share_parts("all_gather_object", tensor, 0, chosen, limit, payloads=found)
    if parts is not None:
        return _decode_all(dict(enumerate(parts)), allow_pickle, chosen)
    joined = all_gather_with_sizes(tensor, sizes, dim=0, group=chosen, timeout=deadline.remaining())
    return _decode_all(_by_rank(joined, sizes), allow_pickle, chosen)


@profiled
def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Any:
    """Copy the root's object to every rank; ``value`` is not read elsewhere. See `all_gather_object`.

    Raises:
        InvalidRankError: ``root`` is not a rank of the group. Or as for `all_gather_object`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    root = check_root(chosen, root, "root")
    encoded = _to_bytes(value, allow_pickle) if chosen.rank == root else None
    sizes = [len(encoded or b"")]
    began = time.monotonic()
    found = _fast_from_root(encoded, sizes, False, root, chosen, limit)
    if found is None or type(found) is list:
        tensor, deadline = _checked(encoded), Deadline(limit, elapsed=time.monotonic() - began)
        (size,), found = _sizes_of_root("broadcast_object", sizes, tensor, root, chosen, deadline, payloads=found)
        if found is None:
            if chosen.rank != root:
                tensor = prepare_out(None, (size,), torch.uint8).flat
            found = broadcast(tensor, root, group=chosen, timeout=deadline.remaining())
    return _decode_all({root: _view(found)}, allow_pickle, chosen)[0]


@profiled
def gather_object(
    value: Any, dst: int = 0, *, group: Backend | None = None, allow_pickle: bool = False, timeout: float | None = None
) -> list[Any] | None:
    """Gather the objects of all ranks, in rank order, on rank ``dst``; None elsewhere. See `all_gather_object`.

    Raises:
        InvalidRankError: ``dst`` is not a rank of the group. Or as for `all_gather_object`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    dst = check_root(chosen, dst, "dst")
    encoded = _to_bytes(value, allow_pickle)
    began = time.monotonic()
    found = compiled.fast_gather_object(encoded, dst, chosen, limit) if functorch_level() is None else None
    if type(found) is tuple:
        return _decode_all(dict(enumerate(found)), allow_pickle, chosen) if found else None
    tensor, deadline = _checked(encoded), Deadline(limit, elapsed=time.monotonic() - began)
    sizes, parts = share_parts("gather_object", tensor, 0, chosen, limit, root=dst, payloads=found)
    if parts is not None:
        return _decode_all(dict(enumerate(parts)), allow_pickle, chosen) if chosen.rank == dst else None
    joined = execute(gather_call(tensor, sizes, dst, dim=0, group=chosen, timeout=deadline.remaining()))
    if chosen.rank != dst:
        return None
    return _decode_all(_by_rank(joined, sizes), allow_pickle, chosen)


@profiled
def scatter_object(
    values: Sequence[Any] | None = None,
    src: int = 0,
    *,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Any:
    """Scatter ``values`` of rank ``src``, which are not read elsewhere, to the ranks. See `all_gather_object`.

    Between more than 13 ranks the sizes take one more message, unless the group has the native engine.

    Raises:
        ValueError: ``src`` has not one object for each rank.
        InvalidRankError: ``src`` is not a rank of the group. Or as for `all_gather_object`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    src = check_root(chosen, src, "src")
    objects, sizes = None, [0] * chosen.world_size
    if chosen.rank == src:
        given = list(values) if isinstance(values, Iterable) else []
        if len(given) != chosen.world_size:
            raise ValueError(f"rank {src} scatters: pass one object for each rank there, {chosen.world_size} in all")
        objects = [_to_bytes(value, allow_pickle) for value in given]
        sizes = [len(each) for each in objects]
    encoded = None if objects is None else bytearray().join(objects)
    began = time.monotonic()
    found = None
    if _fit_in_payload(sizes, chosen):
        found = _fast_from_root(encoded, sizes, True, src, chosen, limit)
    if found is None or type(found) is list:
        tensor, deadline = _checked(encoded), Deadline(limit, elapsed=time.monotonic() - began)
        counts, joined = _sizes_of_root(
            "scatter_object", sizes, tensor, src, chosen, deadline, root_name="src", payloads=found
        )
        if joined is not None:
            found = _by_rank(joined, counts)[chosen.rank]
        else:
            mine = prepare_out(None, (counts[chosen.rank],), torch.uint8)
            source = None if objects is None else tensor
            call = scatter_call(source, mine, counts, src, dim=0, group=chosen, timeout=deadline.remaining())
            found = execute(call)
    return _decode_all({src: _view(found)}, allow_pickle, chosen)[0]


@profiled
def send_object(
    value: Any,
    dst: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> None:
    """Send an object to one rank, which calls `recv_object`. See `send` and `all_gather_object`."""
    send(_encode(value, allow_pickle), dst, tag=tag, group=group, timeout=timeout)


@overload
def recv_object(
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
    return_source: Literal[False] = False,
) -> Any: ...
@overload
def recv_object(
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
    return_source: Literal[True],
) -> tuple[Any, int]: ...
@profiled
def recv_object(
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
    return_source: bool = False,
) -> Any:
    """Receive an object from one rank, or `ANY_SOURCE`.

    With ``return_source`` it returns a tuple of the object and the sending rank. See `recv` and `all_gather_object`; an
    object that can't be decoded is lost, and the group goes on.
    """
    data, source = recv(None, torch.uint8, src, tag=tag, group=group, timeout=timeout, return_source=True)
    load = _loader(_view(data), allow_pickle)
    try:
        value = load()
    except Exception as error:
        raise ProtocolError(f"what another rank sent can't be decoded: {error!r}") from error
    return (value, source) if return_source else value


_MSGPACK, _PICKLE = b"m", b"p"

_encoder = msgspec.msgpack.Encoder(enc_hook=_replace)
_decoder = msgspec.msgpack.Decoder()

_ROOT = struct.Struct("<i")


def _fast_from_root(*arguments: Any) -> Any:
    """`fast_object_from_root` of the compiled module, outside of functorch's transforms, which refuse objects."""
    return compiled.fast_object_from_root(*arguments) if functorch_level() is None else None


def _fit_in_payload(sizes: Sequence[int], group: Backend) -> bool:
    """True if the root's sizes fit in the payload of a `share`."""
    return _ROOT.size + 8 * len(sizes) <= host_engine_of(group).share_room


def _sizes_of_root(  # noqa: PLR0917
    operation: str,
    sizes: Sequence[int],
    encoded: torch.Tensor,
    root: int,
    group: Backend,
    deadline: Deadline,
    *,
    root_name: str = "root",
    payloads: Sequence[bytes] | None = None,
) -> tuple[tuple[int, ...], memoryview | None]:
    """Share the root's sizes, in the payload of a `share` if they fit, else in a broadcast.

    Returns also its objects, if they are few bytes: see [Note: shared sizes] in native/bindings/shared_sizes.h. The
    other ranks pass as many sizes, which are not read. ``payloads`` are what the ranks have shared, if they have.
    """
    numbers = struct.Struct(f"<{len(sizes)}q")
    fits = _fit_in_payload(sizes, group)
    if payloads is None:
        refuse_in_coalesce(operation)
        payload = _ROOT.pack(root)
        if fits and group.rank == root:
            payload += numbers.pack(*sizes)
            payload += few_elements(encoded, host_engine_of(group).share_room - len(payload))
        payloads = share_bytes(group, operation, payload, deadline.remaining())
    roots = [root for (root,) in unpack_payloads(_ROOT, payloads, group, operation)]
    if len(set(roots)) > 1:
        calls = (f"rank {rank} called {operation}({root_name}={r})" for rank, r in enumerate(roots))
        raise abort_for_disagreement(group, operation, calls, f"Pass the same {root_name} on every rank.")
    if not fits:
        mine = torch.tensor(sizes, device="cpu")
        shared = tuple(broadcast(mine, root, group=group, timeout=deadline.remaining()).tolist())
        check_sizes(shared, group, root, operation)
        return shared, None
    start = _ROOT.size + numbers.size
    if len(payloads[root]) < start:
        raise abort_for_protocol_error(group, root, f"sent no sizes with its {operation}")
    shared = numbers.unpack_from(payloads[root], _ROOT.size)
    check_sizes(shared, group, root, operation)
    return shared, elements_after(start, payloads[root], sum(shared), group=group, rank=root, operation=operation)


def _encode(value: Any, allow_pickle: bool) -> torch.Tensor:  # noqa: FBT001 - the user's keyword, passed on
    return _checked(_to_bytes(value, allow_pickle))


def _checked(encoded: bytearray | None) -> torch.Tensor:
    """Encoded objects as a tensor, an empty one for None; raises where collectives are refused."""
    if encoded is None:
        found = torch.empty(0, dtype=torch.uint8, device="cpu")
    else:
        found = torch.frombuffer(encoded, dtype=torch.uint8)
    check_tensor(found, "the object")
    return found


def _to_bytes(value: Any, allow_pickle: bool) -> bytearray:  # noqa: FBT001 - the user's keyword, passed on
    try:
        return bytearray(_PICKLE + pickle.dumps(value)) if allow_pickle else _to_msgpack(value)
    except RecursionError as error:
        raise ValueError(
            f"this {type(value).__name__} is nested too deeply to be sent ({error}): send it flat, or in parts"
        ) from error


def _to_msgpack(value: Any) -> bytearray:
    """Encode plain data, after `_MSGPACK`; raises TypeError for data outside of the module's table."""
    data = bytearray(_MSGPACK)
    try:
        # First: the walk after it ends only for values that are not nested in themselves.
        _encoder.encode_into(value, data, len(_MSGPACK))
        _check_values([value])
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"msgpack can't carry this {type(value).__name__} ({error}): send plain data, as lists, dicts, numbers and"
            " text, or pass allow_pickle=True on all ranks if every rank may run code on every other"
        ) from error
    return data


def _view(data: torch.Tensor | bytes | memoryview) -> memoryview:
    return data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data)


def _by_rank(joined: torch.Tensor | memoryview, sizes: Sequence[int]) -> dict[int, memoryview]:
    """The encoded object of each rank."""
    view, start, parts = _view(joined), 0, {}
    for rank, size in enumerate(sizes):
        parts[rank] = view[start : start + size]
        start += size
    return parts


def _decode_all(parts: Mapping[int, bytes | memoryview], allow_pickle: bool, group: Backend) -> list[Any]:  # noqa: FBT001
    """Decode the objects of a collective, by sender; aborts the group on failure, for other ranks may go on."""
    values = []
    for sender, load in {rank: _loader(part, allow_pickle) for rank, part in parts.items()}.items():
        try:
            values.append(load())
        except Exception as error:  # noqa: PERF203 - names the sender
            failure = ProtocolError(
                f"rank {group.rank} of group {group.name!r} can't decode the object that rank {sender} sent: {error!r}",
                ranks=(sender,),
            )
            group.abort(failure)
            raise (group.failure or failure).fresh() from error
    return values


def _loader(data: bytes | memoryview, allow_pickle: bool) -> Callable[[], Any]:  # noqa: FBT001 - the user's keyword
    """Return the function that decodes an object; raises unless this rank may decode it."""
    codec, content = data[:1], data[1:]
    if codec == _MSGPACK:
        return partial(_decoder.decode, content)
    if codec != _PICKLE:
        raise ProtocolError("what another rank sent is not an object: receive it with recv()")
    if not allow_pickle:
        raise ProtocolError(
            "another rank sent a pickle; pass allow_pickle=True to run what it says, on all ranks or none"
        )
    return partial(pickle.loads, content)
