"""Checks of tensors and objects that go from rank to rank, and of objects in collectives."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.testing.conformance.collectives.oracle import COLLECTIVE_SLACK_SECONDS, check_bits, elements
from ferrodist.testing.conformance.harness import error_of

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_LARGE = 300_000  # elements: above what any transport takes without a receiver


def tensors_of_every_dtype(group: Backend) -> None:
    """Messages carry every dtype bit for bit, of any size and layout, with and without a shape given."""
    rank, last = group.rank, group.world_size - 1
    if last == 0:
        return
    for dtype in DTYPES:
        for count in (0, 1, 5, 240):
            whole = elements(dtype, count, 0, seed=count)
            tensor = whole.view(-1, 6).t() if count % 6 == 0 and count else whole
            if rank == 0:
                fd.send(tensor, last)
                fd.send(tensor, last)
                fd.send(tensor, last)
            elif rank == last:
                check_bits(fd.recv(tensor.shape, dtype, 0), tensor, "a tensor received by its shape")
                check_bits(fd.recv(None, None, 0), tensor, "a tensor received as it comes")
                into = torch.empty(tensor.shape, dtype=dtype)
                assert fd.recv_into(into, 0) == 0, "recv_into returned another rank than the sender"
                check_bits(into, tensor, "a tensor received into another")
    if rank == 0:
        fd.send(torch.tensor(2.5), last)
        fd.send(torch.arange(_LARGE).view(-1, 2), last)
    elif rank == last:
        check_bits(fd.recv((), torch.float32, 0), torch.tensor(2.5), "a number")
        into = torch.empty(2, _LARGE // 2, dtype=torch.int64).t()
        fd.recv_into(into, fd.ANY_SOURCE)
        check_bits(into, torch.arange(_LARGE).view(-1, 2), "a large tensor received into a transposed one")


def sizes_around_the_inline_limit(group: Backend) -> None:
    """Tensors of every dtype with elements just below, at, and just above the limit of one message arrive in order."""
    rank, last, limit = group.rank, group.world_size - 1, group.inline_limit
    if last == 0:
        return
    tensors = [elements(torch.uint8, size, 0, seed=size) for size in (1, 7, limit - 1, limit, limit + 1) if size > 0]
    for dtype in DTYPES:
        most = limit // dtype.itemsize
        tensors += [elements(dtype, count, 0, seed=count) for count in (most - 1, most, most + 1) if count > 0]
    if rank == 0:
        for tensor in tensors:
            fd.send(tensor, last, tag=3)
        fd.batch([fd.Send(tensor, last, tag=4) for tensor in tensors])
        return
    if rank == last:
        for tensor in tensors:
            check_bits(fd.recv(None, None, 0, tag=3), tensor, "a tensor around the inline limit")
        found = [torch.empty_like(tensor) for tensor in tensors]
        fd.batch([fd.Recv(into, 0, tag=4) for into in found])
        for into, tensor in zip(found, tensors, strict=True):
            check_bits(into, tensor, "a tensor of a batch around the inline limit")


def tags_keep_messages_apart(group: Backend) -> None:
    """A receive takes the first tensor with its tag; those of one tag stay in order, small and large mixed."""
    rank, last = group.rank, group.world_size - 1
    if last == 0:
        return
    order = [(7, 3), (0, 4), (7, _LARGE), (2**56 - 1, 2), (7, 5)]
    if rank == 0:
        fd.batch([fd.Send(torch.full((count,), float(i)), last, tag) for i, (tag, count) in enumerate(order)])
    elif rank == last:
        for tag in (2**56 - 1, 0, 7):
            for i, (sent_tag, count) in enumerate(order):
                if sent_tag == tag:
                    received = fd.recv(None, None, 0, tag=tag)
                    check_bits(received, torch.full((count,), float(i)), f"tensor {i}, with tag {tag}")


def any_source_takes_what_comes(group: Backend) -> None:
    """Receives from ANY_SOURCE get one tensor of each sender, and return the sender."""
    rank, p = group.rank, group.world_size
    if p == 1:
        return
    for tag, count in ((4, 3), (5, _LARGE)):
        if rank == 0:
            senders = set()
            for _ in range(p - 1):
                into = torch.empty(count)
                sender = fd.recv_into(into, fd.ANY_SOURCE, tag=tag)
                check_bits(into, torch.full((count,), float(sender)), "what came from any source")
                senders.add(sender)
            assert senders == set(range(1, p)), f"tensors of ranks 1 to {p - 1} came from {senders}"
        else:
            fd.send(torch.full((count,), float(rank)), 0, tag=tag)


def every_receive_tells_the_sender(group: Backend) -> None:
    """Every receive from ANY_SOURCE can return the sender: recv, sendrecv, recv_object and batch."""
    rank, p = group.rank, group.world_size
    if p == 1:
        return
    right, left = (rank + 1) % p, (rank - 1) % p
    mine = torch.full((3,), float(rank))
    came, sender = fd.sendrecv(mine, right, (3,), fd.ANY_SOURCE, return_source=True)
    assert sender == left, f"rank {left} sent, sendrecv says {sender}"
    check_bits(came, torch.full((3,), float(left)), "sendrecv from any rank")
    into = torch.empty(3)
    peers = fd.batch([fd.Recv(into, fd.ANY_SOURCE, 1), fd.Send(mine, right, 1)])
    assert peers == [left, right], f"rank {left} sent and rank {right} received, batch says {peers}"
    if rank:
        fd.send(mine, 0, tag=2)
        fd.send_object({"rank": rank}, 0, tag=3)
        return
    tensors = [fd.recv(None, None, fd.ANY_SOURCE, tag=2, return_source=True) for _ in range(p - 1)]
    assert {sender for _, sender in tensors} == set(range(1, p)), f"recv says {[sender for _, sender in tensors]}"
    for tensor, sender in tensors:
        check_bits(tensor, torch.full((3,), float(sender)), "what came from any source")
    objects = [fd.recv_object(fd.ANY_SOURCE, tag=3, return_source=True) for _ in range(p - 1)]
    assert sorted(sender for _, sender in objects) == list(range(1, p)), f"recv_object says {objects}"
    assert all(value == {"rank": sender} for value, sender in objects), f"recv_object mixed up senders: {objects}"


def rings_and_batches(group: Backend) -> None:
    """A sendrecv around a ring, and batches in which all ranks send to all, don't block, however large."""
    rank, p = group.rank, group.world_size
    if p == 1:
        return
    right, left = (rank + 1) % p, (rank - 1) % p
    for count in (1, 100, _LARGE):
        mine = torch.full((count,), float(rank))
        check_bits(fd.sendrecv(mine, right, (count,), left), torch.full((count,), float(left)), "sendrecv in a ring")
        target = torch.empty(count)
        came, source = fd.sendrecv(mine, right, None, left, out=target, return_source=True)
        assert came is target, "sendrecv returns out"
        assert source == left, f"rank {left} sent, sendrecv says {source}"
        check_bits(target, torch.full((count,), float(left)), "sendrecv with out= in a ring")
        came = fd.sendrecv(mine, right, None, fd.ANY_SOURCE, tag=9)
        check_bits(came, torch.full((count,), float(left)), "sendrecv from any rank")
        others = [peer for peer in range(p) if peer != rank]
        into = {peer: [torch.empty(count), torch.empty(2)] for peer in others}
        operations: list[fd.Send | fd.Recv] = []
        for peer in others:
            operations += [fd.Recv(into[peer][0], peer), fd.Send(mine, peer)]
            operations += [fd.Send(torch.full((2,), -1.0 - rank), peer, 0), fd.Recv(into[peer][1], peer, 0)]
        fd.batch(operations)
        for peer in others:
            check_bits(into[peer][0], torch.full((count,), float(peer)), "the first of a batch")
            check_bits(into[peer][1], torch.full((2,), -1.0 - peer), "the second of a batch")
    fd.batch([])


def wrong_shapes_are_said(group: Backend) -> None:
    """A tensor of another shape or dtype raises SizeMismatchError; sender and group go on, the next message arrives."""
    rank, last = group.rank, group.world_size - 1
    if last == 0:
        return
    for count in (6, _LARGE):
        if rank == 0:
            for _ in range(3):
                fd.send(torch.arange(float(count)), last, timeout=group.timeout)
            fd.send(torch.ones(2), last)
        elif rank == last:
            error = error_of(fd.SizeMismatchError, lambda: fd.recv((4,), torch.float32, 0), "recv of another shape")
            assert error.ranks == (0,), f"the sender of a wrong shape is {error.ranks}"
            for shape in (f"({count},)", "(4,)"):
                assert shape in error.message, f"both shapes belong in {error.message!r}"
            wrong = torch.empty(count, dtype=torch.int32)
            error_of(fd.SizeMismatchError, functools.partial(fd.recv_into, wrong, 0), "recv of another dtype")
            error_of(fd.SizeMismatchError, lambda: fd.recv(None, torch.bfloat16, 0), "recv of another dtype")
            check_bits(fd.recv((2,), torch.float32, 0), torch.ones(2), "a tensor after wrong ones")
        check_bits(fd.allreduce(torch.ones(3)), torch.full((3,), float(last + 1)), "an allreduce after wrong shapes")


def late_messages(group: Backend) -> None:
    """A receive without a message times out, leaves its tensor unchanged, and may be repeated."""
    rank, last = group.rank, group.world_size - 1
    if last == 0:
        return
    for count in (5, _LARGE):
        fd.barrier()
        if rank == last:
            into = torch.zeros(count)
            recv = functools.partial(fd.recv_into, into, 0, timeout=0.05)
            late = error_of(fd.DistributedTimeoutError, recv, "a recv of nothing")
            assert late.ranks == (0,), f"a recv from rank 0 waited for {late.ranks}"
            assert not into.any(), "a recv that failed wrote to its tensor"
            fd.barrier()
            fd.recv_into(into, 0)
            check_bits(into, torch.ones(count), "a tensor that came after a first try")
        else:
            fd.barrier()
            if rank == 0:
                fd.send(torch.ones(count), last)
    error_of(fd.DistributedTimeoutError, lambda: fd.recv(None, None, fd.ANY_SOURCE, timeout=0), "a recv of nothing")
    fd.barrier(timeout=group.timeout + COLLECTIVE_SLACK_SECONDS)


@dataclass
class _Point:
    x: int
    y: float


def objects_in_collectives(group: Backend) -> None:
    """Plain data of all kinds and sizes comes out of the object collectives equal, from every root."""
    p, rank = group.world_size, group.rank

    def value_of(r: int) -> dict[str, Any]:
        return {"rank": r, "text": "é" * (r * 50), "list": [None, True, r / 3, -(2**63)], "bytes": bytes(r * 1000)}

    assert fd.all_gather_object(value_of(rank)) == [value_of(r) for r in range(p)], "all_gather_object changed objects"
    for root in range(p):
        assert fd.broadcast_object(value_of(rank), root) == value_of(root), f"broadcast_object from {root}"
        gathered = fd.gather_object(value_of(rank), root)
        assert gathered == ([value_of(r) for r in range(p)] if rank == root else None), f"gather_object to {root}"
        values = [value_of(r) for r in range(p)] if rank == root else None
        assert fd.scatter_object(values, root) == value_of(rank), f"scatter_object from {root}"
    assert fd.broadcast_object(None) is None, "None does not come through"
    assert fd.broadcast_object((1, (2,))) == [1, [2]], "a tuple does not come as a list"
    assert fd.all_gather_object(_Point(rank, 0.5)) == [{"x": r, "y": 0.5} for r in range(p)], "a dataclass as a dict"


def objects_by_pickle(group: Backend) -> None:
    """With allow_pickle objects keep their types; without it the receiver refuses a pickle, and no code runs."""
    p, rank = group.world_size, group.rank
    value = {"tuple": (1, 2), "complex": 1j, "point": _Point(rank, 0.5)}
    everyone = fd.all_gather_object(value, allow_pickle=True)
    assert everyone == [{**value, "point": _Point(r, 0.5)} for r in range(p)], "pickled objects changed"
    error_of(TypeError, lambda: fd.all_gather_object({1, 2j}), "all_gather_object of a complex number")
    trusting = rank == 0
    if p > 1 and not trusting:
        error_of(fd.ProtocolError, lambda: fd.broadcast_object(None, 0), "broadcast_object of a pickle")
    else:
        assert fd.broadcast_object(1j, 0, allow_pickle=True) == 1j, "the root's own object changed"
    fd.barrier()


def objects_from_rank_to_rank(group: Backend) -> None:
    """send_object and recv_object carry plain data, with tags, from a named rank or any."""
    rank, last = group.rank, group.world_size - 1
    if last == 0:
        return
    if rank == 0:
        fd.send_object({"a": [1, "b"]}, last, tag=3)
        fd.send_object("first", last)
        fd.send_object(2j, last, allow_pickle=True, tag=5)
        fd.send_object(2j, last, allow_pickle=True, tag=5)
        fd.send(torch.tensor([255, 7], dtype=torch.uint8), last, tag=6)
    elif rank == last:
        assert fd.recv_object(0) == "first", "recv_object took an object of another tag"
        assert fd.recv_object(fd.ANY_SOURCE, tag=3) == {"a": [1, "b"]}, "an object changed"
        assert fd.recv_object(0, tag=5, allow_pickle=True) == 2j, "a pickled object changed"
        error_of(fd.ProtocolError, lambda: fd.recv_object(0, tag=5), "recv_object of a pickle")
        error_of(fd.ProtocolError, lambda: fd.recv_object(0, tag=6), "recv_object of bytes that are no object")
    fd.barrier()
