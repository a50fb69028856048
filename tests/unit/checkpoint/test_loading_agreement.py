"""Loading by ranks that pass different things, of very many files, and into tensors of inference mode."""

from __future__ import annotations

import math
import resource
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrodist as fd
from ferrodist.checkpoint import AsyncCheckpointer, DistCheckpointError, PerRank, load_distributed, save_distributed
from ferrodist.checkpoint.storage import local
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.errors import CollectiveMismatchError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ferrodist.backends.base import Backend


def test_ranks_with_different_paths(tmp_path: Path) -> None:
    """As when each names it by its own clock: both are told, and no rank reads or writes another checkpoint."""
    for rank in range(2):
        save_distributed({"a": torch.full((3,), float(rank))}, tmp_path / f"{rank}")

    def program(group: Backend) -> None:
        own = tmp_path / f"{group.rank}"
        with pytest.raises(DistCheckpointError, match=r"one path, and rank 0 has .*/0, rank 1 .*/1"):
            load_distributed(own, group=group, verify=False)
        with pytest.raises(DistCheckpointError, match="one path"):
            save_distributed({"a": PerRank(torch.ones(3))}, own, group=group)
        with (
            AsyncCheckpointer(tmp_path, group=group) as checkpointer,
            pytest.raises(DistCheckpointError, match="one path"),
        ):
            checkpointer.save_async({"a": torch.ones(3)}, group.rank)

    run_ranks(program, 2)


def test_ranks_of_which_one_would_read_for_all(tmp_path: Path) -> None:
    """Both are told by the argument's name, before they wait for each other's data."""
    save_distributed({"a": torch.ones(3)}, tmp_path)

    def program(group: Backend) -> None:
        with pytest.raises(CollectiveMismatchError, match="rank 0 with one_reads=True, rank 1 with one_reads=False"):
            load_distributed(tmp_path, {"a": None}, group=group, one_reads=group.rank == 0)
        assert load_distributed(tmp_path, {"a": None}, group=group, one_reads=True)["a"].tolist() == [1.0] * 3

    run_ranks(program, 2)


def test_one_strict_rank_makes_all_raise(tmp_path: Path) -> None:
    """A value missing on a strict rank is an error on all."""
    save_distributed({"a": torch.ones(3)}, tmp_path)

    def program(group: Backend) -> None:
        into: dict[str, Any] = {"a": None, "b": None}
        with pytest.raises(DistCheckpointError, match="lacks"):
            load_distributed(tmp_path, into, group=group, strict=group.rank == 0)
        assert load_distributed(tmp_path, {"a": None}, group=group, strict=group.rank == 0)["a"].tolist() == [1.0] * 3

    run_ranks(program, 2)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (250, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """A checkpoint of many ranks loads on one."""
    save_distributed({str(number): torch.full((3,), number) for number in range(300)}, tmp_path, max_file_bytes=1)
    loaded = load_distributed(tmp_path)
    assert all(loaded[str(number)].tolist() == [number] * 3 for number in range(300))


def test_threads_that_read_more_files_than_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is closed while one of them reads it."""
    monkeypatch.setattr(local, "_MAX_OPEN_FILES", 2)
    for number in range(8):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 1000)
    storage = LocalStorage(tmp_path)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(500):
            number = (turn * (seed + 1)) % 8
            data = bytearray(1000)
            storage.read(str(number), 0, memoryview(data))
            if data != bytes([number]) * 1000:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(storage._open) <= 4
    storage.close()
    assert not storage._open


@pytest.mark.parametrize("one_reads", [False, True])
def test_tensors_of_inference_mode(tmp_path: Path, one_reads: bool) -> None:
    """Inference tensors are filled outside of inference mode too, whichever rank reads."""
    save_distributed({"a": torch.ones(3)}, tmp_path)

    def program(group: Backend) -> list[float]:
        with torch.inference_mode():
            into = torch.zeros(3)
        load_distributed(tmp_path, {"a": into}, group=group, one_reads=one_reads)
        return into.tolist()

    assert run_ranks(program, 2) == [[1.0] * 3] * 2


@pytest.mark.parametrize("one_reads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_overflows_are_an_error(tmp_path: Path, dtype: torch.dtype, one_reads: bool) -> None:
    """Overflows are an error on all ranks, rather than infinities; saved infinities stay."""
    save_distributed({"a": torch.tensor([1.0, 1e10]), "b": torch.tensor([1.0, math.nan, -2.0])}, tmp_path)

    def program(group: Backend) -> None:
        whole = load_distributed(tmp_path, {"b": torch.zeros(3, dtype=dtype)}, group=group, one_reads=one_reads)
        assert whole["b"].float().isnan().tolist() == [False, True, False]
        into = torch.zeros(2, dtype=dtype if group.rank == 1 else torch.float64)
        with pytest.raises(DistCheckpointError, match=f"tensor 'a' .*beyond {dtype}"):
            load_distributed(tmp_path, {"a": into}, group=group, one_reads=one_reads)

    run_ranks(program, 2)


def test_buffers_that_each_rank_has_its_own_of(tmp_path: Path) -> None:
    """PerRank saves those of ranks too whose buffers would not be saved otherwise."""

    def program(group: Backend) -> None:
        module = torch.nn.BatchNorm1d(2)
        model = fd.DDP(module, group=group)
        module.running_mean = torch.full((2,), float(group.rank))
        save_distributed({"model": PerRank(model)}, tmp_path, group=group)
        module.running_mean = torch.zeros(2)
        load_distributed(tmp_path, {"model": PerRank(model)}, group=group)
        assert module.running_mean.tolist() == [group.rank] * 2

    run_ranks(program, 2)
