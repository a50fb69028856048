"""The page for users of the crate agrees with the package: its names, and what its notes say."""

import builtins
import contextlib
import enum
import inspect
import re

import pytest
import torch
from nccl_fakes import fake_groups
from page_tables import Page, exists

import ferrodist as fd
from ferrodist.testing import run_ranks

PAGE = Page("from-ferrotorch.md", "crate")
ROWS = [(heading, *row) for heading, (_, table) in PAGE.sections().items() for row in table]


def rows_that(says):
    """The rows whose note holds a pattern, as parameters of a test."""
    return [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in ROWS if re.search(says, row[3])]


def resolve(ours):
    """What the first name of a cell stands for, and what has it."""
    path = re.match(r"`fd\.([\w.]+)", ours)[1]
    owner, value = None, fd
    for name in path.split("."):
        owner, value = (
            value,
            inspect.getattr_static(value, name, None) if inspect.isclass(value) else getattr(value, name),
        )
    return owner, value


def test_every_row_says_where_the_name_is():
    """Each row names one crate item, once a module, and says what it is here, or none."""
    for heading, (_, table) in PAGE.sections().items():
        crate_names = [row[0] for row in table]
        assert len(set(crate_names)) == len(crate_names), heading
        for row in table:
            assert len(row) == 3, row
            crate, ours, _ = row
            assert re.fullmatch(r"`[^`]+`", crate), row
            assert ours == "none" or re.fullmatch(r"`fd\.[^`]+`(, `fd\.[^`]+`)*", ours), row


@pytest.mark.parametrize("name", PAGE.present_names())
def test_present_name_exists(name):
    """A name that the page says is there is there."""
    assert exists(name)


@pytest.mark.parametrize(("heading", "crate", "ours", "note"), rows_that("^property"))
def test_properties_are_properties(heading, crate, ours, note):
    """What the page calls a property is read without parentheses."""
    del heading, crate, note
    assert isinstance(resolve(ours)[1], property)


@pytest.mark.parametrize(("heading", "crate", "ours", "note"), rows_that(r"^also an? `\w+Error`"))
def test_errors_are_pythons_too(heading, crate, ours, note):
    """An error that is also one of Python's is caught as such."""
    del heading, crate
    assert issubclass(resolve(ours)[1], getattr(builtins, re.search(r"`(\w+)`", note)[1]))
    assert issubclass(resolve(ours)[1], fd.DistributedError)


@pytest.mark.parametrize(("heading", "crate", "ours", "note"), rows_that(r"a `torch\.nn\.Module`"))
def test_modules_are_torchs(heading, crate, ours, note):
    """What is a module to torch has its methods."""
    del heading, crate, note
    assert issubclass(resolve(ours)[1], torch.nn.Module)


@pytest.mark.parametrize(("heading", "crate", "ours", "note"), rows_that(r"^`torch\.\w+`$"))
def test_torchs_names_are_torchs(heading, crate, ours, note):
    """A type of the crate's that is torch's has this name there."""
    del heading, crate, ours
    assert isinstance(getattr(torch, note.strip("`").removeprefix("torch.")), torch.dtype)


@pytest.mark.parametrize(
    ("heading", "crate", "ours", "note"),
    [pytest.param(*row, id=row[1]) for row in ROWS if re.search(r"_with_timeout`|_timeout`", row[1])],
)
def test_twins_with_a_timeout_are_keywords(heading, crate, ours, note):
    """Rule 3: the crate's second function is a keyword of the first."""
    del heading, crate, note
    assert ours.endswith("(timeout=)`")


@pytest.mark.parametrize(
    ("heading", "crate", "ours", "note"),
    [
        pytest.param(*row, id=row[1])
        for row in ROWS
        if isinstance(resolve(row[2])[0] if "fd." in row[2] else 0, enum.EnumMeta)
    ],
)
def test_variants_are_upper_case(heading, crate, ours, note):
    """Rule 3: variants of the crate's enums are members of ours."""
    del heading, crate, note
    owner, _ = resolve(ours)
    name = ours.strip("`").rpartition(".")[2]
    assert name.isupper() or "_" in name
    assert name in owner.__members__


# What single rows say, each by a program of two ranks.

SHOWN = {}


def shows(crate):
    """Have a program show a row; the name must be one of the table's."""

    def keep(program):
        assert any(row[1] == f"`{crate}`" for row in ROWS), crate
        SHOWN[crate] = program
        return program

    return keep


@shows("DistributedError::SelfSend")
def _(group):
    with pytest.raises(fd.SelfSendError):
        group.send(b"x", group.rank)


@shows("DistributedError::SizeMismatch")
def _(group):
    if group.rank:
        with pytest.raises(fd.SizeMismatchError):
            group.recv(bytearray(2), 0)
        buffer = bytearray(3)
        group.recv(buffer, 0)
        assert buffer == b"abc"
    else:
        group.send(b"abc", 1)
    group.barrier()


@shows("Backend::recv_timeout")
def _(group):
    with pytest.raises(fd.DistributedTimeoutError) as caught:
        group.recv(bytearray(1), 1 - group.rank, timeout=0.05)
    assert caught.value.ranks == (1 - group.rank,)
    group.barrier()


@shows("SimulatedBackend::create_group")
def _(group):
    del group
    assert [each.rank for each in fd.SimulatedBackend.create_group(3)] == [0, 1, 2]


@shows("SubBackend::new")
def _(group):
    assert fd.SubBackend(group, [1, 0]).rank == 1 - group.rank
    with pytest.raises(fd.InvalidRankError):
        fd.SubBackend(group, [0, 1, 0])


@shows("SubBackend::members")
def _(group):
    assert fd.SubBackend(group, [1, 0]).members == (1, 0)
    assert fd.SubBackend(group, [1, 0]).parent is group


@shows("SubBackend::to_global")
def _(group):
    sub = fd.SubBackend(group, [1, 0])
    assert (sub.to_global(0), sub.to_local(0), sub.to_local(7)) == (1, 1, None)
    with pytest.raises(fd.InvalidRankError):
        sub.to_global(2)


@shows("SubBackend")
def _(group):
    alone = fd.new_group([1])
    assert alone.is_member == (group.rank == 1)
    if not alone.is_member:
        with pytest.raises(fd.InvalidRankError):
            fd.barrier(alone)


@shows("DEFAULT_COLLECTIVE_TIMEOUT")
def _(group):
    del group
    assert isinstance(fd.DEFAULT_COLLECTIVE_TIMEOUT, float)
    (note,) = [row[3] for row in ROWS if row[1] == "`DEFAULT_COLLECTIVE_TIMEOUT`"]
    assert note.startswith(f"{fd.DEFAULT_COLLECTIVE_TIMEOUT:g} seconds")


@shows("allreduce")
def _(group):
    tensor = torch.full((2,), float(group.rank + 1), dtype=torch.bfloat16)
    assert fd.allreduce(tensor).tolist() == [3, 3]
    assert fd.allreduce(tensor, fd.ReduceOp.MAX).tolist() == [2, 2]
    assert tensor.tolist() == [group.rank + 1] * 2


@shows("broadcast")
def _(group):
    assert fd.broadcast(torch.tensor([group.rank]), 1).tolist() == [1]
    assert fd.broadcast(torch.tensor([group.rank])).tolist() == [0]


@shows("all_gather")
def _(group):
    assert fd.all_gather(torch.full((1, 2), group.rank), 1).tolist() == [[0, 0, 1, 1]]
    assert fd.all_gather_uneven(torch.full((group.rank + 1,), group.rank)).tolist() == [0, 1, 1]


@shows("reduce_scatter")
def _(group):
    assert fd.reduce_scatter(torch.arange(3.0)).tolist() == ([4] if group.rank else [0, 2])
    assert list(fd.compute_shard_sizes(3, 2)) == [2, 1]


@shows("reduce_scatter_tensor")
def _(group):
    part = torch.empty(1)
    fd.reduce_scatter_tensor(part, torch.arange(2.0))
    assert part.tolist() == [2 * group.rank]


@shows("all_to_all")
def _(group):
    own = torch.arange(4.0) + 4 * group.rank
    expected = [0, 1, 4, 5] if group.rank == 0 else [2, 3, 6, 7]
    assert fd.all_to_all(own).tolist() == expected
    assert torch.cat(fd.all_to_all(list(own.chunk(2)))).tolist() == expected
    square = own.view(1, 4)
    with pytest.raises(ValueError, match="1"):
        fd.all_to_all(square)
    assert fd.all_to_all(square.view(-1)).tolist() == expected


@shows("all_to_all_single_uneven")
def _(group):
    expected = pytest.raises(fd.SizeMismatchError) if group.rank == 0 else contextlib.suppress(fd.DistributedError)
    with expected:
        fd.all_to_all_single_uneven(torch.ones(2), [1, 1], [1, 1] if group.rank else [1, 2])


@shows("PendingCollective")
def _(group):
    del group
    pending = [fd.async_all_gather(torch.ones(1)), fd.async_all_gather(torch.zeros(1))]
    assert [each.wait().tolist() for each in pending] == [[1, 1], [0, 0]]
    assert all(each.done() for each in pending)


@shows("PendingCollective::wait")
def _(group):
    del group
    pending = fd.async_all_gather(torch.ones(1))
    assert pending.wait(timeout=30) is pending.wait()


@shows("PendingCollective::op_name")
def _(group):
    del group
    assert fd.async_all_gather(torch.ones(1)).op_name == "all_gather"


@shows("send")
def _(group):
    if group.rank:
        with pytest.raises(fd.SizeMismatchError):
            fd.recv((2,), torch.float64, 0)
    else:
        fd.send(torch.ones(2), 1)


@shows("recv")
def _(group):
    if group.rank:
        assert fd.recv((0, 3), torch.float32, 0).shape == (0, 3)
    else:
        fd.send(torch.ones(0, 3), 1)


@shows("recv_into")
def _(group):
    tensor = torch.zeros(2)
    if group.rank:
        address = tensor.data_ptr()
        fd.recv_into(tensor, 0)
        assert (tensor.tolist(), tensor.data_ptr()) == ([1, 1], address)
    else:
        fd.send(torch.ones(2), 1)


@shows("sendrecv")
def _(group):
    other = 1 - group.rank
    assert fd.sendrecv(torch.tensor([group.rank]), other, (1,), other).item() == other


@shows("DeviceMesh::coords")
def _(group):
    mesh = fd.DeviceMesh(group, (1, 2), ("a", "b"))
    assert (mesh.coords(1), mesh.rank_of((0, 1)), mesh.axis_names, mesh.axis_index("b")) == ((0, 1), 1, ("a", "b"), 1)


@shows("DeviceMesh::ranks_along_dim")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    assert mesh.ranks_along_axis("a") == (0, 1)
    assert mesh.groups_along_axis("a") == [(0, 1)]
    assert mesh["a"].group.world_size == 2


@shows("DTensor::from_local")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    with pytest.raises((ValueError, fd.DistributedError)):
        fd.DTensor.from_local(torch.ones(2, 2 + group.rank), mesh, fd.Shard(0))


@shows("DTensor::redistribute")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    spread = fd.DTensor.from_local(torch.full((1,), float(group.rank)), mesh, fd.Shard(0))
    whole = spread.redistribute((fd.Replicate(),))
    assert whole.to_local().tolist() == [0, 1]
    assert spread.to_local().tolist() == [group.rank]


@shows("DTensor::numel")
def _(group):
    mesh = fd.DeviceMesh(group, (2,), ("a",))
    assert fd.DTensor.from_local(torch.ones(0, 3), mesh, fd.Shard(0)).numel() == 0


@shows("reduce_op_to_nccl")
def _(group):
    del group
    assert isinstance(fd.reduce_op_to_nccl(fd.ReduceOp.SUM), int)
    with pytest.raises(fd.UnsupportedOpError):
        fd.reduce_op_to_nccl(fd.ReduceOp.BXOR)


@shows("gpu_allreduce")
def _(group):
    del group
    with pytest.raises(fd.UnsupportedOpError, match="use allreduce"):
        fd.gpu_allreduce(torch.ones(1))


@shows("group_start")
def _(group):
    del group
    with fd.coalesce():
        pending = fd.async_allreduce(torch.ones(1))
    assert pending.wait().item() == 2


@shows("NcclUniqueId::internal")
def _(group):
    del group
    assert fd.NcclUniqueId(bytes(128)).internal == bytes(128)


@pytest.mark.parametrize("crate", SHOWN)
def test_what_a_row_says_is_so(crate):
    """A row that can be shown is."""
    run_ranks(SHOWN[crate], 2)


def test_hybrid_groups_are_what_their_rows_say():
    """The getters of a hybrid group are groups of its ranks."""

    def program(group):
        assert isinstance(group.nccl, fd.NcclBackend)
        assert isinstance(group.tcp, fd.SimulatedBackend)
        for each in (group.nccl, group.tcp):
            assert fd.allreduce(torch.ones(1), group=each).item() == 2

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("kind", [fd.NcclBackend, fd.HybridBackend])
def test_groups_over_nccl_say_that_there_is_none(kind):
    """Where a row says that making one raises, it does."""
    if fd.is_nccl_available():
        pytest.skip("this machine has NCCL and a GPU")
    with pytest.raises(fd.BackendUnavailable):
        kind(fd.SimulatedBackend.create_group(1)[0])
    with pytest.raises(fd.BackendUnavailable):
        fd.NcclUniqueId.create()
