"""Checkpoints as they lie in their folders, what their ranks say to each other, and what conversions make of them."""

from __future__ import annotations

import collections
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import golden_names as names
import numpy as np
import torch
from golden_collectives import words
from golden_support import Recording, Step, Tape, in_short, run_ranks, seed_everything, taped_group
from torch import nn

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from golden_support import Fields

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32", "int64"),
    *("uint8", "bool", "complex64", "complex128"),
)


def _values() -> dict[str, Any]:
    """A value of each kind that a tree has."""
    return {
        "plain": [None, True, 1, -(1 << 63), 0.5, "text \u00e9", ""],
        "numbers": (1 << 70, float("inf"), float("-inf"), 1.5 + 2j, np.float32(0.5), np.int64(3), np.bool_(True)),
        "bytes": [b"\0\1", bytearray(b"\2")],
        "sets": [{3, 1, 2}, frozenset({"a", "b"})],
        "keys": {1: "one", (2, "b"): [], None: {}, 0.5: 1.0},
        "counter": collections.Counter("abca"),
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "nothing": [[], (), {}],
    }


def _tensors() -> dict[str, torch.Tensor]:
    tensors = {name: ((torch.arange(6) % 4) + 1).to(getattr(torch, name)).view(2, 3) for name in _DTYPES}
    shared = torch.arange(4.0)
    return {
        **tensors,
        "zero_dim": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "shared": shared,
        "shared too": shared,
    }


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()  # of whole numbers, so that every machine has the same bits
    optimizer.step()


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) % 3 + number).view_as(parameter))
    return model


def _sharded_state(group: Any) -> dict[str, Any]:
    mesh = fd.DeviceMesh(group, [group.world_size], ["ranks"])
    model = fd.FSDP(_model(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    _train(model, optimizer)
    whole = torch.arange(10.0).view(5, 2)
    return {
        "rows": fd.distribute(whole, mesh, fd.Shard(0)),
        "columns": fd.distribute(whole, mesh, [fd.Shard(1)]),
        "everywhere": fd.distribute(whole, mesh, fd.Replicate()),
        "model": model,
        "optimizer": fd.checkpoint.OptimizerState(model, optimizer),
        "own": fd.checkpoint.PerRank({"rank": group.rank, "tensor": torch.tensor([group.rank])}),
        "random": fd.checkpoint.PerRank(fd.checkpoint.RandomState()),
    }


def _save(state: Any, path: Path, group: Any, **options: Any) -> None:
    fd.checkpoint.save_distributed(state, path, group=group, **options)


def _save_states(group: Any, folder: Path, sharded: Any) -> None:
    _save(_tensors(), folder / "tensors", group)
    _save(_values(), folder / "values", group)
    _save(sharded, folder / "sharded", group)
    _save({"a": torch.zeros(2, 64), "b": torch.ones(64)}, folder / "several files", group, max_file_bytes=600)
    _save({"a": torch.zeros(3)}, folder / "twice", group)
    _save({"a": torch.ones(3)}, folder / "twice", group)
    own = {"part": torch.arange(3.0) + group.rank, "both": torch.arange(2)}
    specs = {"part": fd.checkpoint.TensorShardSpec(full_shape=[6], shard_dim=0, shard_sizes=[3] * 2)}
    shards = fd.checkpoint.ShardMetadata(num_ranks=2, tensor_specs=specs)
    _save(own, folder / "own shards", group, shards=shards)
    with contextlib.closing(_checkpointer(folder / "asynchronous", group)) as checkpointer:
        checkpointer.save_async({"step": 7, "a": torch.ones(2)}, 7).wait()


def _checkpointer(path: Path, group: Any) -> Any:
    return fd.checkpoint.AsyncCheckpointer(path, group=group)


def _convert(folder: Path) -> None:
    source = folder / "sharded"
    names.conversion.export_hugging_face(source, folder / "hugging face", part="model")
    options = fd.checkpoint.RewriteOptions(max_file_bytes=100)
    names.conversion.export_hugging_face(source, folder / "hugging face, several files", part="model", options=options)
    fd.checkpoint.reshard(source, folder / "three ranks", num_ranks=3)
    (folder / "other formats").mkdir()
    names.conversion.export_dcp(source, folder / "other formats" / "dcp")
    names.conversion.export_torch_file(source, folder / "other formats" / "torch.pt")


def _file(path: Path) -> list[Fields]:
    data = path.read_bytes()
    if path.suffix == ".json":
        return [{"text": data.decode()}]
    if path.suffix != ".safetensors":  # of other makers
        return []
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    return [
        {"length of the header": data[:8].hex(), "header": header, "all": in_short(data[8 + size :])},
        *(
            {"tensor": name, "bytes": data[8 + size + start : 8 + size + stop].hex()}
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
            for start, stop in [entry["data_offsets"]]
        ),
    ]


def _folders(folder: Path) -> Recording:
    found: Recording = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.setdefault(str(path.parent.relative_to(folder)), {})[path.name] = _file(path)
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ferrodist-golden-") as name:
        yield Path(name)


def record() -> Recording:
    """Save, convert, and list all files."""
    tape = Tape()
    seed_everything()
    with _folder() as folder:
        groups = taped_group(2, tape)
        states: dict[int, Any] = {}
        steps = [
            Step("states", lambda group: states.update({group.rank: _sharded_state(group)})),
            Step("saves", lambda group: _save_states(group, folder, states[group.rank])),
        ]
        run_ranks([lambda group=group: group for group in groups], steps, tape.begin)
        for group in groups:
            group.close()
        _convert(folder)
        found = _folders(folder)
        messages = tape.recording(lambda tag, data: words(tag, data.replace(str(folder).encode(), b"FOLDER")))["saves"]
    return {**found, "what ranks say to each other": messages}


def load(recording: Recording) -> None:
    """Load what was recorded, as a program of today: what is in old folders comes back."""
    with _folder() as folder:
        for name in ("tensors", "values", "sharded"):
            _write(folder / name, recording[name])
        tensors = fd.checkpoint.load_distributed(folder / "tensors")
        for key, tensor in _tensors().items():
            assert tensors[key].dtype == tensor.dtype, key
            exact = torch.complex128 if tensor.is_complex() else torch.float64
            assert torch.equal(tensors[key].to(exact), tensor.to(exact)), key
        values = fd.checkpoint.load_distributed(folder / "values")
        expected = _values()
        assert np.array_equal(values.pop("array"), expected.pop("array"))
        assert repr(values) == repr(expected)
        sharded = fd.checkpoint.load_distributed(folder / "sharded", into={"rows": None, "columns": None})
        assert torch.equal(sharded["rows"], torch.arange(10.0).view(5, 2))
        assert torch.equal(sharded["columns"], torch.arange(10.0).view(5, 2))


def _write(folder: Path, files: dict[str, list[Fields]]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, (first, *tensors) in files.items():
        if "text" in first:
            (folder / name).write_text(first["text"], encoding="utf-8")
            continue
        header = first["header"].encode()
        data = bytes.fromhex(first["length of the header"]) + header
        (folder / name).write_bytes(data + b"".join(bytes.fromhex(each["bytes"]) for each in tensors))
