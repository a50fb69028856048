"""The zigzag layout: `context_shard` and `context_unshard`."""

import pytest
import torch

import ferrodist as fd
from ferrodist.parallel.context_parallel.layout import chunks_of, segments_of
from ferrodist.testing import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 24])
def test_unshard_undoes_shard(num_ranks, length):
    """Every token comes back to its place, whatever the length."""
    x = torch.randn(2, length, 3)
    for joined in run_ranks(lambda group: fd.context_unshard(fd.context_shard(x, 1, group), -2, group), num_ranks):
        assert torch.equal(joined, x)


def test_ranks_have_an_early_and_a_late_chunk():
    """The layout that the module's text shows."""
    parts = run_ranks(lambda group: fd.context_shard(torch.arange(12), 0, group).tolist(), 3)
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_both_are_differentiable():
    """A loss of the whole sequence on each rank: its gradients reach the ranks' parts, added up."""
    x = torch.randn(2, 7, dtype=torch.float64)

    def program(group):
        whole = x.clone().requires_grad_()
        joined = fd.context_unshard(fd.context_shard(whole, 1, group), 1, group)
        (joined * torch.arange(7) * (group.rank + 1)).sum().backward()
        return whole.grad

    assert torch.equal(sum(run_ranks(program, 2)), torch.arange(7.0).double().expand(2, 7) * 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bounds", [(0, 13), (0, 4, 4, 5, 13), (0, 0, 13, 13), (0, *range(1, 14))])
def test_segments_are_the_documents_of_the_chunks(num_ranks, bounds):
    """Each token is in one segment, with its own position and document."""
    positions, documents = torch.arange(13), torch.bucketize(torch.arange(13), torch.tensor(bounds[1:]), right=True)
    for rank in range(num_ranks):
        part = torch.cat([positions[start:stop] for start, stop in chunks_of(13, num_ranks, rank)])
        segments = segments_of(bounds, num_ranks, rank)
        assert [i for each in segments for i in range(each.start, each.stop)] == list(range(len(part)))
        for each in segments:
            assert part[each.start : each.stop].tolist() == list(
                range(each.position, each.position + each.stop - each.start)
            )
            assert set(documents[part[each.start : each.stop]].tolist()) == {each.document}


def test_parts_of_another_layout_are_refused_on_all_ranks():
    """Three ranks of which one has the right number of tokens: it must not go on alone."""

    def program(group):
        with pytest.raises(
            ValueError, match=r"\[5, 4, 3\] tokens, and of a sequence of 12 they should have \[4, 4, 4\]"
        ):
            fd.context_unshard(torch.ones(1, 5 - group.rank), 1, group)
        error = (IndexError, "dim 3") if group.rank == 1 else (fd.CollectiveMismatchError, "rank 1 are wrong")
        with pytest.raises(error[0], match=error[1]):
            fd.context_unshard(torch.ones(1, 4), 3 if group.rank == 1 else 1, group)
        with pytest.raises(fd.CollectiveMismatchError, match="the ranks' arguments differ"):
            fd.context_unshard(torch.ones(1 + group.rank, 4), 1, group)

    run_ranks(program, 3)


def test_shard_refuses_what_has_no_such_dim():
    """The error names the argument."""
    with fd.use_group(fd.SimulatedBackend.create_group(1)[0]):
        with pytest.raises(IndexError, match="dim 2 is not a dim"):
            fd.context_shard(torch.ones(2, 2), 2)
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
            fd.context_shard([1])


def test_dtensors_are_refused():
    """Each rank would take its tokens of another tensor."""

    def program(group):
        x = fd.distribute(torch.arange(8)[None], fd.DeviceMesh(group, (2,), ("context",)), fd.Shard(1))
        with pytest.raises(TypeError, match=r"x is a DTensor, and context_shard takes .* pass its full_tensor\(\)"):
            fd.context_shard(x, 1, group)
        with pytest.raises(TypeError, match="x is a DTensor, and context_unshard takes"):
            fd.context_unshard(x, 1, group)
        with pytest.raises(TypeError, match=r"batch\['input_ids'\] is a DTensor"):
            fd.context_shard_batch({"input_ids": x}, group)

    run_ranks(program, 2)
