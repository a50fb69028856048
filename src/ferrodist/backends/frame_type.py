"""The types of frames that carry messages and notices of TCP and MPI groups.

[Note: message frames]
A message of up to `EAGER_LIMIT` bytes is one EAGER frame. A larger one is an OFFER, answered by a GRANT when the other
rank has a buffer, then DATA frames in order; the sender may take it back with WITHDRAW at any time before the last one.
"""

from enum import IntEnum


class FrameType(IntEnum):
    """The type of a frame; the values are the codes in TCP's frames, and `mpi/wire.py` has those of MPI's."""

    EAGER = 1  # a whole message
    OFFER = 2  # a large message exists
    GRANT = 3  # ... and may come
    DATA = 4  # ... a piece of it
    WITHDRAW = 5  # ... and will not be completed
    ABORT = 6  # the group has failed: payload says why
    LEFT = 7  # the source has closed its handle on the group
    DIED = 8  # the source's connection ended without LEFT (TCP, only from rank 0)
    READY = 9  # all ranks are connected (TCP, only from rank 0)
    PING = 10  # the source asks for a PONG
    PONG = 11  # the source is there


URGENT = frozenset({FrameType.GRANT, FrameType.ABORT, FrameType.DIED, FrameType.PING, FrameType.PONG})
"""Types of frames that may overtake others on their connection."""
