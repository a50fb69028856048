"""The UCC backend without a UCC library: unavailable libraries, failed starts, and fakes of teams."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.ucc import backend, bindings
from ferrodist.backends.ucc import bindings as library
from ferrodist.backends.ucc import team as team_module
from ferrodist.backends.ucc.bindings import UccError
from ferrodist.backends.ucc.data_plane import _DEPARTURE, _DEPARTURE_TAG, UccDataPlane
from ferrodist.backends.ucc.team import Exchange, OobAllgather, Team
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, GroupAbortedError, GroupClosedError, RendezvousError
from ferrodist.testing import run_ranks


def _errors(program, world_size=2):
    """The error of making a group, or None, by rank."""
    errors = [None] * world_size

    def run(group):
        try:
            program(group)
        except fd.DistributedError as error:
            errors[group.rank] = error

    run_ranks(run, world_size)
    return errors


def test_without_a_library(monkeypatch, tmp_path):
    """Without a UCC library is_ucc_available() is False, and making a group raises the reason, with advice."""
    path = str(tmp_path / "libucc.so.1")
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", path)
    assert not fd.is_ucc_available()
    with pytest.raises(BackendUnavailable, match=r"libucc\.so\.1: cannot open.*FERRODIST_UCC_LIBRARY names"):
        fd.init_process_group("ucc", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    assert not fd.is_initialized()


def test_a_library_that_is_not_ucc(monkeypatch):
    """Another library is refused."""
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", torch._C.__file__)
    assert not fd.is_ucc_available()
    assert "ucc_get_version" in (library.why_no_ucc() or "")


def test_an_unknown_version_of_ucc(monkeypatch):
    """A UCC whose structures may differ is refused."""

    class Other:
        version = (2, 0, 0)

        def __init__(self, path):
            pass

        def __str__(self):
            return "UCC 2.0.0"

    monkeypatch.setattr(library, "Library", Other)
    monkeypatch.setenv("FERRODIST_UCC_LIBRARY", "of-another-version")
    with pytest.raises(BackendUnavailable, match=r"of-another-version is UCC 2\.0\.0, and version 1 is needed"):
        library.load()


def test_one_rank_without_a_library(monkeypatch):
    """When one rank has no UCC all raise, with the rank and its reason."""

    def load():
        if fd.default_group().rank == 1:
            raise BackendUnavailable("there is no UCC here (not found)")
        return "UCC 1.8.0"

    monkeypatch.setattr(backend, "load", load)
    for error in _errors(fd.UccBackend, 3):
        assert isinstance(error, BackendUnavailable)
        assert error.ranks == (1,)
        assert "rank 1 can't use it: there is no UCC here (not found)" in error.message


def test_ranks_with_different_versions(monkeypatch):
    """Ranks with different versions of UCC raise, with both versions."""
    monkeypatch.setattr(backend, "load", lambda: f"UCC 1.{fd.default_group().rank}.0")
    for error in _errors(fd.UccBackend):
        assert isinstance(error, BackendUnavailable)
        assert "UCC 1.0.0, UCC 1.1.0" in error.message


class _Team:
    """A team that can't start on rank 1, or is never ready."""

    refuses = True

    def __init__(self, _library, rank, _world_size, _exchange):
        if rank == 1 and self.refuses:
            raise UccError("UCC 1.8.0 failed in ucc_context_create: No resource (-5)")

    def is_ready(self):
        return False


def test_a_rank_on_which_ucc_does_not_start(monkeypatch):
    """The rank raises the reason, and the others raise with its reason at once."""
    monkeypatch.setattr(backend, "load", lambda: "UCC 1.8.0")
    monkeypatch.setattr(backend, "Team", _Team)
    other, own = _errors(fd.UccBackend)
    assert isinstance(own, BackendUnavailable)
    assert isinstance(other, GroupAbortedError)
    for error in (own, other):
        assert "can't be used on rank 1: UCC 1.8.0 failed in ucc_context_create: No resource" in error.message


def test_a_control_that_is_not_a_group():
    """Another object as control group raises TypeError."""
    with pytest.raises(TypeError, match="takes a group of the same ranks, such as a TcpBackend, not None"):
        fd.UccBackend(None)


def test_a_team_that_is_never_ready(monkeypatch):
    """Ranks that UCC does not connect raise at the deadline."""
    monkeypatch.setattr(backend, "load", lambda: "UCC 1.8.0")
    monkeypatch.setattr(backend, "Team", type("Never", (_Team,), {"refuses": False}))
    for error in _errors(lambda group: fd.UccBackend(group, connect_timeout=0.1)):
        assert isinstance(error, RendezvousError)
        assert "within 0.1 s" in error.message


def test_a_group_is_made_on_all_ranks_at_once(monkeypatch):
    """No rank has its group before UCC has connected all ranks: others would depend on it."""
    is_made = threading.Event()
    seen = []

    class Team(_Team):
        refuses = False
        is_busy = False

        def __init__(self, _library, rank, *_):
            self.rank = rank

        def is_ready(self):
            if self.rank == 1 and not seen:
                seen.append(is_made.wait(0.2))
            return True

        def progress(self):
            pass

        def destroy_team(self):
            return True

        def destroy_context(self):
            pass

    def program(group):
        made = fd.UccBackend(group)
        is_made.set()
        assert made.verifier.reserve() == group.verifier.reserve()  # none of the positions is used twice
        made.close()

    monkeypatch.setattr(backend, "load", lambda: "UCC 1.8.0")
    monkeypatch.setattr(backend, "Team", Team)
    assert _errors(program) == [None, None]
    assert seen == [False]


def _failing_team(monkeypatch, oob):
    """A team on a fake library that only begins an exchange, and fails when that does."""

    class Only:
        version = (1, 8, 0)

        def call(self, name, *args):
            if name == "ucc_lib_get_attr":
                args[1]._obj.thread_mode = 2
            if name == "ucc_team_create_post":
                team_params, request = args[2]._obj, ctypes.c_void_p()
                if team_params.oob.allgather(None, None, 0, None, ctypes.byref(request)):
                    raise UccError("UCC failed")
            return 0

        def release(self, name, handle):
            pass

    monkeypatch.setattr(team_module, "open_teams", set())
    return Team(Only(), 0, 2, oob)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GroupAbortedError])
def test_errors_of_an_exchange_are_raised_unchanged(kind, monkeypatch):
    """An error or interruption in a callback of UCC's is raised as it is."""

    class Oob:
        def begin(self, _data):
            raise kind("of the test")

    with pytest.raises(kind, match="of the test"):
        _failing_team(monkeypatch, Oob())


def test_an_exchange_goes_on_outside_of_ucc(monkeypatch):
    """Errors of polling an exchange don't pass through UCC, which would read missing data."""

    class Oob:
        def begin(self, _data):
            return Exchange([], [])

        def poll(self, exchange):
            raise KeyboardInterrupt(f"done: {exchange.is_done}")

    team = _failing_team(monkeypatch, Oob())
    monkeypatch.setattr(team, "_checked", pytest.fail)
    with pytest.raises(KeyboardInterrupt, match="done: False"):
        team.is_ready()


def test_log_settings_in_several_threads(monkeypatch):
    """Threads that open UCC at the same time leave the environment unchanged."""
    monkeypatch.delenv("UCC_LOG_LEVEL", raising=False)
    monkeypatch.delenv(team_module._LOG_VARIABLE, raising=False)
    is_second = threading.Event()
    errors = []

    def second():
        try:
            with team_module._quiet():
                is_second.set()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=second)
    with team_module._quiet():
        thread.start()
        assert not is_second.wait(0.05)
        assert os.environ[team_module._LOG_VARIABLE] == "fatal"
    thread.join(10)
    assert team_module._LOG_VARIABLE not in os.environ
    assert not errors


class _Broken:
    """A team whose collectives fail after they have started."""

    is_busy = True

    def __init__(self):
        self.library = self

    def error(self, name, status):
        return UccError(f"UCC 1.8.0 failed in {name}: No memory ({status})")

    def progress(self):
        pass

    def broadcast(self, data, root):
        del data, root
        return type("Transfer", (), {"status": -4})()


def test_an_error_of_ucc_in_a_collective(monkeypatch):
    """An error of UCC that no lost rank explains ends the group, with UCC's text; transfers are kept."""
    monkeypatch.setattr("ferrodist.backends.ucc.data_plane._REASON_SECONDS", 0.05)
    (control, other) = SimulatedBackend.create_group(2)
    data_plane = UccDataPlane(_Broken(), control, 0)
    assert not data_plane.wait_for(data_plane.broadcast(memoryview(b""), 0), Deadline(10))
    assert "UCC 1.8.0 failed in a collective: No memory (-4)" in control.failure.message
    with pytest.raises(fd.DistributedError, match="No memory"):
        data_plane.broadcast(memoryview(b""), 0)
    data_plane.leave(10)  # has something under way: ends nothing, and returns
    data_plane.stop()
    control.close()
    other.close()
    data_plane._thread.join(10)
    assert not data_plane._thread.is_alive()


class _Working(_Broken):
    """A team whose collectives end some time after they have started."""

    def __init__(self):
        super().__init__()
        self.made_progress = threading.Event()

    def progress(self):
        self.made_progress.set()

    def broadcast(self, data, root):
        del data, root
        deadline = Deadline(0.15)
        return type("Transfer", (), {"status": property(lambda _: int(not deadline.expired))})()

    def finish(self, transfer):
        pass


def test_progress_while_nobody_waits():
    """The thread calls UCC until the data plane is stopped."""
    control, other = SimulatedBackend.create_group(2)
    team = _Working()
    data_plane = UccDataPlane(team, control, 0)
    assert team.made_progress.wait(10)
    data_plane.stop()
    data_plane._thread.join(10)
    assert not data_plane._thread.is_alive()
    control.close()
    other.close()


def test_a_farewell_after_a_long_wait():
    """A wait that has received farewells leaves later ones to the next wait."""
    control, other = SimulatedBackend.create_group(2)
    data_plane = UccDataPlane(_Working(), control, 0)
    assert data_plane.wait_for(data_plane.broadcast(memoryview(b""), 0), Deadline(10))
    other.send(_DEPARTURE.pack(1), 0, tag=_DEPARTURE_TAG)
    other.close()
    assert data_plane.wait_for(data_plane.broadcast(memoryview(b""), 0), Deadline(10))
    assert control.failure is None
    data_plane.stop()
    control.close()


def test_ranks_missing_from_an_exchange_are_named():
    """At the deadline the missing ranks are named, and not those that have come before them."""
    control, came, *others = SimulatedBackend.create_group(3)
    exchange = OobAllgather(control, Deadline(0.0)).begin(b"address")
    OobAllgather(came, Deadline(0.0)).begin(b"address")
    with pytest.raises(RendezvousError, match="rank 2 did not exchange UCC's addresses within 0 s") as raised:
        OobAllgather(control, Deadline(0.0)).poll(exchange)
    assert raised.value.ranks == (2,)
    for group in (control, came, *others):
        group.close()


def test_leaving_while_ucc_does_not_end():
    """Leaving waits for UCC for a limited time, and later collectives are refused."""
    may_end = threading.Event()

    class Lasting(_Broken):
        is_busy = False

        def destroy_team(self):
            return may_end.is_set()

        def destroy_context(self):
            pass

    control, other = SimulatedBackend.create_group(2)
    data_plane = UccDataPlane(Lasting(), control, 0)
    data_plane.leave(0.05)
    assert data_plane._thread.is_alive()
    with pytest.raises(GroupClosedError):
        data_plane.broadcast(memoryview(b""), 0)
    may_end.set()
    data_plane._thread.join(10)
    assert not data_plane._thread.is_alive()
    control.close()
    other.close()


def test_buffers_of_started_transfers_are_kept():
    """UCC's buffers live from before a transfer starts until it ends, whatever happens to the call."""

    class Only:
        def __init__(self):
            self.failing = ""

        def call(self, name, *_args):
            if name == self.failing:
                raise UccError(name)
            return 0

    team = Team.__new__(Team)
    team.library, team._team, team._transfers = Only(), ctypes.c_void_p(), set()
    transfer = team.broadcast(memoryview(bytearray(5)), 0)
    assert team.is_busy
    team.finish(transfer)
    assert not team.is_busy
    team.library.failing = "ucc_collective_post"
    with pytest.raises(UccError):
        team.broadcast(memoryview(bytearray(5)), 0)
    assert team.is_busy


def test_layouts():
    """The structures have the sizes of ucc.h on 64-bit machines."""
    sizes = {
        bindings.LibraryParams: 40,
        bindings.OutOfBand: 40,
        bindings.ContextParams: 80,
        bindings.TeamParams: 208,
        bindings.CollectiveArgs: 200,
    }
    for structure, size in sizes.items():
        assert ctypes.sizeof(structure) == size, structure
    assert bindings.CollectiveArgs.dst.offset == 56
    assert bindings.CollectiveArgs.root.offset == 112
    assert bindings.TeamParams.oob.offset == 72
