"""Point-to-point messages of GPU tensors, over a fake of NCCL that matches by order alone, as NCCL does."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from nccl_fakes import FakeNccl, FakeStream, fake_groups, send_cpu_tensors_to_nccl

import ferrodist as fd
from ferrodist.backends.nccl.p2p import _HEADER, _TAG, _Header
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.testing import run_ranks


@pytest.fixture(autouse=True)
def _cpu_tensors_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    send_cpu_tensors_to_nccl(monkeypatch)


def receive(shape: tuple[int, ...], src: int, *, tag: int = 0, timeout: float | None = None) -> torch.Tensor:
    """Receive a float32 tensor."""
    tensor = torch.full(shape, -1.0)
    fd.recv_into(tensor, src, tag=tag, timeout=timeout)
    return tensor


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_around_a_ring(dtype: torch.dtype, world_size: int) -> None:
    """Tensors of every dtype, layout and size come around a ring unchanged."""

    def program(group: fd.Backend) -> None:
        right, left = (group.rank + 1) % world_size, (group.rank - 1) % world_size
        for shape in ((), (0,), (1,), (3, 5), (70_000,)):
            sent = torch.full(shape, group.rank + 1).to(dtype)
            got = fd.sendrecv(sent.t() if sent.dim() == 2 else sent, right, tuple(reversed(shape)), left)
            expected = torch.full(tuple(reversed(shape)), left + 1).to(dtype)
            assert got.shape == expected.shape
            assert got.dtype is expected.dtype
            assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))

    run_ranks(program, world_size, backend=fake_groups)


@pytest.mark.parametrize("world_size", [2, 4])
def test_receives_match_by_tag(world_size: int) -> None:
    """A receive gets the next tensor with its tag, though NCCL matches by order alone."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            for number, tag in enumerate((5, 6, 5, 7)):
                fd.send(torch.full((tag,), float(number)), 1, tag=tag)
        elif group.rank == 1:
            got = [receive((tag,), 0, tag=tag)[0].item() for tag in (7, 5, 6, 5)]
            assert got == [3, 0, 1, 2]

    run_ranks(program, world_size, backend=fake_groups)


def test_a_tensor_that_does_not_fit_is_dropped_with_an_error() -> None:
    """Another shape or dtype raises, naming both, and writes nothing; the next message is received."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            fd.send(torch.ones(3), 1)
            fd.send(torch.ones(4, dtype=torch.float64), 1)
            fd.send(torch.full((4,), 2.0), 1)
            return
        mine = torch.full((4,), -1.0)
        with pytest.raises(fd.SizeMismatchError, match=r"float32 tensor of shape \(3,\).*expected a float32.*\(4,\)"):
            fd.recv_into(mine, 0)
        with pytest.raises(fd.SizeMismatchError, match="float64"):
            fd.recv_into(mine, 0)
        assert mine.tolist() == [-1.0] * 4
        assert fd.recv_into(mine, 0) == 0
        assert mine.tolist() == [2.0] * 4

    run_ranks(program, 2, backend=fake_groups)


def test_a_receive_from_any_rank_returns_the_sender() -> None:
    """A receive from any rank takes the first tensor and returns its sender."""

    def program(group: fd.Backend) -> None:
        if group.rank:
            fd.send(torch.full((2,), float(group.rank)), 0)
            return
        sources = set()
        for _ in range(2):
            tensor = torch.empty(2)
            source = fd.recv_into(tensor, fd.ANY_SOURCE)
            assert tensor.tolist() == [source] * 2
            sources.add(source)
        assert sources == {1, 2}

    run_ranks(program, 3, backend=fake_groups)


def test_tensors_of_any_strides() -> None:
    """Non-contiguous tensors are sent and received, and no other memory is written."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            fd.send(torch.arange(12.0).reshape(3, 4)[:, ::2], 1)
            return
        target = torch.zeros(3, 4)
        fd.recv_into(target[:, 1:3], 0)
        assert target.tolist() == [[0, 0, 2, 0], [0, 4, 6, 0], [0, 8, 10, 0]]

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_batches_between_all_ranks(world_size: int) -> None:
    """Every rank exchanges with every other at the same time; peers are returned in the order of the operations."""

    def program(group: fd.Backend) -> None:
        others = [rank for rank in range(world_size) if rank != group.rank]
        rooms = {rank: torch.empty(3) for rank in others}
        operations = [fd.Send(torch.full((3,), float(10 * group.rank + rank)), rank) for rank in others]
        operations += [fd.Recv(rooms[rank], rank) for rank in others]
        assert fd.batch(operations) == others * 2
        for rank in others:
            assert rooms[rank].tolist() == [10 * rank + group.rank] * 3

    run_ranks(program, world_size, backend=fake_groups)


def test_only_the_two_ranks_of_a_message_take_part() -> None:
    """A message in a group of four needs no other rank; collectives before and after use another communicator."""

    def program(group: fd.Backend) -> None:
        if group.rank == 3:
            fd.send(torch.ones(2), 1)
        elif group.rank == 1:
            assert receive((2,), 3).tolist() == [1, 1]
        group.barrier()
        assert fd.allreduce(torch.ones(1)).item() == 4
        if group.rank == 3:
            fd.send(torch.ones(2), 1)
        elif group.rank == 1:
            receive((2,), 3)
        group.synchronize()
        assert len(group.shared.opened) == 2 + 4

    run_ranks(program, 4, backend=fake_groups)


def test_a_receive_that_times_out_can_be_repeated() -> None:
    """A receive without a message times out, naming the rank; the group stays usable."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            with pytest.raises(
                fd.DistributedTimeoutError, match=r"recv from rank 1.*nothing came within 0\.1 s"
            ) as caught:
                receive((2,), 1, timeout=0.1)
            assert caught.value.ranks == (1,)
            group.barrier()
            assert receive((2,), 1).tolist() == [1, 1]
        else:
            group.barrier()
            fd.send(torch.ones(2), 0)

    run_ranks(program, 2, backend=fake_groups)


def test_a_batch_that_times_out_loses_no_messages() -> None:
    """When one message of a batch does not come, those that came are there for the next receives."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            for tag in (2, 1):  # one is kept, and one not launched yet, when the batch gives up
                fd.send(torch.full((2,), float(tag)), 1, tag=tag)
            group.barrier()
            return
        batch = [fd.Recv(torch.empty(2), 0, tag) for tag in (1, 2, 3)]
        with pytest.raises(fd.DistributedTimeoutError, match="nothing came"):
            fd.batch(batch, timeout=0.5)
        group.barrier()
        received = [receive((2,), 0, tag=tag) for tag in (2, 1)]
        group.synchronize()
        assert [tensor[0].item() for tensor in received] == [2, 1]

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_a_send_that_is_not_received_ends_the_pair() -> None:
    """A send that nobody receives is a timeout that names the receiver, once the two are connected.

    Messages between the two are over then, and collectives go on.
    """

    def program(group: fd.Backend) -> None:
        other = 1 - group.rank
        if group.rank == 0:
            fd.send(torch.ones(2), 1)
            group.barrier()
            fd.send(torch.ones(2), 1, timeout=0.2)
            with pytest.raises(fd.DistributedTimeoutError, match="send to rank 1") as caught:
                group.synchronize()
            assert caught.value.ranks == (1,)
        else:
            receive((2,), 0)
            group.barrier()
        group.barrier()
        with pytest.raises(fd.DistributedTimeoutError, match="send to rank 1"):  # noqa: PT012
            for _ in range(1000):  # what ends the pair travels beside the barrier, and may come later
                fd.send(torch.ones(2), other)
                time.sleep(0.01)
        assert fd.async_allreduce(torch.ones(1)).wait(timeout=30).item() == 2

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_a_batch_with_a_rank_that_has_left_puts_nothing_in_another_place() -> None:
    """The first message was announced and never sent, so the next one must not be received for it."""

    def program(group: fd.Backend) -> None:
        if group.rank == 2:
            group.close()
            return
        if group.rank == 0:
            with pytest.raises(fd.PeerLostError, match="rank 2"):  # noqa: PT012
                while True:  # until this rank knows that the other has left
                    fd.send(torch.ones(0), 2)
            with pytest.raises(fd.PeerLostError, match="rank 2"):
                fd.batch([fd.Send(torch.full((2,), float(rank)), rank) for rank in (1, 2)])
        with pytest.raises(fd.GroupAbortedError, match="send to rank 1, send to rank 2 by PeerLostError"):
            fd.send(torch.zeros(2), 1) if group.rank == 0 else receive((2,), 0)

    run_ranks(program, 3, backend=fake_groups)


def test_a_batch_that_one_rank_does_not_complete_ends_its_other_pairs() -> None:
    """Their headers are taken, so their elements must not be received for later ones."""

    def program(group: fd.Backend) -> None:
        if group.rank == 1:
            group.send(_Header.from_tensor(torch.ones(2), 0).pack(), 0, tag=_TAG)
        elif group.rank == 2:
            with pytest.raises(fd.GroupAbortedError, match="recv from rank 1, recv from rank 2"):
                fd.send(torch.ones(2), 0)
        else:
            with pytest.raises(fd.DistributedTimeoutError):
                fd.batch([fd.Recv(torch.empty(2), 1), fd.Recv(torch.empty(2), 2)], timeout=0.5)
            with pytest.raises(fd.GroupAbortedError):
                fd.send(torch.zeros(2), 2)
        group.barrier()

    run_ranks(program, 3, backend=fake_groups)


def test_messages_and_collectives_of_two_ranks_dont_wait_for_each_other() -> None:
    """A group of two ranks has a separate communicator and stream for messages."""

    def program(group: fd.Backend) -> None:
        pending = fd.async_allreduce(torch.ones(1))
        if group.rank == 0:
            fd.send(torch.ones(2), 1)
        else:
            received = receive((2,), 0)
        assert pending.wait(timeout=30).item() == 2
        group.synchronize()
        assert group.rank == 0 or received.tolist() == [1, 1]
        works = [[work.kind for work in stream.works] for stream in group.fake_streams.made]
        assert works == [["all_reduce"], ["send" if group.rank == 0 else "recv"]]

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_messages_with_several_ranks_overlap() -> None:
    """The caller's stream waits only when a whole batch has been enqueued."""

    def program(group: fd.Backend) -> None:
        rooms = [torch.empty(2), torch.empty(2)]
        others = [rank for rank in range(3) if rank != group.rank]
        operations = [fd.Send(torch.ones(2), rank) for rank in others]
        operations += [fd.Recv(room, rank) for room, rank in zip(rooms, others, strict=True)]
        fd.batch(operations)
        log = [entry for entry in group.fake_streams.log if "caller" in entry]
        assert log == ["record the caller's"] * 2 + ["the caller's waits"] * 2
        assert not any(launched.kept for one in group._executors.values() for launched in one._outstanding)

    run_ranks(program, 3, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_unclaimed_elements_are_ordered_before_the_receivers_stream() -> None:
    """Elements that came before their receive are copied after their arrival, and their memory is kept until then."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            fd.send(torch.ones(2), 1, tag=1)
            fd.send(torch.ones(3), 1, tag=2)
            return
        receive((3,), 0, tag=2)
        streams = group.fake_streams
        other = FakeStream("other")
        with streams.using(other):
            assert receive((2,), 0, tag=1).tolist() == [1, 1]
        assert [work.kind for work in other.waited_for[-1].works] == ["recv", "recv"]
        assert [stream for _, stream in streams.kept] == [other]

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("step", [1, 2])
def test_inference_tensors_are_received_into_outside_inference_mode(step: int) -> None:
    """Tensors made in inference mode, contiguous or not, can be received into, as on the CPU."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            fd.send(torch.arange(3.0), 1)
            return
        with torch.inference_mode():
            target = torch.zeros(3 * step)[::step]
        fd.recv_into(target, 0)
        assert target.tolist() == [0, 1, 2]

    run_ranks(program, 2, backend=fake_groups)


def test_autograd_detects_that_a_receive_has_written() -> None:
    """Receiving into a tensor that a backward needs is an error of autograd, as on the CPU."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            fd.send(torch.ones(2), 1)
            return
        saved, weight = torch.full((2,), 3.0), torch.ones(2, requires_grad=True)
        product = (saved * weight).sum()
        fd.recv_into(saved, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    run_ranks(program, 2, backend=fake_groups)


def test_a_receive_from_a_rank_that_leaves_raises() -> None:
    """A receive from a rank that has closed the group raises PeerLostError at once."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            with pytest.raises(fd.PeerLostError):
                receive((2,), 1)
        else:
            group.close()

    run_ranks(program, 2, backend=fake_groups)


def test_threads_receive_by_tag() -> None:
    """Several threads, each with its own tag, receive their tensors in any order of sending."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            for tag in (3, 1, 2, 0):
                fd.send(torch.full((2,), float(tag)), 1, tag=tag)
            return
        got = {}

        def take(tag: int) -> None:
            tensor = torch.empty(2)
            fd.recv_into(tensor, 0, tag=tag, group=group)
            got[tag] = tensor.tolist()

        threads = [threading.Thread(target=take, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {tag: [tag] * 2 for tag in range(4)}

    run_ranks(program, 2, backend=fake_groups)


def test_the_header_of_an_impossible_tensor_is_refused() -> None:
    """A malformed header raises ProtocolError and allocates nothing."""

    def program(group: fd.Backend) -> None:
        if group.rank == 0:
            group.isend(_HEADER.pack(0, b"load", 1, *[1] * 12), 1, tag=_TAG)
            return
        with pytest.raises(fd.ProtocolError, match="impossible tensor"):
            receive((1,), 0)

    run_ranks(program, 2, backend=fake_groups)
