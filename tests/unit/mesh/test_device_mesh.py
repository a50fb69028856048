"""Ranks as a grid, and the groups along its axes."""

import copy
import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ferrodist as fd
from ferrodist import DeviceMesh, InvalidRankError
from ferrodist import mesh as device_mesh
from ferrodist.testing import run_ranks


def mesh_of(rank, world_size, shape, names=None, **options):
    return DeviceMesh(fd.SimulatedBackend.create_group(world_size)[rank], shape, names, **options)


def test_ranks_are_in_row_major_order():
    mesh = mesh_of(4, 6, (2, 3), ("replicate", "shard"))
    assert (mesh.shape, mesh.axis_names, mesh.ndim, mesh.size) == ((2, 3), ("replicate", "shard"), 2, 6)
    assert mesh.ranks == tuple(range(6))
    assert mesh.coordinate == mesh.coords(4) == (1, 1)
    assert [mesh.coords(rank) for rank in range(6)] == list(itertools.product(range(2), range(3)))
    assert mesh.ranks_along_axis("shard") == (3, 4, 5)
    assert mesh.ranks_along_axis(0) == (1, 4)
    assert mesh.ranks_along_axis("replicate", 5) == (2, 5)
    assert mesh.groups_along_axis("replicate") == [(0, 3), (1, 4), (2, 5)]
    assert mesh.groups_along_axis(-1) == [(0, 1, 2), (3, 4, 5)]
    assert (mesh.axis_index("shard"), mesh.axis_index(-2)) == (1, 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_each_coordinate_has_one_rank(shape, data):
    size = torch.Size(shape).numel()
    ranks = data.draw(st.permutations(range(size + 2)))[:size]
    mesh = mesh_of(ranks[0], size + 2, shape, ranks=ranks)
    assert [mesh.rank_of(mesh.coords(rank)) for rank in ranks] == list(ranks)
    grid = torch.tensor(ranks).reshape(shape)
    for coords in itertools.product(*map(range, shape)):
        assert mesh.rank_of(coords) == grid[coords]
    for axis in range(len(shape)):
        assert sorted(itertools.chain(*mesh.groups_along_axis(axis))) == sorted(ranks)
        for group in mesh.groups_along_axis(axis):
            assert all(mesh.ranks_along_axis(axis, rank) == group for rank in group)


def test_slices_are_meshes_of_their_axes():
    mesh = mesh_of(7, 12, (2, 2, 3), ("a", "b", "c"))
    assert mesh.coordinate == (1, 0, 1)
    assert (mesh["c"].ranks, mesh["c"].axis_names, mesh["c"].shape) == ((6, 7, 8), ("c",), (3,))
    assert mesh["a", "c"].ranks == (0, 1, 2, 6, 7, 8)
    assert mesh["c", "a"].ranks == (0, 6, 1, 7, 2, 8)
    assert mesh["a", "c"]["a"] == mesh["a"]
    joined = mesh["a", "b"].flatten()
    assert (joined.shape, joined.axis_names, joined.ranks) == ((4,), ("a_b",), (1, 4, 7, 10))
    assert mesh.flatten("all").axis_names == ("all",)


def test_minus_one_is_inferred():
    assert mesh_of(0, 6, (-1, 2)).shape == (3, 2)
    assert mesh_of(0, 6, (6, -1), ("x", "y")).shape == (6, 1)


def test_equal_meshes():
    group = fd.SimulatedBackend.create_group(4)[0]
    mesh = DeviceMesh(group, (2, 2), ("a", "b"))
    assert mesh == DeviceMesh(group, (2, 2), ("a", "b"))
    assert len({mesh, DeviceMesh(group, (2, 2), ("a", "b"))}) == 1
    assert mesh != DeviceMesh(group, (2, 2), ("a", "c"))
    assert mesh != DeviceMesh(group, (4,))
    assert mesh != 4


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", "native-threads"])
def test_groups_along_axes(backend):
    """Each axis's group reduces over that axis; the group of a mesh of all ranks in order is the parent itself."""

    def reduce(group):
        mesh = DeviceMesh(group, (2, 1, 2), ("a", "one", "b"))
        mine = torch.tensor([float(group.rank)])
        assert mesh.group is group
        assert mesh["b"].group is mesh["a", "b"]["b"].group
        sums = [fd.allreduce(mine, group=mesh[axis].group).item() for axis in ("b", "a", "one")]
        return [*sums, fd.allreduce(mine, group=mesh["b", "a"].group).item(), mesh["a"].group.members]

    results = run_ranks(reduce, 4, backend=backend)
    assert results == [
        [1, 2, 0, 6, (0, 2)],
        [1, 4, 1, 6, (1, 3)],
        [5, 2, 2, 6, (0, 2)],
        [5, 4, 3, 6, (1, 3)],
    ]


def test_groups_are_made_by_their_members_alone():
    """In another order on each rank, and not at all on ranks that don't use them."""

    def reduce(group):
        first = DeviceMesh(group, (2, 2), ("a", "b"))
        second = DeviceMesh(group, (2, 2), ("a", "b"))
        meshes = [first, second] if group.rank else [second, first]
        if group.rank in (2, 3):
            return None
        groups = {id(mesh): mesh["b"].group for mesh in meshes}
        return [fd.allreduce(torch.tensor(group.rank + 1 + 10 * n), group=groups[id(mesh)]).item()
                for n, mesh in enumerate([first, second])]  # fmt: skip

    assert run_ranks(reduce, 4)[:2] == [[3, 23]] * 2


def test_a_rank_outside_of_the_mesh():
    """It may describe a mesh, and has no coordinate or group in it."""
    mesh = mesh_of(3, 4, (2,), ("x",), ranks=[2, 0])
    assert mesh.coordinate is None
    assert mesh.rank_of((0,)) == 2
    for use in (lambda: mesh["x"], lambda: mesh.group, lambda: mesh.ranks_along_axis("x")):
        with pytest.raises(InvalidRankError, match="3"):
            use()


@pytest.mark.parametrize(
    ("shape", "names", "options", "kind", "text"),
    [
        ((2, 3), None, {}, ValueError, r"shape \(2, 3\) does not fit 4 ranks"),
        ((-1, 3), None, {}, ValueError, "does not fit"),
        ((2, 0), None, {}, ValueError, "positive"),
        ((-1, -1), None, {}, ValueError, "at most one -1"),
        ((), None, {}, TypeError, "one or more integers"),
        ((2.0, 2), None, {}, TypeError, "integers"),
        (4, None, {}, TypeError, r"as \(2, 4\), not 4"),
        (None, None, {}, TypeError, r"as \(2, 4\), not None"),
        ((2, 2), 5, {}, TypeError, r"sequence of names, as \('a', 'b'\), not int"),
        ((2, 2), ("a", "a"), {}, ValueError, "must all be different"),
        ((2, 2), ("a",), {}, ValueError, "as many names, not 1"),
        ((2, 2), "ab", {}, TypeError, "sequence of names"),
        ((2, 2), ("a", ""), {}, TypeError, "not empty"),
        ((2,), None, {"ranks": [0, 4]}, InvalidRankError, "4"),
        ((2,), None, {"ranks": [1, 1]}, InvalidRankError, "different"),
        ((2,), None, {"ranks": [0, 1, 2]}, ValueError, "does not fit 3 ranks"),
    ],
)
def test_invalid_meshes(shape, names, options, kind, text):
    with pytest.raises(kind, match=text):
        mesh_of(0, 4, shape, names, **options)


def test_invalid_arguments():
    mesh = mesh_of(0, 4, (2, 2), ("a", "b"))
    for use, kind, text in [
        (lambda: mesh["c"], ValueError, "no axis 'c': this mesh has 'a', 'b'"),
        (lambda: mesh["a", "a"], ValueError, "comes twice"),
        (lambda: mesh[0], TypeError, "names of axes"),
        (lambda: mesh.axis_index(2), ValueError, "no axis 2"),
        (lambda: mesh.axis_index(True), TypeError, "by its name or its index, not by True"),
        (lambda: mesh.ranks_along_axis(None), TypeError, "by its name or its index, not by None"),
        (lambda: pickle.dumps(mesh), TypeError, "a DeviceMesh is not pickled"),
        (lambda: mesh.coords(4), InvalidRankError, "rank 4"),
        (lambda: mesh.rank_of((0, 2)), ValueError, r"no coordinate \(0, 2\)"),
        (lambda: mesh.rank_of((0,)), ValueError, "no coordinate"),
    ]:
        with pytest.raises(kind, match=text):
            use()


def test_copies_are_the_mesh_itself():
    """They have its groups, which can't be copied."""
    mesh = mesh_of(0, 4, (2, 2), ("a", "b"))
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy([mesh]) == [mesh]
    assert copy.deepcopy(mesh).identity == mesh.identity


def test_repr_draws_the_grid():
    assert repr(mesh_of(4, 6, (2, 3), ("replicate", "shard"))) == (
        "DeviceMesh of group 'world': replicate 2 x shard 3, this is rank 4 in brackets\n"
        "replicate \\ shard  0   1   2\n"
        "                0  0   1   2\n"
        "                1  3  [4]  5"
    )
    assert repr(mesh_of(0, 4, (1, 2, 2), ("x", "y", "z"))).splitlines()[1:] == [
        "x 0:",
        "y \\ z  0   1",
        "    0 [0]  1",
        "    1  2   3",
    ]
    assert len(repr(mesh_of(0, 2048, (2, 1024))).splitlines()) == 1


HOSTS = """
import os
import ferrodist as fd
from ferrodist.testing import run_ranks
mesh = fd.DeviceMesh.of_hosts(fd.init_process_group("tcp"))
print(mesh.shape, mesh.coordinate, mesh.axis_names, flush=True)
"""


def test_hosts_and_their_ranks(tmp_path):
    """The launcher's variables say which ranks share a host."""
    script = tmp_path / "hosts.py"
    script.write_text(HOSTS)
    command = [sys.executable, "-m", "ferrodist", "run", "--nproc-per-node", "2", str(script)]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    ).stdout
    assert sorted(line.split("] ")[1] for line in output.splitlines()) == [
        "(1, 2) (0, 0) ('host', 'local_rank')",
        "(1, 2) (0, 1) ('host', 'local_rank')",
    ]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(0, 0), (0, 1), (1, 0), (1, 1)], (2, 2)),
        ([(1, 0), (0, 0), (1, 1), (0, 1)], (1, 3, 0, 2)),
        ([(0, 0), (0, 1), (0, 2), (1, 0)], r"\[3, 1\] ranks"),
        ([(0, 0), (None, None), (0, 1), (0, 2)], "rank 1 of group 'world' has no GROUP_RANK"),
    ],
)
def test_uneven_and_unordered_hosts(places, expected, monkeypatch):
    """Uneven hosts are refused on all ranks, and ranks need not be in order."""
    monkeypatch.setattr(device_mesh, "all_gather_object", lambda _, group: places)
    group = fd.SimulatedBackend.create_group(4)[0]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            DeviceMesh.of_hosts(group)
        return
    mesh = DeviceMesh.of_hosts(group)
    assert (mesh.shape if len(expected) == 2 else mesh.ranks) == expected
