"""What the conformance suite can't reach: what a started operation says, timeouts of its wait, threads it leaves."""

from __future__ import annotations

import os
import signal
import struct
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives import coalescing, objects
from ferrodist.collectives.tensor_protocol import HEADER_BYTES, TensorHeader
from ferrodist.testing import check_leaks, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.testing.ranks import BackendName


def test_a_wait_may_be_shorter_than_the_operation() -> None:
    """A wait that ends too early says so and may be repeated; the operation goes on."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            group.recv(bytearray(1), 0)
        pending = fd.async_allreduce(torch.ones(3))
        assert pending.op_name == "allreduce"
        if group.rank == 0:
            with pytest.raises(fd.DistributedTimeoutError, match=r"still under way after 0\.01 s: wait for it again"):
                pending.wait(0.01)
            assert not pending.done()
            assert "under way" in repr(pending)
            group.send(b"x", 1)
        assert pending.wait().tolist() == [2.0] * 3
        assert "done" in repr(pending)

    run_ranks(on_rank, 2)


def test_one_queue_thread_a_group_that_ends_with_it() -> None:
    """Started operations share one thread a group and rank; closing the group ends it."""

    def on_rank(group: Backend) -> list[str]:
        sub = fd.SubBackend(group, [1, 0])
        for used in (group, sub, group):
            fd.async_allreduce(torch.ones(2), group=used).wait()
        fd.barrier()
        names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ferrodist-queue"))
        fd.barrier()
        sub.close()
        return names

    with check_leaks():
        assert run_ranks(on_rank, 2)[0] == ["ferrodist-queue-world"] * 2 + ["ferrodist-queue-world[1, 0]"] * 2


@pytest.mark.parametrize(
    "backend",
    [
        "tcp",
        pytest.param("native", marks=pytest.mark.skipif(not is_native_available(), reason="no native engine here")),
    ],
)
def test_a_forked_child_does_not_wait_for_its_parents_operations(backend: BackendName) -> None:
    """What was started before a fork ends in the parent: waiting for it in the child raises at once."""

    def on_rank(group: Backend) -> list[float]:
        if group.rank == 1:
            group.recv(bytearray(1), 0)
        pending = fd.async_allreduce(torch.ones(2))
        if group.rank == 0:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    pending.wait()
                except fd.GroupClosedError as error:
                    os._exit(0 if "forked from" in error.message else 2)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            group.send(b"x", 1)
        return pending.wait().tolist()

    assert run_ranks(on_rank, 2, backend=backend) == [[2.0, 2.0]] * 2


def test_operations_on_a_failed_group_start_no_thread() -> None:
    """What is started on a group that has failed ends at once, in the caller's thread."""
    group = fd.SimulatedBackend.create_group(1)[0]
    group.abort("no more")
    with check_leaks(), fd.use_group(group):
        assert fd.async_allreduce(torch.ones(2)).done()
        with fd.coalesce():
            pending = [fd.async_allreduce(torch.ones(2)), fd.async_broadcast(torch.ones(2))]
        for handle in pending:
            with pytest.raises(fd.GroupAbortedError, match="no more"):
                handle.wait(0)
    group.close()


_DEEP = object()  # encoded as `_UNDECODABLE`


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<QBB12q", 0, 200, 1, 3, *[0] * 11),
        struct.pack("<QBB12q", 0, 1, 13, *[1] * 12),
        struct.pack("<QBB12q", 0, 1, 1, -3, *[0] * 11),
    ],
    ids=["dtype", "dims", "size"],
)
def test_heads_of_tensors_that_cannot_be(head: bytes) -> None:
    """A head that no rank sends raises ProtocolError with the sender, and the group goes on."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            group.send(head, 1, tag=channel_tag(Channel.TENSOR, 0))
        else:
            assert len(head) == HEADER_BYTES
            with pytest.raises(fd.ProtocolError) as caught:
                fd.recv(None, None, 0, timeout=5)
            assert caught.value.ranks == (0,)
        fd.barrier()

    run_ranks(on_rank, 2)


_FACTOR_CALL = CollectiveSignature(
    operation="reduce_scatter", dtype="float32", reduce_op="premultiplied_sum", dim=0, count=2
)
_TINY_CALL = CollectiveSignature(operation="allreduce", dtype="float32", reduce_op="sum", count=2)


@pytest.mark.parametrize(
    ("call", "mine"),
    [
        (_TINY_CALL.with_payload(b""), lambda: fd.allreduce(torch.ones(2))),
        (_TINY_CALL.with_payload(b"xyz"), lambda: fd.allreduce(torch.ones(2))),
        (_TINY_CALL.with_payload(bytes(100)), lambda: fd.allreduce(torch.ones(2))),
        (_FACTOR_CALL.with_payload(b"x" * 7), lambda: fd.reduce_scatter(torch.ones(2), fd.premultiplied_sum(1.0))),
    ],
    ids=["none", "few", "many", "factor"],
)
def test_elements_that_do_not_fit_a_call(call: CollectiveSignature, mine: Callable[[], object]) -> None:
    """Elements that travel with a call are as many as it says, or all ranks name the one whose are not."""

    def on_rank(group: Backend) -> None:
        if group.rank == 1:
            group.isend(call.at(0).encode(), 0, tag=channel_tag(Channel.CALL, 0))
            with pytest.raises(fd.ProtocolError) as caught:
                group.recv(bytearray(1), 0, timeout=5)
        else:
            with pytest.raises(fd.ProtocolError) as caught:
                mine()
        assert caught.value.ranks == (1,)

    run_ranks(on_rank, 2)


_UNDECODABLE = b"m" + b"\x91" * 50_000 + b"\xc0"  # a list in a list, as no rank's encoder makes it

_OBJECT_CALLS: dict[str, Callable[[Backend, object], object]] = {
    "all_gather_object": lambda group, value: fd.all_gather_object(value),
    "broadcast_object": lambda group, value: fd.broadcast_object(value, 1),
    "gather_object": lambda group, value: fd.gather_object(value, 0),
    "scatter_object": lambda group, value: fd.scatter_object([value, "fine"] if group.rank == 1 else None, 1),
}


@pytest.mark.parametrize("name", _OBJECT_CALLS)
def test_objects_that_cannot_be_decoded_end_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an object can't be decoded the group fails with that: no rank is left waiting for the one that has it."""
    to_bytes = objects._to_bytes

    def call(group: Backend) -> None:
        _OBJECT_CALLS[name](group, _DEEP if group.rank == 1 else "fine")
        fd.barrier()  # a rank that could decode hears of it at its next call

    def on_rank(group: Backend) -> None:
        with pytest.raises(
            fd.ProtocolError, match="can't decode the object that rank 1 sent: RecursionError"
        ) as caught:
            call(group)
        assert caught.value.ranks == (1,)
        assert isinstance(group.failure, fd.ProtocolError)

    monkeypatch.setattr(
        objects,
        "_to_bytes",
        lambda value, allow_pickle: bytearray(_UNDECODABLE) if value is _DEEP else to_bytes(value, allow_pickle),
    )
    run_ranks(on_rank, 2)


def test_bodies_of_refused_tensors_are_not_kept() -> None:
    """Tensors of the wrong shape, eager or large, leave nothing behind with the receiver."""

    def on_rank(group: Backend) -> int:
        for count in (100, 60_000, 200_000):
            if group.rank == 0:
                fd.send(torch.ones(count), 1, timeout=10)
            else:
                with pytest.raises(fd.SizeMismatchError):
                    fd.recv((3,), torch.float32, 0)
        fd.barrier()
        return group._mailbox._unexpected_bytes

    assert run_ranks(on_rank, 2) == [0, 0]


@pytest.mark.parametrize(
    "shape", [(2**62, 2**62), (2**50,), (0, 2**62), (2**40, 2**40, 0)], ids=["product", "one", "with none", "none"]
)
@pytest.mark.parametrize("receive", ["recv", "recv of a shape", "recv_into"])
def test_heads_of_tensors_that_no_machine_has_room_for(shape: tuple[int, ...], receive: str) -> None:
    """A head with sizes that no machine has room for is a ProtocolError that names its sender, nothing of torch's."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            head = TensorHeader(7, torch.float32, shape).pack()
            group.send(head, 1, tag=channel_tag(Channel.TENSOR, 0))
            group.send(bytes(8), 1, tag=channel_tag(Channel.TENSOR_PAYLOAD, 7))
            return
        calls: dict[str, Callable[[], object]] = {
            "recv": lambda: fd.recv(None, None, 0),
            "recv of a shape": lambda: fd.recv((2,), torch.float32, 0),
            "recv_into": lambda: fd.recv_into(torch.ones(2), 0),
        }
        with pytest.raises(fd.ProtocolError, match=r"rank 0 .* the header of an impossible tensor") as caught:
            calls[receive]()
        assert caught.value.ranks == (0,)

    run_ranks(on_rank, 2)


def test_payloads_that_do_not_fit_their_header() -> None:
    """A tensor's elements of another size than its head says end the receive at once, and their sender is named."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            group.send(TensorHeader(7, torch.float32, (3,)).pack(), 1, tag=channel_tag(Channel.TENSOR, 0))
            group.send(bytes(5), 1, tag=channel_tag(Channel.TENSOR_PAYLOAD, 7))
            return
        with pytest.raises(fd.ProtocolError, match="elements that are not those of its") as caught:
            fd.recv((3,), torch.float32, 0)
        assert caught.value.ranks == (0,)

    run_ranks(on_rank, 2)


def test_a_cancelled_receive_leaves_the_tensor_alone() -> None:
    """A recv that gave up before its elements came does not write to its tensor later, whenever they come."""

    def on_rank(group: Backend) -> None:
        for tag, count in ((7, 10), (8, 200_000)):
            into = torch.zeros(count)
            if group.rank == 1:
                # The head alone: the elements follow when the receive has given up.
                group.recv(bytearray(1), 0, tag=2)
                with pytest.raises(fd.DistributedTimeoutError):
                    fd.recv_into(into, 0, tag=tag, timeout=0.05)
                group.send(b"x", 0, tag=3)
                fd.barrier()
                assert not into.any()
            else:
                number = 10_000 + count
                head = TensorHeader(number, torch.float32, (count,)).pack()
                group.send(head, 1, tag=channel_tag(Channel.TENSOR, tag))
                group.send(b"x", 1, tag=2)
                group.recv(bytearray(1), 1, tag=3)
                body = group.isend(torch.ones(count).numpy(), 1, tag=channel_tag(Channel.TENSOR_PAYLOAD, number))
                fd.barrier()
                body.cancel()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_a_rank_that_has_no_memory_to_join_operations(backend: BackendName, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises that, and the others don't wait for it."""
    join = torch.cat

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        if tensors[0][0] == 1:
            raise MemoryError("no memory in this test")
        return join(tensors)

    monkeypatch.setattr(coalescing.torch, "cat", cat)

    def on_rank(group: Backend) -> None:
        with fd.coalesce():
            pending = [fd.async_allreduce(torch.full((2,), float(group.rank)), timeout=3600.0) for _ in range(2)]
        kind = MemoryError if group.rank == 1 else fd.GroupAbortedError
        with pytest.raises(kind, match="no memory in this test"):
            pending[0].wait()

    run_ranks(on_rank, 2, backend=backend)
