"""Many operations of every kind at random, with more ranks than cores: each synchronisation path thousands of times."""

import itertools
import random

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks


def value(rank, step, size):
    """The tensor that ``rank`` contributes at ``step``."""
    return torch.arange(size, dtype=torch.float64) + 1000 * rank + step


def total(ranks, step, size):
    """The sum over ``ranks`` of what they contribute; exact in float64."""
    return sum(value(rank, step, size) for rank in ranks)


def check_reduce(group, rng, step):
    """A reduction of a random kind and size."""
    size = rng.choice([1, 7, 13, 14, 500, 9000])
    ranks = range(group.world_size)
    mine, expected = value(group.rank, step, size), total(ranks, step, size)
    kind, root = rng.randrange(4), rng.randrange(group.world_size)
    if kind == 0:
        assert torch.equal(fd.allreduce(mine, group=group), expected)
    elif kind == 1:
        result = fd.reduce(mine, root, group=group)
        assert torch.equal(result, expected if group.rank == root else torch.empty(0))
    elif kind == 2:
        sizes = fd.compute_shard_sizes(size, group.world_size)
        assert torch.equal(fd.reduce_scatter(mine, group=group), expected.split(sizes)[group.rank])
    else:
        assert torch.equal(fd.broadcast(mine, root, group=group), value(root, step, size))


def check_movement(group, rng, step):
    """A gathering or an all-to-all of random size."""
    size = rng.choice([1, 5, 40, 3000])
    if rng.random() < 0.5:
        joined = fd.all_gather(value(group.rank, step, size), group=group)
        assert torch.equal(joined, torch.cat([value(rank, step, size) for rank in range(group.world_size)]))
    else:
        parts = [value(group.rank, step + peer, size) for peer in range(group.world_size)]
        got = fd.all_to_all(parts, group=group)
        assert all(torch.equal(part, value(rank, step + group.rank, size)) for rank, part in enumerate(got))


def check_outstanding(group, rng, step):
    """Many started at once, waited for in another order."""
    sizes = [rng.choice([1, 20, 700]) for _ in range(rng.randrange(1, 12))]
    pending = [fd.async_allreduce(value(group.rank, step + i, size), group=group) for i, size in enumerate(sizes)]
    order = list(range(len(sizes)))
    random.Random(step + group.rank).shuffle(order)  # each rank waits in its own order
    for i in order:
        assert torch.equal(pending[i].wait(), total(range(group.world_size), step + i, sizes[i]))


def check_messages(group, rng, step):
    """Everyone sends to everyone, with random tags and sizes around the offer limit, in one batch."""
    size = rng.choice([1, 100, 40_000])
    tag = rng.randrange(3)
    peers = [peer for peer in range(group.world_size) if peer != group.rank]
    buffers = {peer: torch.empty(size, dtype=torch.float64) for peer in peers}
    sends = [fd.Send(value(group.rank, step + peer, size), peer, tag) for peer in peers]
    receives = [fd.Recv(buffers[peer], peer, tag) for peer in peers]
    work = sends + receives
    random.Random(step + group.rank).shuffle(work)
    fd.batch(work, group=group)
    assert all(torch.equal(buffers[peer], value(peer, step + group.rank, size)) for peer in peers)


def check_given_up(group, rng, step):
    """Receives given up again and again while their message is on its way: it arrives whole in the last."""
    data = bytes([step % 251]) * rng.choice([1, 1000, 300_000])
    right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    buffer = bytearray(len(data))
    request = group.irecv(buffer, left, tag=step)
    sending = group.isend(data, right, tag=step)
    for _ in range(rng.randrange(6)):
        if not request.cancel():
            break
        buffer = bytearray(len(data))
        request = group.irecv(buffer, left, tag=step)
    assert request.wait(20) == left
    assert sending.wait(20) == right
    assert buffer == data


CHECKS = (check_reduce, check_movement, check_outstanding, check_messages, check_given_up)


@pytest.mark.parametrize(
    ("backend", "world_size", "steps"),
    [
        ("simulated", 2, 1000),
        ("simulated", 7, 200),
        ("tcp-threads", 2, 1000),
        ("tcp-threads", 5, 150),
        ("tcp", 4, 500),
    ],
)
def test_random_program(backend, world_size, steps):
    """Thousands of random operations are exact on every rank, over the group and two overlapping sub-groups."""

    def program(group):
        rng = random.Random(world_size)
        low = fd.new_group(range(max(2, world_size - 1)))
        high = fd.new_group(range(world_size - 1, world_size - max(2, world_size - 1) - 1, -1))
        for step in range(steps):
            chosen = rng.choice([group, group, low, high])
            check = rng.choice(CHECKS)
            seed = rng.random()
            if chosen.is_member:  # else this rank goes on alone
                check(chosen, random.Random(seed), step)
        return group.world_size

    assert run_ranks(program, world_size, backend=backend, timeout=100) == [world_size] * world_size


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads"])
def test_abort_at_any_moment(backend):
    """An abort in the middle of random operations ends every rank with the same error, again and again."""

    def program(group, moment):
        rng = random.Random(moment)

        def forever():
            for step in itertools.count():
                if step == moment and group.rank == moment % group.world_size:
                    group.abort("that is enough")
                check_reduce(group, rng, step)

        with pytest.raises(fd.GroupAbortedError, match="that is enough") as caught:
            forever()
        return str(caught.value)

    for moment in range(40):
        messages = run_ranks(program, 3, moment, backend=backend, timeout=60)
        assert len(set(messages)) == 1
