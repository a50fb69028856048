"""Message tags.

[Note: tags]
A tag is an integer of up to 128 bits that backends only compare. Messages between two ranks with the same tag arrive in
the order in which they were sent; messages with different tags don't wait for each other. The upper 64 bits are the id
of a group (0 is the group itself, others are its sub-groups). The lower 64 bits are a channel and a number within it,
so that no two parts of a program can receive each other's messages.
"""

from __future__ import annotations

from enum import IntEnum

ANY_SOURCE = -1
"""As ``src`` of a receive: the first message with the right tag, whoever sent it."""

WORLD_GROUP_ID = 0  # of the group itself, in the tags of its own messages
TAG_BITS = 128
LOW_64_BITS = (1 << 64) - 1  # a mask of the half of a tag that holds channel and number

_NUMBER_BITS = 56
_GROUP_SHIFT = 64


class Channel(IntEnum):
    """The purpose of a message: the top byte of a tag's lower half."""

    BYTES = 0  # Backend.send and recv, numbered by the user's tag
    CALL = 1  # calls compared before a collective, numbered by its sequence
    LATE = 2  # "my deadline has passed", or "are you there" and its answer, numbered by the collective's sequence
    DATA = 3  # the data of a collective, numbered by its sequence
    TENSOR = 4  # a tensor sent point to point: dtype and shape, and its elements if they are few; the user's tag
    TENSOR_PAYLOAD = 5  # the elements of a larger one, numbered by the payload's id
    DEVICE_CALL = 6  # calls on GPU tensors, compared while the GPUs work
    DEVICE_PROGRESS = 7  # how many of these calls ranks have made
    DEVICE_COUNT = 8  # elements that one rank sends another in an uneven exchange, numbered by its sequence
    DEVICE_HEAD = 9  # dtype and shape of a tensor sent from GPU to GPU


def channel_tag(channel: Channel, number: int) -> int:
    """The tag of message ``number`` (0 to 2**56-1) of a channel."""
    return channel << _NUMBER_BITS | number


def channel_of_tag(tag: int) -> int:
    """The channel of a tag, of any group."""
    return tag >> _NUMBER_BITS & 0xFF


def check_user_tag(tag: int) -> int:
    """Return ``tag``, or raise ValueError unless it is an integer in 0..2**56-1."""
    return check_tag(tag, _NUMBER_BITS)


def check_tag(tag: int, bits: int) -> int:
    """Return a tag, or raise ValueError unless it is an integer of at most ``bits`` bits."""
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < 1 << bits:
        raise ValueError(f"a tag is an integer from 0 to 2**{bits}-1, not {tag!r}")
    return tag


def group_tag(group_id: int, tag: int) -> int:
    """The tag, in the outermost group, of a sub-group's message with ``tag``."""
    return group_id << _GROUP_SHIFT | tag


def group_of_tag(tag: int) -> int:
    """The id of the group that a tag belongs to."""
    return tag >> _GROUP_SHIFT
