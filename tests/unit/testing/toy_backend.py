"""A minimal backend: send, recv, abort and close over one lock. All else comes from `Backend`.

It shows what an author has to write, and that the conformance suite passes on it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ferrodist.backends.base import Backend, as_abort_error, check_peer
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, GroupClosedError, PeerLostError, SizeMismatchError


@dataclass
class Message:
    """A message in flight."""

    src: int
    dst: int
    tag: int
    data: bytes


@dataclass
class Hub:
    """The state that the ranks of a group share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: list[Message] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    failure: Exception | None = None


class ToyBackend(Backend):
    """A rank among threads; every message is copied into the hub at once."""

    def __init__(self, rank, world_size, hub):
        super().__init__(rank, world_size, timeout=30)
        self.hub = hub

    @classmethod
    def create_group(cls, world_size):
        hub = Hub()
        return [cls(rank, world_size, hub) for rank in range(world_size)]

    @property
    def failure(self):
        return self.hub.failure

    def send(self, data, dst, *, tag=0, timeout=None):
        check_peer(self, dst)
        self.check_call(tag, timeout)
        view = self.flat(data)
        with self.hub.changed:
            self.check_usable(dst)
            self.hub.messages.append(Message(self.rank, dst, tag, bytes(view)))
            self.hub.changed.notify_all()

    def recv(self, buffer, src, *, tag=0, timeout=None):
        check_peer(self, src, any_source=True)
        deadline = self.check_call(tag, timeout)
        view = self.flat(buffer)
        if view.readonly:
            raise TypeError("the buffer to receive into is read-only")
        with self.hub.changed:
            while True:
                self.check_usable()
                message = next((m for m in self.hub.messages if self.matches(m, src, tag)), None)
                if message is not None:
                    return self.take(message, view)
                self.check_usable(src)
                if deadline.expired:
                    ranks = () if src == ANY_SOURCE else (src,)
                    raise DistributedTimeoutError(f"nothing came from {src} in {deadline.timeout} s", ranks=ranks)
                self.hub.changed.wait(deadline.remaining())

    def take(self, message, view):
        if len(view) != len(message.data):
            raise SizeMismatchError(f"a message of {len(message.data)} bytes, a buffer of {len(view)}")
        self.hub.messages.remove(message)
        view[:] = message.data
        return message.src

    def abort(self, reason):
        with self.hub.changed:
            self.hub.failure = self.hub.failure or as_abort_error(self, reason)
            self.hub.changed.notify_all()

    def close(self, timeout=None):
        with self.hub.changed:
            self.hub.left.add(self.rank)
            self.hub.changed.notify_all()
        self._run_close_callbacks()

    def matches(self, message, src, tag):
        return message.dst == self.rank and message.tag == tag and src in (message.src, ANY_SOURCE)

    def check_call(self, tag, timeout):
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < 2**128:
            raise ValueError(f"not a tag: {tag!r}")
        return Deadline(self.timeout if timeout is None else check_timeout(timeout))

    def check_usable(self, peer=None):
        if self.rank in self.hub.left:
            raise GroupClosedError("this rank closed the group")
        if self.hub.failure is not None:
            raise self.hub.failure
        if peer in self.hub.left:
            raise PeerLostError(f"rank {peer} left", ranks=(peer,))

    @staticmethod
    def flat(data):
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("the buffer is not C-contiguous")
        return view.cast("B") if view.nbytes else memoryview(bytearray() if not view.readonly else b"")
