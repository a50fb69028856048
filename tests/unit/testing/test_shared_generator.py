"""Ranks that are threads share torch's random generator: setting its seed gives a warning."""

import warnings

import pytest
import torch

from ferrodist.errors import RankFailedError
from ferrodist.testing import ranks, run_ranks

TOLD = r"torch\.manual_seed was called by ranks that are threads, .* torch\.Generator .* processes"


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch):
    """Each test begins as a process does, with a seed that no test sets."""
    monkeypatch.setattr(ranks, "_has_warned_of_shared_generator", False)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        yield


def seeded(group):
    """A program that expects equal numbers on all ranks."""
    torch.manual_seed(7)
    group.barrier()
    return torch.randn(1).item()


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads"])
def test_a_seed_set_by_threads_warns_once(backend):
    """The first run warns, with the line that called it; later ones don't."""
    with pytest.warns(UserWarning, match=TOLD) as caught:
        run_ranks(seeded, 2, backend=backend)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(12345)
        run_ranks(seeded, 2, backend=backend)


def test_a_failing_run_warns_too():
    """Differing numbers are often why: the failure stays what is raised, even where warnings are errors."""

    def program(group):
        seeded(group)
        raise ValueError("the ranks' parameters differ")

    with pytest.warns(UserWarning, match=TOLD), pytest.raises(RankFailedError):
        run_ranks(program, 2)
    ranks._has_warned_of_shared_generator = False
    torch.manual_seed(12345)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailedError, match="parameters differ"):
            run_ranks(program, 2)


@pytest.mark.parametrize(("world_size", "backend"), [(1, "simulated"), (2, "tcp"), (2, "native")])
def test_ranks_with_a_generator_each_are_not_warned(world_size, backend):
    """Processes have a generator each, and so has one rank; equal seeds give equal numbers there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(set(run_ranks(seeded, world_size, backend=backend))) == 1


def test_runs_that_only_draw_are_not_warned():
    """To draw from the shared generator is what most tests do."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(lambda group: torch.randn(2) + group.rank, 2)
