"""The page for users of the crate agrees with the package: its names, and what its notes say."""

import builtins
import contextlib
import enum
import re

import numpy as np
import pytest
import torch
from crate_rows import PAGE, ROWS, Shown, resolve, rows_that
from page_tables import exists

import ferrodist as fd
from ferrodist.testing import run_ranks


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


SHOWN = Shown(
    *("error", "backend", "collective", "async_collective", "p2p"),
    elsewhere={
        "Backend": "unit/backends/test_own_backend.py",
        "DistributedError::Io": "docs/test_from_ferrotorch.py",
        "ReduceOp::Sum": "docs/test_from_ferrotorch.py",
        "DistributedError::NoConnection": "docs/test_from_ferrotorch.py",
        "TcpBackend": "docs/test_from_ferrotorch.py",
        "TcpBackend::new": "unit/backends/tcp/test_tcp_backend.py",
    },
)


@SHOWN.row("DistributedError::SelfSend")
def _(group):
    with pytest.raises(fd.SelfSendError):
        group.send(b"x", group.rank)


@SHOWN.row("DistributedError::SizeMismatch")
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


@SHOWN.row("Backend::recv_timeout")
def _(group):
    with pytest.raises(fd.DistributedTimeoutError) as caught:
        group.recv(bytearray(1), 1 - group.rank, timeout=0.05)
    assert caught.value.ranks == (1 - group.rank,)
    group.barrier()


@SHOWN.row("SimulatedBackend::create_group")
def _(group):
    del group
    assert [each.rank for each in fd.SimulatedBackend.create_group(3)] == [0, 1, 2]


@SHOWN.row("SubBackend::new")
def _(group):
    assert fd.SubBackend(group, [1, 0]).rank == 1 - group.rank
    with pytest.raises(fd.InvalidRankError):
        fd.SubBackend(group, [0, 1, 0])


@SHOWN.row("SubBackend::members")
def _(group):
    assert fd.SubBackend(group, [1, 0]).members == (1, 0)
    assert fd.SubBackend(group, [1, 0]).parent is group


@SHOWN.row("SubBackend::to_global")
def _(group):
    sub = fd.SubBackend(group, [1, 0])
    assert (sub.to_global(0), sub.to_local(0), sub.to_local(7)) == (1, 1, None)
    with pytest.raises(fd.InvalidRankError):
        sub.to_global(2)


@SHOWN.row("SubBackend")
def _(group):
    alone = fd.new_group([1])
    assert alone.is_member == (group.rank == 1)
    if not alone.is_member:
        with pytest.raises(fd.InvalidRankError):
            fd.barrier(alone)


@SHOWN.row("DEFAULT_COLLECTIVE_TIMEOUT")
def _(group):
    del group
    assert isinstance(fd.DEFAULT_COLLECTIVE_TIMEOUT, float)
    (note,) = [row[3] for row in ROWS if row[1] == "`DEFAULT_COLLECTIVE_TIMEOUT`"]
    assert note.startswith(f"{fd.DEFAULT_COLLECTIVE_TIMEOUT:g} seconds")


@SHOWN.row("DistributedError", "Backend::barrier", "SimulatedBackend", "barrier")
def _(group):
    assert issubclass(fd.DistributedError, RuntimeError)
    fd.barrier(timeout=20)
    with pytest.raises(fd.DistributedTimeoutError) as caught:
        fd.monitored_barrier(timeout=0.05) if group.rank == 0 else fd.recv((1,), torch.float32, 0)
    assert caught.value.ranks == (1,)


@SHOWN.row("DistributedError::ChannelClosed")
def _(group):
    if group.rank:
        group.close()
        with pytest.raises(fd.GroupClosedError):
            group.send(b"x", 0)
    else:
        with pytest.raises(fd.PeerLostError) as caught:
            group.recv(bytearray(1), 1)
        assert caught.value.ranks == (1,)


@SHOWN.row("DistributedError::BackendUnavailable")
def _(group):
    if not fd.is_nccl_available():
        with pytest.raises(fd.BackendUnavailable):
            fd.NcclBackend(group)


@SHOWN.row("Backend::send", "Backend::recv")
def _(group):
    if group.rank:
        array = np.zeros((2, 2), dtype=np.int16)
        group.recv(array, 0, timeout=20)
        assert array.tolist() == [[1, 2], [3, 4]]
        with pytest.raises(ValueError, match="C-contiguous"):
            group.recv(np.zeros((2, 4), dtype=np.int16)[:, :2], 0)
    else:
        group.send(np.array([[1, 2], [3, 4]], dtype=np.int16), 1, timeout=20)
        with pytest.raises(ValueError, match="C-contiguous"):
            group.send(np.zeros((2, 4))[:, :2], 1)


@SHOWN.row("SubBackend::to_local")
def _(group):
    assert fd.SubBackend(group, [1, 0]).to_local(5) is None


@SHOWN.row("ReduceOp")
def _(group):
    own = torch.tensor([1 + group.rank])
    results = {"MIN": 1, "MAX": 2, "PRODUCT": 2, "BAND": 0, "BOR": 3, "BXOR": 3}
    for op, expected in results.items():
        assert fd.allreduce(own, getattr(fd.ReduceOp, op)).item() == expected


@SHOWN.row("ReduceOp::Mean")
def _(group):
    assert fd.allreduce(torch.tensor([1.0 + group.rank]), fd.ReduceOp.MEAN).item() == 1.5


@SHOWN.row("allreduce")
def _(group):
    tensor = torch.full((2,), float(group.rank + 1), dtype=torch.bfloat16)
    assert fd.allreduce(tensor).tolist() == [3, 3]
    assert fd.allreduce(tensor, fd.ReduceOp.MAX).tolist() == [2, 2]
    assert tensor.tolist() == [group.rank + 1] * 2


@SHOWN.row("broadcast")
def _(group):
    assert fd.broadcast(torch.tensor([group.rank]), 1).tolist() == [1]
    assert fd.broadcast(torch.tensor([group.rank])).tolist() == [0]


@SHOWN.row("all_gather")
def _(group):
    assert fd.all_gather(torch.full((1, 2), group.rank), 1).tolist() == [[0, 0, 1, 1]]
    assert fd.all_gather_uneven(torch.full((group.rank + 1,), group.rank)).tolist() == [0, 1, 1]


@SHOWN.row("reduce_scatter")
def _(group):
    assert fd.reduce_scatter(torch.arange(3.0)).tolist() == ([4] if group.rank else [0, 2])
    assert list(fd.compute_shard_sizes(3, 2)) == [2, 1]


@SHOWN.row("reduce_scatter_tensor")
def _(group):
    part = torch.empty(1)
    fd.reduce_scatter_tensor(part, torch.arange(2.0))
    assert part.tolist() == [2 * group.rank]


@SHOWN.row("all_to_all")
def _(group):
    own = torch.arange(4.0) + 4 * group.rank
    expected = [0, 1, 4, 5] if group.rank == 0 else [2, 3, 6, 7]
    assert fd.all_to_all(own).tolist() == expected
    assert torch.cat(fd.all_to_all(list(own.chunk(2)))).tolist() == expected
    square = own.view(1, 4)
    with pytest.raises(ValueError, match="1"):
        fd.all_to_all(square)
    assert fd.all_to_all(square.view(-1)).tolist() == expected


@SHOWN.row("all_to_all_single_uneven")
def _(group):
    expected = pytest.raises(fd.SizeMismatchError) if group.rank == 0 else contextlib.suppress(fd.DistributedError)
    with expected:
        fd.all_to_all_single_uneven(torch.ones(2), [1, 1], [1, 1] if group.rank else [1, 2])


@SHOWN.row("PendingCollective")
def _(group):
    del group
    pending = [fd.async_all_gather(torch.ones(1)), fd.async_all_gather(torch.zeros(1))]
    assert [each.wait().tolist() for each in pending] == [[1, 1], [0, 0]]
    assert all(each.done() for each in pending)


@SHOWN.row("PendingCollective::wait")
def _(group):
    del group
    pending = fd.async_all_gather(torch.ones(1))
    assert pending.wait(timeout=30) is pending.wait()


@SHOWN.row("PendingCollective::op_name")
def _(group):
    del group
    assert fd.async_all_gather(torch.ones(1)).op_name == "all_gather"


@SHOWN.row("async_reduce_scatter")
def _(group):
    own = torch.arange(2.0) + group.rank
    assert fd.async_reduce_scatter(own).wait().tolist() == [1 + 2 * group.rank]
    assert fd.async_allreduce(own).wait().tolist() == [1, 3]
    assert fd.async_broadcast(own, 1).wait().tolist() == [1, 2]
    assert fd.async_all_to_all(own).wait().tolist() == [group.rank, group.rank + 1]


@SHOWN.row("send")
def _(group):
    if group.rank:
        with pytest.raises(fd.SizeMismatchError):
            fd.recv((2,), torch.float64, 0)
    else:
        fd.send(torch.ones(2), 1)


@SHOWN.row("recv")
def _(group):
    if group.rank:
        assert fd.recv((0, 3), torch.float32, 0).shape == (0, 3)
    else:
        fd.send(torch.ones(0, 3), 1)


@SHOWN.row("recv_into")
def _(group):
    tensor = torch.zeros(2)
    if group.rank:
        address = tensor.data_ptr()
        fd.recv_into(tensor, 0)
        assert (tensor.tolist(), tensor.data_ptr()) == ([1, 1], address)
    else:
        fd.send(torch.ones(2), 1)


@SHOWN.row("sendrecv")
def _(group):
    other = 1 - group.rank
    assert fd.sendrecv(torch.tensor([group.rank]), other, (1,), other).item() == other


@pytest.mark.parametrize("crate", SHOWN)
def test_what_a_row_says_is_so(crate):
    """A row that can be shown is."""
    run_ranks(SHOWN[crate], 2)


def test_no_row_of_these_tables_is_left_out():
    """A note of these tables that nothing shows."""
    assert SHOWN.missing() == []
    assert SHOWN.unknown() == []


def test_ranks_that_do_not_meet():
    """The row of the crate's errors of input and output: who has not come is named."""
    with pytest.raises(fd.RendezvousError) as caught:
        fd.TcpBackend(0, 2, "127.0.0.1:0", timeout=0.2)
    assert caught.value.ranks == (1,)


def test_rank_0_relays_between_two_others():
    """The rows of the crate's star, which has no connection for such a pair."""

    def program(group):
        if group.rank:
            return fd.sendrecv(torch.tensor([group.rank]), 3 - group.rank, (1,), 3 - group.rank).item()
        return None

    assert run_ranks(program, 3, backend="tcp") == [None, 2, 1]


def test_sums_fold_in_rank_order():
    """The row of the crate's sum: in another order, or in bfloat16, these have other results."""

    def program(group):
        ones = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16)[group.rank :][:1]
        wide = torch.tensor([1, 1e16, -1e16, 1], dtype=torch.float64)[group.rank :][:1]
        return fd.allreduce(ones).item(), fd.allreduce(wide).item()

    assert run_ranks(program, 4) == [(260, 1)] * 4
