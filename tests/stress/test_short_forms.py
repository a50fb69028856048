"""The programs of this folder, for a few seconds each."""

from __future__ import annotations

import gc

import pytest
from kills import KINDS, Kill, run_kill, run_kills
from rounds import WAYS, run_rounds
from soak import growth, run_soak


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_killed_ranks_are_named(kind: tuple[str, str]) -> None:
    """Each survivor's call, and each later one to ranks that live, names the rank that was killed, and no other."""
    counts = run_kills(2, 7, [kind], says=False)
    assert counts == {"right": 2}


@pytest.mark.parametrize("kind", [("tcp", "rpc"), ("native", "rpc"), ("tcp", "sub-groups")], ids=" ".join)
def test_rank_0_is_named_by_calls_among_others(kind: tuple[str, str]) -> None:
    """When rank 0 has been killed, which passes on what the others say, they name it and not each other."""
    kill = next(kill for seed in range(100) if (kill := Kill(*kind, seed)).victim == 0)
    outcome = run_kill(kill)
    assert outcome["kind"] == "right", outcome


@pytest.mark.parametrize("way", [way for way in WAYS if way[1] != "env"], ids=" by ".join)
def test_rounds_at_one_address(way: tuple[str, str]) -> None:
    """Groups are made and destroyed again and again, by faster and slower ranks; every round is right."""
    assert run_rounds(*way, rounds=8) == (8, "")


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_closed_groups_leave_no_objects(backend: str) -> None:
    """Groups, references and saves that failed go: Python knows of as much after many rounds as after some, and the
    heap has given out as much."""
    gc.collect()
    samples = run_soak(4.0, backend=backend, world_size=2, every=0.3)
    assert len(samples) >= 4
    assert growth(samples) == ""
