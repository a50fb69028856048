"""Traps that collectives must not fall into: each test is a way in which one once could."""

import contextvars
import threading

import numpy as np
import pytest
import torch

import ferrodist as fd
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.native import is_native_available
from ferrodist.collectives.engines.reference import ReferenceEngine
from ferrodist.testing import run_ranks

_NATIVE = pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")


def test_coalesced_sizes_are_compared():
    """Blocks with the same total but other parts raise on every rank, and never mix up elements."""

    def program(group):
        small, large = torch.full((2,), 1.0), torch.full((3,), 10.0)
        order = [small, large] if group.rank == 0 else [large, small]
        with fd.coalesce():
            pending = [fd.async_allreduce(tensor) for tensor in order]
        for handle in pending:
            with pytest.raises(fd.CollectiveMismatchError, match=r"allreduce\[2\]"):
                handle.wait()

    run_ranks(program, 2)


def test_coalesced_operations_on_one_tensor_run_in_order():
    """An operation whose input is an earlier one's output sees the result, as without the block."""

    def program(group):
        twice, mixed = torch.ones(2), torch.full((2,), float(group.rank))
        with fd.coalesce():
            pending = [fd.async_allreduce(twice, out=twice) for _ in range(2)]
            pending += [fd.async_broadcast(mixed, 1, out=mixed), fd.async_allreduce(mixed, out=mixed)]
        for handle in pending:
            handle.wait()
        return twice.tolist(), mixed.tolist()

    assert run_ranks(program, 2) == [([4.0, 4.0], [2.0, 2.0])] * 2


def test_waiting_inside_a_coalesce_block_is_refused():
    """A handle of the block can't be waited for before the block has ended: an error, not a hang."""

    def program(group):
        with fd.coalesce():
            pending = fd.async_allreduce(torch.ones(2))
            with pytest.raises(RuntimeError, match="after the block"):
                pending.wait()
        assert pending.wait().tolist() == [2.0, 2.0]

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["simulated", pytest.param("native-threads", marks=_NATIVE)])
def test_a_context_copied_in_a_coalesce_block_is_refused_after_it(backend):
    """What an asyncio task made in a block starts after its end is an error, not an operation that nobody sends."""

    def program(group):
        with fd.coalesce():
            copy = contextvars.copy_context()
            pending = fd.async_allreduce(torch.ones(2))
            inside = copy.run(fd.async_allreduce, torch.ones(2))
        for call in (
            lambda: fd.async_allreduce(torch.ones(2)),
            lambda: fd.allreduce(torch.ones(2)),
            lambda: fd.coalesce().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="that has ended"):
                copy.run(call)
        return pending.wait().tolist(), inside.wait().tolist()

    assert run_ranks(program, 2, backend=backend) == [([2.0, 2.0], [2.0, 2.0])] * 2


def test_the_timeout_of_a_coalesced_operation_holds_for_its_block():
    """A rank that does not come to the block is late after the smallest timeout in it, not after the group's."""

    def program(group):
        if group.rank == 0:
            with fd.coalesce():
                pending = [fd.async_allreduce(torch.ones(2), timeout=timeout) for timeout in (30, 0.05)]
            for handle in pending:
                with pytest.raises(fd.DistributedTimeoutError, match=r"of 0\.05 s allowed"):
                    handle.wait(20)
        else:
            with pytest.raises(fd.DistributedTimeoutError, match=r"rank 1 has not called it"):
                group.recv(bytearray(1), 0, timeout=20)

    run_ranks(program, 2)


class _TimedCollectives(ReferenceEngine):
    """Keeps the timeouts of its allreduces."""

    def __init__(self, group):
        super().__init__(group)
        self.timeouts = []

    def run(self, op, sequence):
        if op.kind == "allreduce":
            self.timeouts.append(op.timeout)
        return super().run(op, sequence)


def test_coalesced_operations_travel_as_one_whatever_their_timeouts():
    """Ranks join the same operations though each has other timeouts; the smallest holds for all of them."""

    def program(group):
        group.use_engine("cpu", _TimedCollectives(group))
        with fd.coalesce():
            pending = [fd.async_allreduce(torch.ones(2), timeout=timeout) for timeout in (30 + group.rank, 30, 40)]
        for handle in pending:
            assert handle.wait().tolist() == [2.0, 2.0]
        return group.engine("cpu").timeouts

    assert run_ranks(program, 2) == [[30.0], [30.0]]


def test_blocks_whose_tensors_share_memory_on_one_rank_are_told_apart():
    """Ranks that can't join the same operations all raise, and say which would have travelled together."""

    def program(group):
        first, second = torch.ones(2), torch.ones(2)
        with fd.coalesce():
            pending = [fd.async_allreduce(first, out=first)]
            pending += [fd.async_allreduce(second if group.rank else first)]
        for handle in pending:
            with pytest.raises(fd.CollectiveMismatchError) as caught:
                handle.wait()
            assert "rank 0: allreduce[2], allreduce[2]; rank 1: allreduce[2]+allreduce[2]" in caught.value.message
            assert caught.value.ranks == (1,)

    run_ranks(program, 2)


def test_operations_started_from_many_threads_keep_one_order():
    """Threads that start operations of one kind on one group at the same time never block each other's ranks."""

    def program(group):
        def work():
            with fd.use_group(group):
                for _ in range(100):
                    assert fd.async_allreduce(torch.ones(50), timeout=20).wait()[0] == 2

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert group.failure is None

    for backend in ("simulated", "tcp-threads"):
        run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize("call", [fd.allreduce, fd.broadcast, fd.all_gather, fd.reduce_scatter, fd.reduce])
def test_empty_expanded_tensors_pass(call):
    """Tensors of no elements pass whatever their strides, and so does backward through their sum."""

    def program(group):
        assert call(torch.zeros(1).expand(0)).numel() == 0
        tensor = torch.zeros(0, requires_grad=True)
        call(tensor).sum().backward()
        assert tensor.grad.shape == (0,)

    run_ranks(program, 2)


def test_single_elements_of_expanded_tensors_pass():
    """One element counts as contiguous whatever its stride; the gradient of a sum is such a tensor."""

    def program(group):
        one = torch.full((), 2.0).expand(1)
        for call in (fd.allreduce, fd.broadcast, fd.all_gather, fd.reduce):
            call(one)
        tensor = torch.ones(group.world_size, requires_grad=True)
        fd.reduce_scatter(tensor).sum().backward()
        return tensor.grad.tolist()

    assert run_ranks(program, 2) == [[1.0, 1.0]] * 2


def test_second_derivative_with_a_root_is_refused():
    """Only the root has a second derivative, so ranks could not take part alike: an error on the rank that asks."""

    def program(group):
        tensor = torch.ones(3, requires_grad=True)
        result = fd.reduce(tensor * tensor, 1)
        (first,) = torch.autograd.grad((result**3).sum(), tensor, create_graph=True)
        if group.rank == 1:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                first.sum().backward()
        assert first.tolist() == [24.0] * 3  # d/dx (2 x^2)^3 at 1: 3 * (2)^2 * 2x

    run_ranks(program, 2)


@pytest.mark.parametrize("call", [fd.gather, fd.all_gather_uneven])
def test_other_dims_are_found(call):
    """Ranks that join along different dims raise, where the sizes alone would agree."""

    def program(group):
        with pytest.raises(fd.CollectiveMismatchError, match="dim"):
            call(torch.ones(2, 2), dim=group.rank)

    run_ranks(program, 2)


def test_overlap_is_found_across_storages():
    """Inputs and outputs over one array's memory are right even when torch sees two storages."""

    def program(group):
        memory = np.arange(2000.0)
        whole, part = torch.from_numpy(memory), torch.from_numpy(memory[500:1500])
        expected = torch.cat([part.clone()] * 2)
        assert torch.equal(fd.all_gather(part, out=whole), expected)

    run_ranks(program, 2)


def test_autograd_learns_of_elements_that_were_received():
    """A tensor that autograd has saved and a collective has overwritten is an error in backward."""

    def program(group):
        for size in (10, 1000):
            for write in (
                lambda x: fd.broadcast(x, 0, out=x),
                lambda x: fd.allreduce(x, out=x),
                lambda x: fd.recv_into(x, 0) if group.rank else fd.send(x.clone(), 1),
            ):
                weight, data = torch.ones(size, requires_grad=True), torch.ones(size)
                loss = (weight * data).sum()
                write(data)
                if group.rank == 1:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()

    run_ranks(program, 2)


def test_endless_waits_are_allowed():
    """An infinite or huge timeout of wait() is a wait, not an overflow."""

    def program(group):
        if group.rank == 0:
            group.recv(bytearray(1), 1)  # rank 1's operation is under way while it waits
        else:
            pending = fd.async_allreduce(torch.ones(1))
            with pytest.raises(fd.DistributedTimeoutError):
                pending.wait(0)
            group.send(b"x", 0)
            return pending.wait(1e30).tolist()
        return fd.async_allreduce(torch.ones(1)).wait(float("inf")).tolist()

    assert run_ranks(program, 2) == [[2.0]] * 2


def test_handles_that_raise_keep_no_frames():
    """Waiting again for a failed operation raises a fresh error each time."""

    def program(group):
        pending = fd.async_allreduce(torch.ones(1), timeout=0.1) if group.rank else None
        if pending is None:
            group.abort("over")
            return
        errors = []
        for _ in range(3):
            with pytest.raises(fd.DistributedError) as caught:
                pending.wait()
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3

    run_ranks(program, 2)


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads"])
def test_a_send_given_up_leaves_its_tag_usable(backend):
    """After a large send has timed out, the next tensor with that tag arrives: the one given up is not waited for."""

    def program(group):
        large = torch.arange(200_000.0)
        if group.rank == 0:
            for _ in range(2):
                with pytest.raises(fd.DistributedTimeoutError):
                    fd.send(large, 1, timeout=0.05)
            fd.barrier()
            fd.send(large + 1, 1, timeout=20)
            fd.barrier()
            with pytest.raises(fd.DistributedTimeoutError):
                fd.send(large, 1, timeout=0.3)  # while the receiver is already waiting for another tensor
            fd.send(torch.ones(3), 1, tag=5)
            return None
        fd.barrier()
        first = fd.recv(None, None, 0, timeout=20)
        fd.barrier()
        return first[0].item(), fd.recv((3,), None, 0, tag=5, timeout=20).tolist()

    assert run_ranks(program, 2, backend=backend)[1] == (1.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads"])
def test_a_receive_given_up_after_its_head_loses_nothing(backend):
    """A receive that gives up between a tensor's head and its elements leaves both for the next one, in order."""

    def program(group):
        large = torch.arange(300_000.0)
        if group.rank == 0:
            for i in range(6):
                fd.send(large + i, 1, timeout=30)
            return None
        got = []
        while len(got) < 6:
            try:
                got.append(fd.recv(None, None, 0 if len(got) % 2 else fd.ANY_SOURCE, timeout=0.0005)[0].item())
            except fd.DistributedTimeoutError:
                continue
        with pytest.raises(fd.DistributedTimeoutError):
            fd.recv(None, None, 0, timeout=0.05)
        return got

    for _ in range(5):
        assert run_ranks(program, 2, backend=backend)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "wrong",
    [
        fd.Send(torch.ones(1), 7),
        fd.Send(torch.ones(1), 1, tag=-1),
        fd.Send(torch.ones([1] * 13), 1),
        fd.Recv(torch.ones([1] * 13), 1),
        fd.Recv(torch.ones(1).expand(2), 1),
    ],
    ids=["rank", "tag", "sent dims", "received dims", "shared memory"],
)
def test_a_batch_with_a_wrong_member_sends_nothing(wrong):
    """All of a batch is checked before any of it goes out."""

    def program(group):
        if group.rank == 0:
            with pytest.raises(ValueError):
                fd.batch([fd.Send(torch.ones(1), 1), wrong])
            fd.send(torch.zeros(1), 1)
            return None
        return fd.recv(None, None, 0).item()

    assert run_ranks(program, 2)[1] == 0.0


def test_any_number_of_sends_may_be_given_up_before_one_arrives():
    """A receive passes over hundreds of large tensors whose sends gave up, and takes the one behind them."""
    large = torch.ones(EAGER_LIMIT // 4 + 1)

    def program(group):
        if group.rank == 0:
            for _ in range(400):
                with pytest.raises(fd.DistributedTimeoutError):
                    fd.send(large, 1, timeout=0)
            group.send(b"x", 1)
            fd.send(torch.full((3,), 7.0), 1)
            return None
        group.recv(bytearray(1), 0)
        return fd.recv(None, None, 0, timeout=20).tolist()

    assert run_ranks(program, 2)[1] == [7.0] * 3


_TAKERS = {
    "recv": lambda src: fd.recv((3,), torch.float32, src, timeout=20),
    "recv_into": lambda src: (tensor := torch.empty(3), fd.recv_into(tensor, src, timeout=20))[0],
    "sendrecv": lambda src: fd.sendrecv(torch.ones(1), 0, (3,), src, timeout=20),
    "batch": lambda src: (tensor := torch.empty(3), fd.batch([fd.Recv(tensor, src)], timeout=20))[0],
}


@pytest.mark.parametrize("take", _TAKERS)
@pytest.mark.parametrize(
    "backend", ["simulated", "tcp-threads", pytest.param("native", marks=_NATIVE), pytest.param("gloo", marks=_NATIVE)]
)
def test_what_a_send_gave_up_is_no_mismatch_for_the_next_receive(backend, take):
    """A receive passes over tensors of another shape or dtype whose sends gave up, and takes the one behind them."""

    def program(group):
        if group.rank == 0:
            for large in (torch.ones(600_000), torch.ones(3_000, dtype=torch.float64), torch.ones(2, 200_000)):
                with pytest.raises(fd.DistributedTimeoutError):
                    fd.send(large.repeat(100) if large.dim() == 1 else large, 1, timeout=0.02)
            fd.send(torch.ones(3), 1, tag=9)
            for value in (5.0, 6.0):
                fd.send(torch.full((3,), value), 1, timeout=20)
            if take == "sendrecv":
                fd.recv(None, None, 1, timeout=20)
                fd.recv(None, None, 1, timeout=20)
            return None
        fd.recv((3,), None, 0, tag=9, timeout=20)
        return [_TAKERS[take](src).tolist() for src in (0, fd.ANY_SOURCE)]

    assert run_ranks(program, 2, backend=backend)[1] == [[5.0] * 3, [6.0] * 3]


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", pytest.param("native", marks=_NATIVE)])
def test_a_tensor_of_another_shape_is_refused_while_its_send_waits(backend):
    """A receive of another shape raises at once and lets the sender of the large tensor go on."""

    def program(group):
        if group.rank == 0:
            fd.send(torch.ones(2_000_000), 1, timeout=20)
            fd.send(torch.ones(3), 1, timeout=20)
            return None
        with pytest.raises(fd.SizeMismatchError, match=r"rank 0 .* sent a torch.float32 tensor of shape \(2000000,\)"):
            fd.recv((3,), None, 0, timeout=20)
        return fd.recv((3,), None, 0, timeout=20).tolist()

    assert run_ranks(program, 2, backend=backend)[1] == [1.0] * 3


def test_a_block_that_can_not_start_ends_its_handles(monkeypatch):
    """Such as one whose group gets no thread: a wait raises that error, and not that the block has not ended."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def program(group):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(fd.DistributedError, match="no more threads"), fd.coalesce():
            pending = fd.async_allreduce(torch.ones(2))
        monkeypatch.undo()
        with pytest.raises(fd.DistributedError, match="no more threads"):
            pending.wait()

    run_ranks(program, 1)
