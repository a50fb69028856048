"""Saved states come back bit for bit, on any ranks and placements, and only the needed bytes are read."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from divided_tensors import bits_of, divide, layouts_of, part_of, random_bits
from safetensors import safe_open
from safetensors.torch import load_file

from ferrodist import DeviceMesh, DTensor, Partial, Replicate, Shard
from ferrodist.checkpoint import AsyncCheckpointer, Placed, load_distributed, save_distributed
from ferrodist.checkpoint.format import safetensors
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage.local import LocalStorage
from ferrodist.checkpoint.writer import BLOCK_BYTES
from ferrodist.errors import DistCheckpointError, DistributedTimeoutError
from ferrodist.tensor.local_shards import FlatShard, annotate_flat_shard, local_shard
from ferrodist.testing import run_ranks

SHAPES = [(), (0,), (1,), (5,), (7, 3), (4, 6), (0, 4), (3, 0, 2), (6, 2, 5)]
WORLD_SIZES = (1, 2, 3, 4, 7)


def wholes():
    """A tensor of each shape."""
    return {str(shape): random_bits(shape, torch.float32, number) for number, shape in enumerate(SHAPES)}


def files_of(path):
    """The files with tensors."""
    return sorted(path.glob("*.safetensors"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint for each number of ranks: each shape in each placement, and the whole tensors' names by theirs."""
    folders = {}
    for world_size in WORLD_SIZES:
        path = folders[world_size] = tmp_path_factory.mktemp(f"by{world_size}")

        def program(group, path=path):
            meshes = {}
            state = {}
            for name, whole in wholes().items():
                cases = list(layouts_of(whole.shape, group.world_size))
                state[name] = [
                    divide(whole, meshes.setdefault(mesh, DeviceMesh(group, mesh)), placements)
                    for mesh, placements in cases
                ]
            save_distributed({"plain": wholes(), "divided": state}, path)

        run_ranks(program, world_size)
    return folders


@pytest.mark.parametrize("loading", WORLD_SIZES)
@pytest.mark.parametrize("saving", WORLD_SIZES)
def test_round_trips_between_any_ranks_and_placements(saved, saving, loading):
    """From p ranks to q, one and two axes, blocked, replicated, uneven and empty: each rank has its shard's bits."""

    def program(group):
        loaded = load_distributed(saved[saving], {"divided": None})["divided"]
        for name, whole in wholes().items():
            assert all(bits_of(each) == bits_of(whole) and each.shape == whole.shape for each in loaded[name])
        into, expected = {}, {}
        meshes = {}
        for name, whole in wholes().items():
            number = len(loaded[name])
            cases = list(layouts_of(whole.shape, group.world_size))
            cases = [cases[place % len(cases)] for place in range(number)]
            made = [meshes.setdefault(mesh, DeviceMesh(group, mesh)) for mesh, _ in cases]
            into[name] = [
                Placed(mesh, placements) if place % 2 else divide(torch.zeros(whole.shape), mesh, placements)
                for place, (mesh, (_, placements)) in enumerate(zip(made, cases, strict=True))
            ]
            expected[name] = [part_of(whole, mesh, to) for mesh, (_, to) in zip(made, cases, strict=True)]
        got = load_distributed(saved[saving], {"divided": into, "plain": wholes()})
        for name, targets in into.items():
            for one, other, target in zip(got["divided"][name], expected[name], targets, strict=True):
                assert one.to_local().shape == other.shape
                assert bits_of(one.to_local()) == bits_of(other)
                assert isinstance(target, Placed) or one is target
            assert bits_of(got["plain"][name]) == bits_of(wholes()[name])

    run_ranks(program, loading)


def test_flat_shards_of_fsdp(tmp_path):
    """FSDP's flat shards, loaded by ranks with another sharding."""
    whole = random_bits((6, 5, 3), torch.float32)

    def piece_of(group, cuts):
        begin, end = cuts[group.rank], cuts[group.rank + 1]
        flat = whole.reshape(-1)[begin:end].clone()
        annotate_flat_shard(
            flat, FlatShard(shape=(6, 5, 3), start=begin, spec=None, num_shards=len(cuts) - 1, num_copies=1)
        )
        return flat

    def saving(group):
        save_distributed({"x": piece_of(group, [0, 44, 44, 90])}, tmp_path)

    def loading(group, cuts):
        expected = piece_of(group, cuts)
        target = torch.zeros_like(expected)
        annotate_flat_shard(
            target, FlatShard(shape=(6, 5, 3), start=cuts[group.rank], spec=None, num_shards=4, num_copies=1)
        )
        load_distributed(tmp_path, {"x": target})
        assert bits_of(target) == bits_of(expected)

    run_ranks(saving, 3)
    run_ranks(loading, 4, [0, 1, 17, 80, 90])
    run_ranks(loading, 2, [0, 0, 90])
    assert bits_of(load_distributed(tmp_path)["x"]) == bits_of(whole)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", safetensors._DTYPES.values(), ids=safetensors._DTYPES)
def test_each_dtype(tmp_path, dtype):
    """All bits of all dtypes, plain and divided, also those that safetensors files have no name for."""
    whole = random_bits((5, 4), dtype, 1)

    def saving(group):
        mesh = DeviceMesh(group, (2,))
        save_distributed({"plain": whole.clone(), "rows": divide(whole, mesh, [Shard(0)])}, tmp_path)

    def loading(group):
        mesh = DeviceMesh(group, (3,))
        into = {"plain": torch.zeros(5, 4).to(dtype), "rows": Placed(mesh, Shard(1))}
        loaded = load_distributed(tmp_path, into)
        assert bits_of(into["plain"]) == bits_of(whole)
        assert loaded["rows"].dtype == dtype
        assert bits_of(loaded["rows"].to_local()) == bits_of(part_of(whole, mesh, [Shard(1)]))

    run_ranks(saving, 2)
    run_ranks(loading, 3)
    assert {bits_of(each) for each in load_distributed(tmp_path).values()} == {bits_of(whole)}
    shards = [each for path in files_of(tmp_path) for each in load_file(path).items()]
    assert {name for name, _ in shards} == {"plain", "rows[0:3, 0:4]", "rows[3:5, 0:4]"}
    found = dict(shards)
    assert bits_of(found["plain"]) == bits_of(whole)
    assert bits_of(found["rows[3:5, 0:4]"]) == bits_of(whole[3:])
    if found["plain"].dtype == dtype:
        assert found["plain"].shape == whole.shape
    else:
        assert found["plain"].shape == (5, 4, dtype.itemsize)


def test_views(tmp_path):
    """Tensors that aren't contiguous are saved and filled correctly."""
    base = random_bits((6, 4), torch.complex64, 3)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": base[:1].expand(5, 4),
        "conjugate": base.conj(),
        "imaginary": base.conj().imag,
        "transposed conjugate": base.mH,
        "of a row": base[3],
        "of nothing": base[:, :0],
    }
    save_distributed(views, tmp_path)
    whole = load_distributed(tmp_path)
    for name, view in views.items():
        assert bits_of(whole[name]) == bits_of(view)
    memory = torch.zeros(6, 4, dtype=torch.complex64)
    targets = {
        "transposed": torch.zeros(6, 4, dtype=torch.complex64).t(),
        "strided": torch.zeros(6, 4, dtype=torch.complex64)[::2, 1::2],
        "conjugate": memory.conj(),
        "imaginary": torch.zeros(6, 4, dtype=torch.complex64).conj().imag,
        "transposed conjugate": torch.zeros(6, 4, dtype=torch.complex64).mH,
    }
    load_distributed(tmp_path, targets)
    for name, target in targets.items():
        assert torch.equal(target.resolve_conj().nan_to_num(), views[name].resolve_conj().nan_to_num()), name
    assert torch.equal(memory.nan_to_num(), base.nan_to_num())


def test_tensors_of_autograd(tmp_path):
    """Leaves, results and parameters are saved without their graphs, and filled with autograd told of it."""
    weight = torch.nn.Parameter(torch.arange(3.0))
    result = (weight * 2).exp()
    save_distributed({"w": weight, "r": result}, tmp_path)
    target = torch.nn.Parameter(torch.zeros(3))
    loss = (target * target).sum()
    load_distributed(tmp_path, {"w": target})
    assert target.requires_grad
    assert torch.equal(target, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loaded = load_distributed(tmp_path)
    assert not loaded["r"].requires_grad
    assert torch.equal(loaded["r"], result)


def test_inference_tensors(tmp_path):
    """In inference mode and out of it; also with another dtype."""
    with torch.inference_mode():
        made = torch.arange(3.0)
        save_distributed({"x": made}, tmp_path)
        target, other = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
        loaded = load_distributed(tmp_path)
    for into in (target, other):
        load_distributed(tmp_path, {"x": into})
        assert torch.equal(into, made.to(into.dtype))
        with torch.inference_mode():
            load_distributed(tmp_path, {"x": into.zero_()})
        assert torch.equal(into, made.to(into.dtype))
    assert torch.equal(loaded["x"], made)


def test_partial_tensors_are_reduced(tmp_path):
    """The sum is saved, and partial tensors are refused as targets."""

    def program(group):
        mesh = DeviceMesh(group, (group.world_size,))
        partial = DTensor.from_local(torch.full((2,), group.rank + 1.0), mesh, [Partial()])
        save_distributed({"x": partial}, tmp_path)
        assert torch.equal(load_distributed(tmp_path)["x"], torch.full((2,), 6.0))
        with pytest.raises((ValueError, DistCheckpointError), match="redistribute"):
            load_distributed(tmp_path, {"x": partial})
        with pytest.raises((ValueError, DistCheckpointError), match="redistribute"):
            load_distributed(tmp_path, {"x": Placed(mesh, Partial())})

    run_ranks(program, 3)


def test_replicas_of_partial_sums_are_compared(tmp_path):
    """Addend by addend: ranks with the same one must agree, ranks with different ones are the reason for the sum."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        column = float(group.rank // 2)
        partial = DTensor.from_local(torch.full((2,), column + 1), mesh, [Partial(), Replicate()])
        save_distributed({"x": partial}, tmp_path)
        assert torch.equal(partial.to_local(), torch.full((2,), column + 1))
        assert torch.equal(load_distributed(tmp_path)["x"], torch.full((2,), 3.0))
        diverged = DTensor.from_local(torch.full((2,), max(group.rank, 1) + 1.0), mesh, [Partial(), Replicate()])
        with pytest.raises(DistCheckpointError, match="'x' should be the same on ranks 2 and 3"):
            save_distributed({"x": diverged}, tmp_path)
        with AsyncCheckpointer(tmp_path) as saves:
            future = saves.save_async({"x": partial}, 1)
            partial.to_local().zero_()
        assert torch.equal(load_distributed(future.path)["x"], torch.full((2,), 3.0))

    run_ranks(program, 4)


def test_replicated_tensors_are_written_once(tmp_path):
    """The work is divided by bytes: no rank writes more than a fair part and one tensor."""
    state = {str(number): torch.ones(1000 + 100 * number) for number in range(12)}

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        copied = divide(torch.arange(2000.0), mesh, [Replicate(), Shard(0)])
        save_distributed({**state, "copied": copied, "again": state["3"], "all": list(state.values())}, tmp_path)

    run_ranks(program, 4)
    sizes = [path.stat().st_size for path in files_of(tmp_path)]
    total = sum(4 * each.numel() for each in state.values()) + 8000
    headers = sum(file.header_bytes for file in read_manifest(LocalStorage(tmp_path)).files)
    assert len(sizes) == 4
    assert sum(sizes) == total + headers
    assert max(sizes) - min(sizes) < 4 * 2100 + 1000
    names = [name for path in files_of(tmp_path) for name in load_file(path)]
    assert len(names) == len(set(names)) == len(state) + 2


def test_replicas_that_differ_are_an_error(tmp_path):
    """An error on all ranks names the tensor and the ranks, unless check_replicas is off."""
    mine = torch.zeros(3, 4)

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        local = torch.full((1, 2), float(group.rank))
        states = [
            ({"a": {"same": mine, "mine": torch.full((2,), group.rank // 2 + 0.0)}}, "'a.mine'.*ranks 0 and 2"),
            ({"d": DTensor.from_local(local, mesh, [Replicate(), Shard(0)])}, "'d'.*ranks 0 and 2"),
            ({"shape": torch.zeros(group.rank // 3 + 1)}, r"'shape' differs.*shape \(1,\) on rank 0.*\(2,\) on rank 3"),
            (
                {"dtype": torch.zeros(1, dtype=[torch.int8, torch.int16][group.rank % 2])},
                "'dtype'.*int8.*int16.*rank 1",
            ),
        ]
        for state, message in states:
            with pytest.raises(DistCheckpointError, match=message) as failure:
                save_distributed(state, tmp_path)
            assert len(failure.value.ranks) == 2
        for state, _ in states[:2]:
            save_distributed(state, tmp_path, check_replicas=False)
            load_distributed(tmp_path)

    run_ranks(program, 4)


def test_shards_must_cover_the_tensor(tmp_path):
    """Ranks that shard a tensor along different dims have as many elements as it has, but not each."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        whole = torch.arange(4.0).reshape(2, 2)
        divided = divide(whole, mesh, [Shard(0) if group.rank else Shard(1)])
        with pytest.raises(DistCheckpointError, match=r"'x'.*overlap"):
            save_distributed({"x": divided}, tmp_path)

    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []


def test_other_keys_on_other_ranks(tmp_path):
    """As stages of a pipeline have them; each loads its own, or all, or those of another division."""
    layers = {str(number): torch.full((number + 1,), 1.0 * number) for number in range(7)}

    def saving(group):
        own = {name: layer for name, layer in layers.items() if int(name) % 3 == group.rank}
        save_distributed({"layers": own, "step": 3}, tmp_path)

    def loading(group):
        own = {name: torch.zeros_like(layer) for name, layer in layers.items() if int(name) // 4 == group.rank}
        loaded = load_distributed(tmp_path, {"layers": own, "step": None})
        assert loaded["step"] == 3
        assert all(torch.equal(own[name], layers[name]) for name in own)

    run_ranks(saving, 3)
    run_ranks(loading, 2)
    assert sorted(load_distributed(tmp_path)["layers"]) == sorted(layers)


@pytest.mark.parametrize("limit", [1, 100, 1000, 10**9])
def test_files_are_split(tmp_path, limit):
    """No file has more than the limit of elements' bytes, but for one with a single shard."""
    state = {str(number): torch.arange(number * 10.0) for number in range(8)}

    def program(group):
        save_distributed(state, tmp_path, max_file_bytes=limit)

    run_ranks(program, 2)
    found = {}
    for path in files_of(tmp_path):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit
        found.update(tensors)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    loaded = load_distributed(tmp_path)
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1", None])
def test_invalid_limits_are_refused(tmp_path, limit):
    """Invalid limits are refused on all ranks."""

    def program(group):
        with pytest.raises((TypeError, ValueError), match="max_file_bytes"):
            save_distributed({"a": 1}, tmp_path / "x", max_file_bytes=limit)

    run_ranks(program, 2)
    assert list(tmp_path.iterdir()) == []


def test_unsharded_tensors_are_a_folder_of_hugging_face(tmp_path):
    """Its index names each tensor's file, and the total size; sharded checkpoints have none."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))

    def program(group):
        save_distributed(model, tmp_path, max_file_bytes=60)

    run_ranks(program, 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state = model.state_dict()
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in state.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), state[name])
            assert opened.metadata() == {"format": "pt"}

    def sharded(group):
        save_distributed({"x": divide(torch.ones(4), DeviceMesh(group, (2,)), [Shard(0)])}, tmp_path)

    run_ranks(sharded, 2)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_saving_again_removes_the_previous_files(tmp_path):
    """All files and the index, whatever their number."""
    for number in (5, 1, 3):
        state = {str(place): torch.full((3,), 1.0 * number) for place in range(number)}
        save_distributed(state, tmp_path, max_file_bytes=1)
        assert len(files_of(tmp_path)) == number
        assert len(list(tmp_path.iterdir())) == number + 2
        assert load_distributed(tmp_path).keys() == state.keys()


def test_a_folder_of_another_program_is_left_alone(tmp_path):
    """A save to a folder with foreign tensors is refused; other files stay."""
    (tmp_path / "model.safetensors").write_bytes(b"somebody's")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DistCheckpointError, match=r"model.safetensors.*folder of its own"):
        save_distributed({"a": torch.ones(1)}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    (tmp_path / "model.safetensors").unlink()
    save_distributed({"a": torch.ones(1)}, tmp_path)
    save_distributed({"a": torch.ones(2)}, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.fixture
def reads(monkeypatch):
    """Recorded reads: file name, first byte, number of bytes."""
    found = []
    read = LocalStorage.read

    def counting(self, name, start, into):
        found.append((name, start, len(into.cast("B"))))
        read(self, name, start, into)

    monkeypatch.setattr(LocalStorage, "read", counting)
    return found


def test_only_the_bytes_that_are_needed(tmp_path, reads):
    """A part of a tensor in 4 blocks: without checks its bytes, with them the blocks that have it, and headers."""
    rows = 4 * BLOCK_BYTES // 4096
    whole = torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024)
    save_distributed({"large": whole, "other": torch.ones(10**6)}, tmp_path)
    header = read_manifest(LocalStorage(tmp_path)).files[0].header_bytes

    def program(group, verify):
        mesh = DeviceMesh(group, (4,))
        target = divide(torch.zeros_like(whole), mesh, [Shard(0)])
        load_distributed(tmp_path, {"large": target}, verify=verify)
        assert torch.equal(target.to_local(), part_of(whole, mesh, [Shard(0)]))

    for verify, expected in ((False, 0), (True, 4 * header)):
        reads.clear()
        run_ranks(program, 4, verify)
        assert sum(size for _, _, size in reads) == 4 * BLOCK_BYTES + expected
    # One row of the middle, of which the block is read if it is checked.
    for verify, size in ((False, 4096), (True, BLOCK_BYTES + header)):
        reads.clear()
        piece = torch.zeros(1024, dtype=torch.int32)
        annotate_flat_shard(
            piece, FlatShard(shape=(rows, 1024), start=2000 * 1024, spec=None, num_shards=1, num_copies=1)
        )
        load_distributed(tmp_path, {"large": piece}, verify=verify)
        assert torch.equal(piece, whole[2000])
        assert sum(each for _, _, each in reads) == size


def test_columns_read_no_other_shards(tmp_path, reads):
    """Ranks of a column-sharded tensor read only the files with their columns."""
    whole = torch.arange(64.0).reshape(8, 8)

    def saving(group):
        save_distributed({"x": divide(whole, DeviceMesh(group, (4,)), [Shard(1)])}, tmp_path)

    def loading(group):
        target = divide(torch.zeros(8, 8), DeviceMesh(group, (2,)), [Shard(1)])
        load_distributed(tmp_path, {"x": target}, verify=False)
        assert torch.equal(target.to_local(), whole[:, 4 * group.rank :][:, :4])

    run_ranks(saving, 4)
    reads.clear()
    run_ranks(loading, 2)
    assert sum(size for _, _, size in reads) == whole.nbytes
    assert len(reads) == 4


def test_a_part_of_the_state_reads_nothing_else(tmp_path, reads):
    """Tensors that nobody asked for, and tensors of no elements, are not read."""
    save_distributed(
        {"a": torch.ones(100), "b": torch.ones(7), "c": torch.empty(0), "n": 1}, tmp_path, max_file_bytes=1
    )
    reads.clear()
    load_distributed(tmp_path, {"b": None, "c": None, "n": None}, verify=False)
    assert [size for _, _, size in reads] == [28]
    reads.clear()
    load_distributed(tmp_path, {"n": None})
    assert reads == []


def test_files_are_closed_after_reading(tmp_path):
    """No file stays open, also after an error."""
    save_distributed({"a": torch.ones(100)}, tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    load_distributed(tmp_path)
    path = files_of(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DistCheckpointError):
        load_distributed(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_each_byte_of_a_file_is_checked(tmp_path):
    """Damage anywhere, also in the header, is an error that names the file and a tensor in it."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        save_distributed({"first": divide(torch.arange(10.0), mesh, [Shard(0)]), "second": torch.ones(3)}, tmp_path)

    run_ranks(program, 2)
    for path in files_of(tmp_path):
        data = path.read_bytes()
        for place in range(len(data)):
            path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
            with pytest.raises(
                DistCheckpointError, match=f"{path.name}.*damaged.*tensor|{path.name}.*tensor.*damaged"
            ) as failure:
                load_distributed(tmp_path)
            assert "'first'" in failure.value.message or "'second'" in failure.value.message
        for wrong, message in [
            (data[:-1], "has .* bytes where .* were written"),
            (data + b"x", "has .* bytes where .* were written"),
            (b"", "has 0 bytes"),
            (None, "is missing"),
        ]:
            path.unlink() if wrong is None else path.write_bytes(wrong)
            with pytest.raises(DistCheckpointError, match=f"{path.name}.*{message}"):
                load_distributed(tmp_path)
            if message != "is missing":
                with pytest.raises(DistCheckpointError, match=f"{path.name}.*tensor '"):
                    load_distributed(tmp_path, verify=False)
        path.write_bytes(data)
    load_distributed(tmp_path)


def test_damage_is_known_on_all_ranks(tmp_path):
    """Ranks that read nothing of the damaged file raise too, with the same message."""
    state = {"a": torch.ones(8), "b": torch.zeros(8)}
    save_distributed(state, tmp_path)
    path = files_of(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    def program(group):
        with pytest.raises(DistCheckpointError, match=path.name) as failure:
            load_distributed(tmp_path, {"ab"[group.rank]: None})
        return failure.value.message

    assert len(set(run_ranks(program, 2))) == 1


def test_placements_are_described_in_words(tmp_path):
    """The manifest describes placements for people."""

    def program(group):
        tensor = divide(torch.ones(4, 4), DeviceMesh(group, (2, 2), ("a", "b")), [Shard(1), Replicate()])
        assert local_shard(tensor).is_replicated
        save_distributed({"x": tensor, "y": torch.ones(1)}, tmp_path)

    run_ranks(program, 4)
    tensors = read_manifest(LocalStorage(tmp_path)).tensors
    assert tensors["x"].placement == "Shard(1) along 'a' of 2, Replicate() along 'b' of 2"
    assert tensors["y"].placement == "whole"


def test_a_path_that_is_not_utf_8(tmp_path):
    """It works like other paths, and appears in other ranks' errors."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))

    def body(group):
        with pytest.raises(DistCheckpointError, match=r"caf\\udce9|caf\udce9"):
            load_distributed(path, group=group)
        save_distributed({"a": torch.ones(2)}, path, group=group)
        return load_distributed(path, group=group)["a"].tolist()

    assert run_ranks(body, 2) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("kind", ["save", "load", "saves"])
def test_the_default_timeout_is_that_of_all_calls(kind, tmp_path, monkeypatch):
    """Checkpoints wait for a late rank as long as FERRODIST_TIMEOUT says, as everything that waits for ranks does."""
    save_distributed({"a": torch.ones(2)}, tmp_path / "there")
    calls = {
        "save": lambda group: save_distributed({"a": torch.ones(2)}, tmp_path / "new", group=group),
        "load": lambda group: load_distributed(tmp_path / "there", group=group),
        "saves": lambda group: AsyncCheckpointer(tmp_path / "steps", group=group),
    }
    is_over = threading.Event()

    def program(group):
        if group.rank == 1:
            assert is_over.wait(30)
            return
        monkeypatch.setenv("FERRODIST_TIMEOUT", "0.2")
        try:
            with pytest.raises(DistributedTimeoutError) as caught:
                calls[kind](group)
            assert caught.value.ranks == (1,)
        finally:
            is_over.set()

    run_ranks(program, 2)
