"""Boxes of ranks' shards: together every element once, and each with the right memory."""

import itertools
from math import prod

import pytest
import torch
from divided_tensors import divide
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrodist import DeviceMesh, DTensor, Partial, Replicate, Shard
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.tensor.box import Box
from ferrodist.tensor.local_shards import FlatShard, annotate_flat_shard, flat_shard_of, local_shard
from ferrodist.tensor.spec import sizes_before_axis


@st.composite
def layouts(draw):
    """A whole tensor's shape, a mesh's, and placements that fit both."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12]), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements = []
    for axis in range(len(mesh_shape)):
        kind = draw(st.integers(-1, len(shape) - 1))
        if kind == -1:
            placements.append(Replicate())
            continue
        sizes = sizes_before_axis(shape, placements, mesh_shape, axis, kind)
        blocks = [count for count in (1, 2, 3, 4) if not any(size % count for size in sizes)]
        placements.append(Shard(kind, draw(st.sampled_from(blocks))))
    return shape, mesh_shape, tuple(placements)


def distributed(whole, mesh_shape, placements):
    """Each rank's tensor, in memory of its own."""
    return [
        divide(whole, DeviceMesh(group, mesh_shape), placements)
        for group in SimulatedBackend.create_group(prod(mesh_shape))
    ]


def assert_views(part, whole, memory):
    """The boxes have the whole's elements, as views of the memory, and are as many as say."""
    assert part.shape == tuple(whole.shape)
    assert part.dtype == whole.dtype
    for box, view in part.boxes:
        assert tuple(view.shape) == box.shape
        assert torch.equal(view, box.take(whole))
        if view.numel():
            assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def count_elements(parts, shape):
    """Return the number of shards that have each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        for box, _ in part.boxes:
            box.take(counts).add_(1)
    return counts


def copies_of(mesh_shape, placements):
    """Return the number of ranks that have each element."""
    return prod(n for n, one in zip(mesh_shape, placements, strict=True) if isinstance(one, Replicate))


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_boxes_of_ranks_cover_the_tensor(case):
    """For any placements, blocks and nesting, also with uneven and empty shards."""
    shape, mesh_shape, placements = case
    whole = torch.arange(prod(shape)).reshape(shape)
    tensors = distributed(whole, mesh_shape, placements)
    parts = [local_shard(tensor) for tensor in tensors]
    for part, tensor in zip(parts, tensors, strict=True):
        assert_views(part, whole, tensor._local)
        assert sum(box.numel for box, _ in part.boxes) == tensor._local.numel()
        assert all(box.numel for box, _ in part.boxes)
        assert part.is_replicated == (copies_of(mesh_shape, placements) > 1)
    assert (count_elements(parts, shape) == copies_of(mesh_shape, placements)).all()


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_flat_shards_are_parts_of_their_tensor(case, data):
    """FSDP's flat shards of each rank's local tensor, cut anywhere."""
    shape, mesh_shape, placements = case
    whole = torch.arange(prod(shape)).reshape(shape)
    parts = []
    for tensor in distributed(whole, mesh_shape, placements):
        local = tensor._local
        cuts = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=4)))
        for start, stop in itertools.pairwise([0, *cuts, local.numel()]):
            flat = local.reshape(-1)[start:stop].clone()
            piece = FlatShard(
                shape=tuple(local.shape), start=start, spec=tensor._spec, num_shards=len(cuts) + 1, num_copies=1
            )
            annotate_flat_shard(flat, piece)
            assert flat_shard_of(flat) == piece
            parts.append(local_shard(flat))
            assert_views(parts[-1], whole, flat)
            assert sum(box.numel for box, _ in parts[-1].boxes) == stop - start
            assert all(box.numel for box, _ in parts[-1].boxes)
    assert (count_elements(parts, shape) == copies_of(mesh_shape, placements)).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_flat_shards_of_plain_tensors(sizes, data):
    """A row-major range is at most two boxes for each dim but the last, and one more, in order."""
    whole = torch.arange(prod(sizes)).reshape(sizes)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    flat = whole.reshape(-1)[start:stop].clone()
    annotate_flat_shard(flat, FlatShard(shape=tuple(sizes), start=start, spec=None, num_shards=2, num_copies=1))
    part = local_shard(flat)
    assert_views(part, whole, flat)
    assert [int(each) for _, view in part.boxes for each in view.reshape(-1)] == list(range(start, stop))
    assert len(part.boxes) <= 2 * max(0, len(sizes) - 1) + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=3))
def test_the_intersection_of_two_boxes(sides):
    """It has the elements that both boxes have."""
    one = Box(tuple(a for a, _, _, _ in sides), tuple(n for _, n, _, _ in sides))
    other = Box(tuple(b for _, _, b, _ in sides), tuple(m for _, _, _, m in sides))
    marks = [torch.zeros([8] * len(sides), dtype=torch.bool) for _ in range(2)]
    for box, mark in zip((one, other), marks, strict=True):
        box.take(mark).fill_(True)
    both = marks[0] & marks[1]
    common = one.intersect(other)
    if common is None:
        assert not both.any()
        return
    assert common == other.intersect(one)
    assert common.take(both).all()
    assert common.numel == int(both.sum())
    assert torch.equal(common.within(one).take(one.take(both)), common.take(both))


def test_a_plain_tensor_is_one_box():
    """Of any shape, also without dims or elements, detached from its graph."""
    for shape in [(), (0,), (3, 0, 2), (2, 3)]:
        tensor = torch.ones(shape, requires_grad=True)
        part = local_shard(tensor)
        assert [box for box, _ in part.boxes] == [Box((0,) * len(shape), shape)]
        assert not part.boxes[0][1].requires_grad
        assert part.is_replicated


def test_a_partial_tensor_is_refused():
    """No rank has an element of it."""
    group = SimulatedBackend.create_group(1)[0]
    tensor = DTensor.from_local(torch.ones(2), DeviceMesh(group, (1,)), [Partial()])
    with pytest.raises(ValueError, match="redistribute"):
        local_shard(tensor)
