"""Views of what ranks have in symmetric memory, one part behind the other."""

import gc
from pathlib import Path

import pytest
import torch

from ferrodist.backends.native.shared_view import ContiguousSharedView
from ferrodist.collectives.symmetric_memory import empty_with_views
from ferrodist.testing import run_ranks

PAGE = 4096


def num_mappings():
    return Path("/proc/self/maps").read_text().count("ferrodist-symmetric")


@pytest.mark.parametrize("backend", ["native-threads", "native"])
def test_a_view_shows_what_all_ranks_write_and_keeps_its_own_changes(backend):
    """Writes to it are visible to its rank only, until it is restored."""

    def program(group):
        own, (first, second) = empty_with_views(3 * PAGE, [(0, PAGE), (2 * PAGE, PAGE)], group=group)
        own.fill_(group.rank + 1)
        own[2 * PAGE :] += 10
        group.barrier()
        ranks = torch.arange(1, group.world_size + 1, dtype=torch.uint8).repeat_interleave(PAGE)
        assert torch.equal(first.tensor, ranks)
        assert torch.equal(second.tensor, ranks + 10)
        group.barrier()
        first.tensor.zero_()
        group.barrier()
        assert torch.equal(own[:PAGE], torch.full((PAGE,), group.rank + 1, dtype=torch.uint8))
        own += 1
        group.barrier()
        assert not first.tensor.any()
        first.restore()
        assert torch.equal(first.tensor, ranks + 1)

    run_ranks(program, 3, backend=backend)


def test_a_view_lives_as_long_as_a_tensor_in_it():
    """It is unmapped with the last one."""

    def program(group):
        before = num_mappings()
        own, (view,) = empty_with_views(PAGE, [(0, PAGE)], group=group)
        own.fill_(7)
        part = view.tensor[PAGE:].view(torch.int64)
        del view, own
        gc.collect()
        group.barrier()
        assert num_mappings() > before
        assert part.tolist() == [0x0707070707070707] * (PAGE // 8)
        group.barrier()
        del part
        gc.collect()
        return num_mappings() - before

    assert run_ranks(program, 2, backend="native") == [0, 0]


def test_errors_of_the_system_are_raised():
    """It raises the system's error."""
    with pytest.raises(OSError, match="mmap"):
        ContiguousSharedView(-2, [0], PAGE)


def test_backends_without_shared_memory_give_no_views():
    """There each rank's memory is its own."""

    def program(group):
        own, views = empty_with_views(PAGE, [(0, PAGE)], group=group)
        return own.shape, views

    assert run_ranks(program, 2) == [((PAGE,), [])] * 2
