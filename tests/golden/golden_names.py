"""All that the golden test imports from inside ferrodist, for which it has no public name; nothing else there does.

Whoever moves or renames one of these changes it here, and not what it is called on the left of an assignment or a
colon: that is what the recordings say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.mpi.wire import Frame as MpiFrame
from ferrodist.backends.native import binding as native_numbers
from ferrodist.backends.tags import Channel, channel_tag, group_tag
from ferrodist.backends.tcp.wire import MAX_PAYLOAD as TCP_PAYLOAD
from ferrodist.backends.tcp.wire import WIRE_VERSION
from ferrodist.checkpoint import convert as conversion
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import PROTOCOL_VERSION, FileStore, TcpStore, TcpStoreServer, rendezvous
from ferrodist.rendezvous.secret import _FILE as SECRET_FILE
from ferrodist.rendezvous.secret import _folders as secret_folders
from ferrodist.rpc.messages import MET, FailureKind, Form, MessageKind
from ferrodist.rpc.refcount_protocol import CONFIRM, LOST, REGISTER, RELEASE, SETTLE, UNREGISTER
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

    import ferrodist as fd

__all__ = ["conversion", "rendezvous"]

store_server = TcpStoreServer
store_client = TcpStore
file_store = FileStore
deadline = Deadline


def torch_process_group(group: fd.SubBackend | fd.NonMemberGroup) -> dist.ProcessGroup:
    """A group as torch's functions take it."""
    made: Any = FerrodistProcessGroup(group)  # type: ignore[arg-type]
    return made


def mpi_frames(**fields: int) -> list[tuple[str, bytes]]:
    """A frame of each kind that MPI groups send, with its name."""
    kinds = {
        "a whole message": FrameType.EAGER,
        "an offer": FrameType.OFFER,
        "its grant": FrameType.GRANT,
        "its data": FrameType.DATA,
        "its withdrawal": FrameType.WITHDRAW,
        "an abort": FrameType.ABORT,
        "a goodbye": FrameType.LEFT,
        "a question": FrameType.PING,
        "its answer": FrameType.PONG,
    }
    return [(name, MpiFrame(kind, **fields).pack()) for name, kind in kinds.items()]


def secret_places() -> list[Path]:
    """Where the secret that the processes of a user share may lie."""
    return [folder / SECRET_FILE for folder in secret_folders()]


NUMBERS: dict[str, dict[str, Any]] = {
    "versions": {"of the handshake": PROTOCOL_VERSION, "of TCP groups": WIRE_VERSION, "TCP frame bytes": TCP_PAYLOAD},
    "channels of tags": {
        "bytes": Channel.BYTES.value,
        "calls": Channel.CALL.value,
        "late ranks": Channel.LATE.value,
        "data of collectives": Channel.DATA.value,
        "heads of tensors": Channel.TENSOR.value,
        "elements of tensors": Channel.TENSOR_PAYLOAD.value,
        "calls on devices": Channel.DEVICE_CALL.value,
        "progress of devices": Channel.DEVICE_PROGRESS.value,
        "counts of devices": Channel.DEVICE_COUNT.value,
        "heads of devices": Channel.DEVICE_HEAD.value,
        "how many": len(Channel),
        "a tag of all parts": hex(group_tag(0xABCDEF, channel_tag(Channel.TENSOR_PAYLOAD, 0x123456))),
    },
    "kinds of TCP frames": {
        "a whole message": FrameType.EAGER.value,
        "an offer": FrameType.OFFER.value,
        "its grant": FrameType.GRANT.value,
        "its data": FrameType.DATA.value,
        "its withdrawal": FrameType.WITHDRAW.value,
        "an abort": FrameType.ABORT.value,
        "a goodbye": FrameType.LEFT.value,
        "a death": FrameType.DIED.value,
        "all are there": FrameType.READY.value,
        "a question": FrameType.PING.value,
        "its answer": FrameType.PONG.value,
        "how many": len(FrameType),
    },
    "kinds of messages of agents": {
        "a call": MessageKind.CALL.value,
        "a result": MessageKind.RESULT.value,
        "a failure": MessageKind.FAILURE.value,
        "a withdrawal": MessageKind.CANCEL.value,
        "a call of the agents' own": MessageKind.INTERNAL_CALL.value,
        "a notice": MessageKind.NOTICE.value,
        "how many": len(MessageKind),
        "written plainly": Form.PLAIN.value,
        "written as a letter": Form.ENCODED.value,
    },
    "why calls fail": {
        "the function raised": FailureKind.RAISED.value,
        "it is unknown": FailureKind.UNKNOWN.value,
        "the call can't be read": FailureKind.UNDECODABLE.value,
        "the result can't travel": FailureKind.UNENCODABLE.value,
        "it took too long": FailureKind.EXPIRED.value,
        "there are too many": FailureKind.OVERLOADED.value,
        "how many": len(FailureKind),
    },
    "names of the agents' own calls": {
        "have come": CONFIRM,
        "lost a rank": LOST,
        "have met": MET,
        "will be sent": REGISTER,
        "are given back": RELEASE,
        "are to be settled": SETTLE,
        "were not sent": UNREGISTER,
    },
    "dtypes of heads and letters": {str(dtype): number for number, dtype in enumerate(DTYPES)},
    "numbers of the native engine": {
        **{str(dtype): number for number, dtype in enumerate(native_numbers._DTYPES)},
        **{f"reduction {name}": number for number, name in enumerate(native_numbers._REDUCTIONS)},
        **{f"operation {name}": number for number, name in enumerate(native_numbers._OPERATIONS)},
    },
}
"""Numbers and names that are on wires, in words."""
