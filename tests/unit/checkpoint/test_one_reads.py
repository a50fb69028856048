"""One rank reads for all."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.checkpoint import DistCheckpointError, Placed, load_distributed, save_distributed
from ferrodist.checkpoint.storage import LocalStorage
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.backends.base import Backend

_LOADING = importlib.import_module("ferrodist.checkpoint.load_distributed")  # not the function
_ROWS, _COLUMNS = 37, 6


def _save(path: Path) -> torch.Tensor:
    values = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).reshape(_ROWS, _COLUMNS)
    save_distributed({"a": values, "number": torch.tensor(5), "none": torch.empty(0, 3), "text": "yes"}, path)
    return values


@pytest.mark.parametrize("chunk_bytes", [50, 1 << 20])
@pytest.mark.parametrize("backend", ["simulated", "native"])
def test_each_byte_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, backend: str
) -> None:
    """All ranks get their parts, whole ones too, in one chunk or many; rank 0 alone reads, and reads nothing twice."""
    monkeypatch.setattr(_LOADING, "_MESSAGE_BYTES", chunk_bytes)
    values = _save(tmp_path)
    read_bytes: list[int] = []
    original = LocalStorage.read

    def read(storage: LocalStorage, name: str, start: int, into: memoryview) -> None:
        read_bytes.append(len(into))
        original(storage, name, start, into)

    monkeypatch.setattr(LocalStorage, "read", read)

    def program(group: Backend) -> int:
        mesh = fd.DeviceMesh(group, (3,))
        into = {"a": Placed(mesh, fd.Shard(0)), "number": None, "none": None, "text": None}
        read_bytes.clear()
        fd.barrier(group=group)
        loaded = load_distributed(tmp_path, into, group=group, one_reads=True, verify=False)
        fd.barrier(group=group)
        number_read = sum(read_bytes)
        assert torch.equal(loaded["a"].full_tensor(), values)
        assert (int(loaded["number"]), loaded["none"].shape, loaded["text"]) == (5, (0, 3), "yes")
        whole = load_distributed(tmp_path, {"a": torch.zeros(_ROWS, _COLUMNS)}, group=group, one_reads=True)
        assert torch.equal(whole["a"], values)
        return number_read

    found = run_ranks(program, 3, backend=backend)
    assert found[0] == _ROWS * _COLUMNS * 4 + 8
    if backend == "native":
        assert found[1:] == [0, 0]


def test_damage_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Data that rank 0 can't read is an error on every rank, and no rank waits forever."""
    _save(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)

    def program(group: Backend) -> None:
        mesh = fd.DeviceMesh(group, (2,))
        with pytest.raises(DistCheckpointError, match=r"safetensors.*tensor '(a|number)'"):
            load_distributed(tmp_path, {"a": Placed(mesh, fd.Shard(1)), "number": None}, group=group, one_reads=True)

    run_ranks(program, 2)


def test_damage_is_one_error(tmp_path: Path) -> None:
    """Ranks that get nothing because of the damage raise the error of rank 0, and none about what came in its place."""
    save_distributed({"a": torch.full((8,), 1e30), "b": torch.zeros(8)}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-8 * 4 :] = torch.full((8,), 1e30).numpy().tobytes()
    file.write_bytes(data)

    def program(group: Backend) -> None:
        into = {"a": torch.zeros(8), "b": torch.zeros(8, dtype=torch.float16)}
        with pytest.raises(DistCheckpointError, match=r"tensor 'b', is damaged"):
            load_distributed(tmp_path, into, group=group, one_reads=True)

    run_ranks(program, 2)


def test_a_rank_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's lack of memory is an error on all ranks before anything is sent."""
    _save(tmp_path)
    most_bytes, here = _LOADING._max_message_bytes, threading.local()

    def most(*args: object) -> int:
        if here.is_short:
            raise MemoryError
        return most_bytes(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_LOADING, "_max_message_bytes", most)

    def program(group: Backend) -> None:
        for short in (0, 1):
            here.is_short = group.rank == short
            with pytest.raises(DistCheckpointError, match=f"rank {short} could not make room .* MemoryError"):
                load_distributed(tmp_path, group=group, one_reads=True, timeout=60)
        here.is_short = False
        assert load_distributed(tmp_path, group=group, one_reads=True, timeout=60)["text"] == "yes"

    run_ranks(program, 2)
