"""Tensors in one message and in two: the same results, errors and leftovers, and what hostile first messages do."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.mailbox import EAGER_LIMIT, INLINE_LIMIT
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import load
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.tensor_protocol import (
    HEADER_BYTES,
    TensorHeader,
    TensorReceive,
    start_send,
    unclaimed_tensors,
)
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_BACKENDS = ["simulated", "tcp", "native-threads"]
_SIZES = [0, 1, 2047, 2048, 2049, INLINE_LIMIT - 1, INLINE_LIMIT, INLINE_LIMIT + 1, EAGER_LIMIT + 1]


def _header(count: int, payload_id: int = 7) -> bytes:
    return TensorHeader(payload_id, torch.float32, (count,)).pack()


def _send_first(group: Backend, message: bytes, tag: int = 0) -> None:
    group.send(message, 1, tag=channel_tag(Channel.TENSOR, tag))


def _ones(count: int) -> bytes:
    return torch.ones(count).numpy().tobytes()


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_the_engine_has_the_same_limit() -> None:
    """The compiled fast path receives inline elements of as many bytes as the general path sends."""
    assert load().INLINE_LIMIT == INLINE_LIMIT


@pytest.mark.parametrize("backend", _BACKENDS)
def test_sizes_on_both_sides_of_the_limit(backend: str) -> None:
    """Bytes of any size arrive by every function, from a rank and from any, in the group and in a sub-group."""

    def on_rank(group: Backend) -> None:
        sub = fd.new_group([1, 0])
        for size, here in itertools.product(_SIZES, (group, sub)):
            tensor = torch.arange(size).to(torch.uint8)
            peer = 1 - here.rank
            if group.rank == 0:
                for tag in (0, 5, 5):
                    fd.send(tensor, peer, tag=tag, group=here)
                fd.batch([fd.Send(tensor, peer, tag=6)], group=here)
            else:
                assert torch.equal(fd.recv((size,), torch.uint8, fd.ANY_SOURCE, group=here), tensor)
                into = torch.ones(size, dtype=torch.uint8)
                assert fd.recv_into(into, fd.ANY_SOURCE, tag=5, group=here) == peer
                assert torch.equal(into, tensor)
                assert torch.equal(fd.recv(None, None, peer, tag=5, group=here), tensor)
                into = torch.ones(2 * size, dtype=torch.uint8)[::2]
                fd.batch([fd.Recv(into, peer, tag=6)], group=here)
                assert torch.equal(into, tensor)
            theirs = fd.sendrecv(tensor, peer, None, peer, group=here)
            assert torch.equal(theirs, tensor)
        fd.barrier()
        assert not unclaimed_tensors(group).may_contain(5)

    run_ranks(on_rank, 2, backend=backend, timeout=30)


def test_small_tensors_and_objects_are_one_message() -> None:
    """Up to the limit a tensor, and an object's encoding, is one message; above it a header and a payload."""
    sizes: dict[int, list[int]] = {}

    class Counting(SimulatedBackend):
        def _start_send(self, send) -> None:  # type: ignore[no-untyped-def]
            sizes.setdefault(self.rank, []).append(len(send.data))
            super()._start_send(send)

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            sizes.clear()
            fd.send(torch.ones(3), 1, group=group)
            fd.send(torch.empty(0), 1, group=group)
            fd.send_object([1, 2], 1, group=group)
            fd.send(torch.ones(INLINE_LIMIT // 4), 1, group=group)
            fd.send(torch.ones(INLINE_LIMIT // 4 + 1), 1, group=group)
        else:
            for _ in range(2):
                fd.recv(None, None, 0, group=group)
            assert fd.recv_object(0, group=group) == [1, 2]
            for _ in range(2):
                fd.recv(None, None, 0, group=group)

    groups = Counting.create_group(2)
    threads = [threading.Thread(target=on_rank, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        group.close()
    encoded = 1 + len(b"\x92\x01\x02")
    whole = [HEADER_BYTES + 12, HEADER_BYTES, HEADER_BYTES + encoded, HEADER_BYTES + INLINE_LIMIT]
    assert sizes[0] == [*whole, HEADER_BYTES, INLINE_LIMIT + 4]


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "a message that is not a tensor"),
        (_header(2)[:-1], "a message that is not a tensor"),
        (_header(2) + bytes(7), r"elements that are not those of its torch.float32 tensor of shape \(2,\)"),
        (_header(2) + bytes(9), r"elements that are not those of its torch.float32 tensor of shape \(2,\)"),
        (_header(0) + bytes(4), r"elements that are not those of its torch.float32 tensor of shape \(0,\)"),
        (_header(2**40) + bytes(8), "elements that are not those of its torch.float32 tensor"),
        (TensorHeader(0, torch.float32, (2**62, 2)).pack() + bytes(8), "the header of an impossible tensor"),
    ],
    ids=["empty", "cut header", "truncated", "overlong", "none expected", "huge", "impossible"],
)
def test_hostile_first_messages(backend: str, message: bytes, match: str) -> None:
    """A first message that no rank sends raises ProtocolError with its sender, is used up, and the group goes on."""

    def on_rank(group: Backend) -> None:
        calls: list[Callable[[], object]] = [
            lambda: fd.recv(None, None, 0, timeout=20),
            lambda: fd.recv((2,), torch.float32, fd.ANY_SOURCE, timeout=20),
            lambda: fd.recv_into(torch.ones(2), 0, timeout=20),
            lambda: fd.batch([fd.Recv(torch.ones(2), 0)], timeout=20),
        ]
        for call in calls:
            if group.rank == 0:
                _send_first(group, message)
                fd.send(torch.ones(2), 1)
            else:
                with pytest.raises(fd.ProtocolError, match=match) as caught:
                    call()
                assert caught.value.ranks == (0,)
                assert fd.recv(None, None, 0).tolist() == [1.0, 1.0]
        fd.barrier()

    run_ranks(on_rank, 2, backend=backend, timeout=30)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_first_messages_longer_than_any(backend: str) -> None:
    """A first message larger than the limit allows is refused, whatever its header says, and named for its sender."""

    def on_rank(group: Backend) -> None:
        count = INLINE_LIMIT // 4 + 1
        if group.rank == 0:
            _send_first(group, _header(count) + _ones(count), tag=9)
        else:
            for call in (
                lambda: fd.recv(None, None, 0, tag=9, timeout=20),
                lambda: fd.recv_into(torch.ones(count), 0, tag=9, timeout=20),
            ):
                with pytest.raises(fd.ProtocolError, match="a message that is not a tensor") as caught:
                    call()
                assert caught.value.ranks == (0,)
        fd.barrier()

    run_ranks(on_rank, 2, backend=backend, timeout=30)


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("count", [2, INLINE_LIMIT // 4])
def test_small_tensors_in_two_messages(backend: str, count: int) -> None:
    """A sender may send any tensor as header and payload, as one without `irecv_up_to` does."""

    def on_rank(group: Backend) -> None:
        for payload_id, receive in enumerate(
            (lambda: fd.recv(None, None, 0), lambda: fd.recv((count,), torch.float32, fd.ANY_SOURCE)), 10_000
        ):
            if group.rank == 0:
                _send_first(group, _header(count, payload_id))
                group.send(_ones(count), 1, tag=channel_tag(Channel.TENSOR_PAYLOAD, payload_id))
            else:
                assert torch.equal(receive(), torch.ones(count))
        fd.barrier()

    run_ranks(on_rank, 2, backend=backend, timeout=30)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_mismatches_leave_nothing_behind(backend: str) -> None:
    """A tensor of another shape or dtype raises, is used up whichever size it has, and the next one arrives."""

    def on_rank(group: Backend) -> int:
        for size in (0, 4, 1000, INLINE_LIMIT, INLINE_LIMIT + 4):
            if group.rank == 0:
                for _ in range(3):
                    fd.send(torch.ones(size // 4), 1)
                fd.send(torch.tensor([3]), 1)
                continue
            for call in (
                lambda: fd.recv((7,), torch.float32, 0),
                lambda: fd.recv(None, torch.int8, 0),
                lambda: fd.batch([fd.Recv(torch.ones(7), fd.ANY_SOURCE)]),
            ):
                with pytest.raises(fd.SizeMismatchError, match=r"sent a torch\.float32 tensor") as caught:
                    call()
                assert caught.value.ranks == (0,)
            assert fd.recv(None, None, 0).item() == 3
        assert not unclaimed_tensors(group).may_contain(0)
        fd.barrier()
        if backend == "simulated":
            return group._mailbox._unexpected_bytes  # type: ignore[attr-defined]
        return 0

    assert run_ranks(on_rank, 2, backend=backend, timeout=30) == [0, 0]


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("count", [0, 5, 512, INLINE_LIMIT // 4])
def test_timeouts_and_retries(backend: str, count: int) -> None:
    """A receive that timed out takes nothing: the next one gets the tensor; its own buffer is not written later."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            into = torch.full((count,), 7.0)
            for call in (
                lambda: fd.recv_into(into, 0, timeout=0.02),
                lambda: fd.recv(None, None, fd.ANY_SOURCE, timeout=0.02),
                lambda: fd.batch([fd.Recv(into, 0)], timeout=0.02),
            ):
                with pytest.raises(fd.DistributedTimeoutError):
                    call()
            fd.barrier()
            assert torch.equal(fd.recv(None, None, 0), torch.zeros(count))
            assert (into == 7).all()
        else:
            fd.barrier()
            fd.send(torch.zeros(count), 1)
        fd.barrier()

    run_ranks(on_rank, 2, backend=backend, timeout=30)


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("size", [4, INLINE_LIMIT, INLINE_LIMIT + 4, EAGER_LIMIT + 4])
def test_cancelled_receives_at_any_moment(backend: str, size: int) -> None:
    """Whenever a receive is cancelled, the tensor goes to it or to the next one, whole, and never to both."""
    rounds = 60

    def on_rank(group: Backend) -> None:
        for i in range(rounds):
            tensor = torch.full((size // 4,), float(i))
            if group.rank == 0:
                group.recv(bytearray(1), 1, tag=1)
                fd.send(tensor, 1, tag=2)
                continue
            into = torch.full_like(tensor, -1.0)
            receive = TensorReceive(group, 0, 2, shape=None, dtype=None)
            group.send(b"g", 0, tag=1)
            time.sleep((i % 12) * 2e-5)
            if receive.cancel():
                assert fd.recv_into(into, fd.ANY_SOURCE if i % 2 else 0, tag=2) == 0
                assert receive.done()
            else:
                receive.wait(20)
                into = receive.finish()
            assert torch.equal(into, tensor)
        fd.barrier()
        assert not unclaimed_tensors(group).may_contain(2)

    run_ranks(on_rank, 2, backend=backend, timeout=30)


def test_a_receive_cancelled_while_its_message_comes_leaves_all_of_it() -> None:
    """A first message that has come when its receive is cancelled goes whole to the next receive."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            original = TensorReceive._use_message
            cancelled: list[bool] = []

            def cancelled_before(self: TensorReceive) -> None:
                canceller = threading.Thread(target=lambda: cancelled.append(self.cancel()))
                canceller.start()
                while not self._cancelled:
                    time.sleep(0.001)
                original(self)
                canceller.join(20)

            class Cancelled(TensorReceive):
                __slots__ = ()
                _use_message = cancelled_before

            fd.barrier()
            receive = Cancelled(group, 0, 0, shape=(3,), dtype=torch.float32)
            with pytest.raises(fd.DistributedTimeoutError, match="cancelled"):
                receive.wait(20)
            assert cancelled == [True]
            assert unclaimed_tensors(group).may_contain(0)
            assert fd.recv((3,), torch.float32, 0).tolist() == [1.0] * 3
            assert not unclaimed_tensors(group).may_contain(0)
        else:
            fd.send(torch.ones(3), 1)
            fd.barrier()
        fd.barrier()

    run_ranks(on_rank, 2)


def test_a_cancelled_send_of_one_message_never_arrives() -> None:
    """A send of one message that is cancelled in time is gone; the next tensor of its tag arrives."""

    class Held(SimulatedBackend):
        """Sends nothing until it is released."""

        def _start_send(self, send) -> None:  # type: ignore[no-untyped-def]
            if not getattr(self, "is_held", False):
                super()._start_send(send)

        def _take_back(self, send) -> bool:  # type: ignore[no-untyped-def]
            return True if getattr(self, "is_held", False) else super()._take_back(send)

    first, second = Held.create_group(2)
    first.is_held = True
    (request,) = start_send(first, torch.ones(2), 1, 0)
    assert request.cancel()
    first.is_held = False
    fd.send(torch.zeros(2), 1, group=first)
    assert fd.recv(None, None, 0, group=second).tolist() == [0.0, 0.0]
    for group in (first, second):
        group.close()


@pytest.mark.parametrize("backend", _BACKENDS)
def test_interleaved_tags_and_sources(backend: str) -> None:
    """Tensors of all sizes from two ranks, by tag and from any source, arrive in their senders' order."""
    tags, rounds = (0, 1, 2**56 - 1), 12

    def on_rank(group: Backend) -> None:
        def tensor(rank: int, tag: int, i: int) -> torch.Tensor:
            return torch.full((_SIZES[(i + tag) % (len(_SIZES) - 1)],), (rank * 50 + i) % 251, dtype=torch.uint8)

        if group.rank:
            for i, tag in itertools.product(range(rounds), tags):
                fd.send(tensor(group.rank, tag, i), 0, tag=tag)
        else:
            for tag in reversed(tags):
                next_of = {1: 0, 2: 0}
                for _ in range(2 * rounds):
                    found, source = fd.recv(None, None, fd.ANY_SOURCE, tag=tag, return_source=True)
                    assert torch.equal(found, tensor(source, tag, next_of[source]))
                    next_of[source] += 1
                assert next_of == {1: rounds, 2: rounds}
        fd.barrier()

    run_ranks(on_rank, 3, backend=backend, timeout=30)
