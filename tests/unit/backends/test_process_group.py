"""The default group, and how a program makes it."""

import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ferrodist as fd
from ferrodist.backends import process_group
from ferrodist.deadline import Deadline
from ferrodist.testing import check_leaks, run_ranks


@pytest.fixture
def clean_environment(monkeypatch):
    """No variables of a launcher, and no default group before or after."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "FERRODIST_SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert not fd.is_initialized()
    yield monkeypatch
    fd.destroy_process_group()


def free_address():
    """A loopback address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def test_one_rank_alone(clean_environment, tmp_path):
    """A world of one needs no other process, and its collectives are the identity."""
    group = fd.init_process_group("tcp", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    assert fd.default_group() is group
    assert fd.allreduce(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert fd.all_gather(torch.tensor(3)).tolist() == [3]


def test_destroy_leaves_no_group(clean_environment, tmp_path):
    """After destroy_process_group there is no default group, its handle is closed, and destroying again is harmless."""
    group = fd.init_process_group(rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    fd.destroy_process_group()
    fd.destroy_process_group()
    assert not fd.is_initialized()
    with pytest.raises(fd.GroupClosedError, match="init_process_group"):
        fd.barrier()
    with pytest.raises(fd.GroupClosedError, match="closed"):
        fd.barrier(group)


@pytest.fixture
def two_ranks(clean_environment, tmp_path):
    """The default group of this process, rank 0 of two, and the other rank's handle."""
    one, other = fd.SimulatedBackend.create_group(2, timeout=5)
    clean_environment.setitem(process_group._FACTORIES, "pair", lambda *_: one)
    fd.init_process_group("pair", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    yield one, other
    other.close()


@pytest.mark.parametrize("name", ["last_exc", "last_value"])
def test_an_unhandled_exception_aborts_the_group_at_exit(two_ranks, clean_environment, name):
    """The other ranks learn why this one ended; Python 3.12 and older ones keep the exception under other names."""
    for other_name in ("last_exc", "last_value"):
        clean_environment.delattr(sys, other_name, raising=False)
    clean_environment.setattr(sys, name, ValueError("bad luck\nand more"), raising=False)
    process_group._leave_at_exit()
    with pytest.raises(fd.GroupAbortedError, match=r"rank 0 .*its program failed with ValueError: bad luck$"):
        two_ranks[1].barrier()
    assert not fd.is_initialized()


@pytest.mark.parametrize("case", ["no exception", "at a prompt"])
def test_other_exits_close_the_group(two_ranks, clean_environment, case):
    """A program that ends well only leaves, and so does one whose user typed something that failed."""
    for name in ("last_exc", "last_value"):
        clean_environment.delattr(sys, name, raising=False)
    if case == "at a prompt":
        clean_environment.setattr(sys, "last_value", ValueError("bad luck"), raising=False)
        clean_environment.setattr(sys, "ps1", ">>> ", raising=False)
    process_group._leave_at_exit()
    with pytest.raises(fd.PeerLostError, match="has left"):
        two_ranks[1].barrier()


def test_second_default_group_is_refused(clean_environment, tmp_path):
    """Two default groups at once would make calls ambiguous."""
    fd.init_process_group(rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    with pytest.raises(ValueError, match="destroy_process_group"):
        fd.init_process_group(rank=0, world_size=1, init_method=f"file://{tmp_path}/again")


def test_unknown_backend_names_what_there_is(clean_environment):
    """A misspelt backend is an error that lists the real ones; one that is planned says so."""
    with pytest.raises(ValueError, match="tcp"):
        fd.init_process_group("tpc")
    with pytest.raises(fd.BackendUnavailable, match="mpi"):
        fd.init_process_group("mpi")
    with pytest.raises(ValueError, match="create_group"):
        fd.init_process_group("simulated")


def test_missing_environment_names_the_variable(clean_environment):
    """Without a launcher's variables the error names one and says what to do."""
    with pytest.raises((ValueError, fd.RendezvousError), match="RANK"):
        fd.init_process_group(timeout=1)


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_two_processes_meet(method, tmp_path):
    """Two processes that only know rank, world size and the method come together and reduce."""
    url = f"tcp://{free_address()}" if method == "tcp" else f"file://{tmp_path}/meet"

    def program(group):
        fd.init_process_group(rank=group.rank, world_size=2, init_method=url, timeout=20, secret="job")
        result = fd.allreduce(torch.tensor([float(group.rank + 1)]), group=None).item()
        fd.destroy_process_group()
        return result

    def outside(group):
        # run_ranks' own default group would be the one that calls without a group mean
        result = []
        thread = threading.Thread(target=lambda: result.append(program(group)))
        thread.start()
        thread.join()
        return result[0]

    assert run_ranks(outside, 2, backend="tcp") == [3.0, 3.0]


def test_use_group_is_per_thread():
    """Each thread may have its own default group, and blocks nest."""
    one, other = fd.SimulatedBackend.create_group(2)
    with fd.use_group(one):
        assert fd.default_group() is one
        with fd.use_group(other):
            assert fd.default_group() is other
        assert fd.default_group() is one
        seen = []
        thread = threading.Thread(target=lambda: seen.append(fd.is_initialized()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not fd.is_initialized()


def test_new_group_says_who_is_a_member():
    """Members get a group and others a handle that is false, without any rank waiting for another."""

    def program(group):
        sub = fd.new_group([2, 0])
        assert bool(sub) == sub.is_member == (group.rank != 1)
        assert (sub.members, sub.parent, sub.name) == ((2, 0), group, "world[2, 0]")
        return (sub.rank, fd.all_gather(torch.tensor([group.rank]), group=sub).tolist()) if sub.is_member else repr(sub)

    outside = "NonMemberGroup(name='world[2, 0]', members=[2, 0], rank_outside=1)"
    assert run_ranks(program, 3) == [(1, [2, 0]), outside, (0, [2, 0])]


def test_new_group_checks_its_ranks():
    """Wrong ranks are refused on every rank, members or not."""

    def program(group):
        with pytest.raises(fd.InvalidRankError, match="7"):
            fd.new_group([0, 7])
        with pytest.raises(fd.InvalidRankError, match="different"):
            fd.new_group([1, 1])
        with pytest.raises(fd.InvalidRankError, match="at least one"):
            fd.new_group([])

    run_ranks(program, 2)


def test_ranks_of_numpy_are_ints():
    """Members and others name the group alike."""

    def program(group):
        return fd.new_group(np.array([1])).name

    assert run_ranks(program, 2) == ["world[1]", "world[1]"]


def test_group_argument_must_be_a_group():
    """Passing a rank list where a group belongs is a TypeError that says so."""
    with pytest.raises(TypeError, match="Backend"):
        fd.barrier([0, 1])


def test_registered_backend_is_found(clean_environment, tmp_path):
    """A third party's backend is chosen by its name, and names can't be taken twice."""
    made = []

    def factory(membership, timeout, deadline):
        made.append((membership.rank, membership.world_size, timeout, deadline.remaining() <= 7))
        return fd.SimulatedBackend.create_group(1, timeout=timeout)[0]

    fd.register_backend("thirdparty", factory)
    fd.init_process_group("thirdparty", rank=0, world_size=1, init_method=f"file://{tmp_path}/m", timeout=7)
    assert made == [(0, 1, 7, True)]
    for name in ("thirdparty", "tcp", "native"):
        with pytest.raises(ValueError, match=name):
            fd.register_backend(name, factory)


def test_a_group_that_cant_be_closed_keeps_no_store(clean_environment, tmp_path):
    """What a third party's group raises when it is closed does not keep the rendezvous open."""

    class Stuck(fd.SimulatedBackend):
        def close(self, timeout=None):
            raise RuntimeError("stuck")

    closed = []

    def factory(membership, timeout, deadline):
        close = membership.on_close
        object.__setattr__(membership, "on_close", lambda: closed.append(close()))
        return Stuck.create_group(1, timeout=timeout)[0]

    fd.register_backend("stuck", factory)
    fd.init_process_group("stuck", rank=0, world_size=1, init_method=f"file://{tmp_path}/m")
    with pytest.raises(RuntimeError, match="stuck"):
        fd.destroy_process_group()
    assert closed == [None]


@pytest.mark.parametrize(("name", "factory"), [("nothing", None), (3, fd.SimulatedBackend.create_group)])
def test_a_backend_is_a_name_and_a_function(name, factory):
    """Others are refused when they are registered, not with MPI's error when they are used."""
    with pytest.raises(TypeError, match="takes a name and a function"):
        fd.register_backend(name, factory)
    with pytest.raises(ValueError, match="unknown backend"):
        fd.init_process_group([name])


def test_interrupted_start_leaves_no_port_open():
    """Whatever ends the making of a group, Ctrl-C too, rank 0's port is closed."""

    class Store:
        def set(self, *args, **options):
            raise KeyboardInterrupt

    membership = SimpleNamespace(rank=0, world_size=2, host="127.0.0.1", store=Store())
    with check_leaks(), pytest.raises(KeyboardInterrupt):
        fd.TcpBackend.from_membership(membership, 5.0, Deadline(5.0))
