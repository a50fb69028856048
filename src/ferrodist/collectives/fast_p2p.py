"""The fast path of point-to-point calls, and the progress of calls that go on on the general path.

`compiled.fast_send`, `fast_recv_into`, `fast_recv`, `fast_sendrecv` and `fast_batch`, in native/bindings/fast_p2p.cpp,
take the arguments of their public namesakes by position. They return the result (a send returns True), None before
anything has happened, or an ``Unfinished``. The general path then continues where the engine stopped, from the
`Progress`, in the time that is left, and raises what errors there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.backends.native.binding import compiled, is_native_available
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives import fast_path  # noqa: F401 - which tells the compiled functions where groups are found
from ferrodist.collectives.host_p2p import NOT_STARTED, Progress, Recv, Send
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_protocol import UNCLAIMED_KEY, cancel_payload, payload_ids, unclaimed_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

    import torch

    from ferrodist.backends.base import Backend

_Unfinished: Any = compiled.Unfinished if is_native_available() else type(None)

if is_native_available():
    compiled.load_fast_p2p(payload_ids, UNCLAIMED_KEY, DTYPES, Send, Recv)


def is_received(found: Any) -> TypeGuard[torch.Tensor | tuple[torch.Tensor, int]]:
    """Return whether `compiled.fast_recv` or `fast_sendrecv` has returned its result: the call is done."""
    return found is not None and type(found) is not _Unfinished


def progress_of(found: Any, group: Backend, *, tag: int, dst: int | None = None) -> Progress:
    """Return the progress of a call that is not done, or raise what has interrupted it.

    The first message of a tensor that was not received is kept for the general path to receive it. ``dst`` is the rank
    that is sent to, if the call sends.
    """
    if found is None:
        return NOT_STARTED
    _keep_message(found, group, tag)
    if found.interruption is not None:
        if found.payload_id is not None:
            assert dst is not None
            cancel_payload(group, dst, found.payload_id)
        raise found.interruption
    return Progress(found.seconds, found.payload_id, found.is_sent, found.received)


def batch_progress(found: Any, group: Backend, operations: Sequence[Send | Recv]) -> tuple[float, list[Progress]]:
    """Return the elapsed time and each operation's progress of a batch that is not done; otherwise as `progress_of`."""
    if found is None:
        return 0.0, [NOT_STARTED] * len(operations)
    for each, operation in zip(found.operations, operations, strict=True):
        _keep_message(each, group, operation.tag)
        if found.interruption is not None and isinstance(operation, Send) and each.payload_id is not None:
            cancel_payload(group, operation.dst, each.payload_id)
    if found.interruption is not None:
        raise found.interruption
    return found.seconds, [
        Progress(payload_id=each.payload_id, is_sent=each.is_sent, received=each.received) for each in found.operations
    ]


def _keep_message(found: Any, group: Backend, tag: int) -> None:
    if found.message is not None:
        unclaimed_tensors(group).keep(channel_tag(Channel.TENSOR, tag), found.source, found.message)
