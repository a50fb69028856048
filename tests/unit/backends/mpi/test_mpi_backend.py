"""The MPI backend without an MPI: unavailable libraries, starting and finalizing, frames, verification; over fakes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ferrodist as fd
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.framed_backend import FramedBackend
from ferrodist.backends.mpi import runtime
from ferrodist.backends.mpi.data_plane import MpiDataPlane
from ferrodist.backends.mpi.runtime import check_job, num_leaked
from ferrodist.backends.mpi.transport import FrameTransport, QueuedFrame
from ferrodist.backends.mpi.verification import MpiVerifier
from ferrodist.backends.mpi.wire import HEADER_SIZE, MAX_PAYLOAD, Frame
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import enable_tensor_views, load
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import MAX_PAYLOAD as MAX_CALL_PAYLOAD
from ferrodist.backends.signature import CollectiveSignature, stamp
from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.engines import reference
from ferrodist.collectives.engines.data_plane import DataPlaneEngine
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, ProtocolError
from ferrodist.installation import how_to_install


@pytest.fixture
def no_mpi(monkeypatch):
    """A machine on which mpi4py finds no MPI."""

    def fail():
        raise RuntimeError("cannot load MPI library\nlibmpi.so: not there")

    monkeypatch.setattr(runtime, "_module", None)
    monkeypatch.setattr(runtime, "_reason", None)
    monkeypatch.setattr(runtime, "_import", fail)


@pytest.mark.usefixtures("no_mpi")
def test_without_an_mpi():
    """Without an MPI is_mpi_available() is False, and making a group raises the reason, with what to install."""
    assert not fd.is_mpi_available()
    with pytest.raises(BackendUnavailable, match=rf"libmpi\.so: not there.*{re.escape(how_to_install('mpi'))}"):
        fd.init_process_group("mpi")
    with pytest.raises(BackendUnavailable, match="there is no MPI here"):
        fd.MpiBackend()


def test_loading_is_tried_once(no_mpi, monkeypatch):
    """A failure to load MPI is remembered."""
    assert not fd.is_mpi_available()
    monkeypatch.setattr(runtime, "_import", lambda: pytest.fail("looked again"))
    assert not fd.is_mpi_available()


def test_an_mpi_without_threads_is_refused(monkeypatch):
    """An MPI without MPI_THREAD_MULTIPLE is refused, with advice."""
    mpi = SimpleNamespace(
        Is_finalized=lambda: False,
        Is_initialized=lambda: True,
        Query_thread=lambda: 2,
        THREAD_MULTIPLE=3,
        get_vendor=lambda: ("Some MPI", (1, 2)),
    )
    monkeypatch.setattr(runtime, "_process", None)
    monkeypatch.setattr(runtime, "_module", mpi)
    with pytest.raises(BackendUnavailable, match=r"Some MPI 1\.2 does not let several threads call it"):
        fd.MpiBackend()


def test_a_finalized_mpi_is_refused(monkeypatch):
    """After MPI_Finalize no group can be made."""
    monkeypatch.setattr(runtime, "_process", None)
    monkeypatch.setattr(runtime, "_module", SimpleNamespace(Is_finalized=lambda: True))
    with pytest.raises(BackendUnavailable, match="MPI has ended in this process"):
        fd.MpiBackend()


class _SlowLibrary:
    """An MPI library whose MPI_Init_thread and MPI_Finalize block until ``come`` is set."""

    def __init__(self):
        self.come = threading.Event()
        self.callers = []

    def MPI_Init_thread(self, *_arguments):
        self.come.wait()
        self.callers.append(threading.get_ident())
        return 0

    MPI_Finalize = MPI_Init_thread


def test_starting_and_finalizing_mpi_have_deadlines(monkeypatch):
    """Waits for MPI's start and end return at their deadlines; both go on, and are called by one thread."""
    slow = _SlowLibrary()
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _path: slow)
    communicator = SimpleNamespace(Set_errhandler=lambda _handler: None)
    mpi = SimpleNamespace(
        __file__="", THREAD_MULTIPLE=3, ERRORS_RETURN=0, COMM_WORLD=communicator, COMM_SELF=communicator
    )
    one = runtime.MpiRuntime(mpi)
    assert not one.await_start(Deadline(0.01))
    one.finalize(None)  # what has not begun is not waited for
    slow.come.set()
    assert one.await_start(Deadline(60))
    slow.come.clear()
    with monkeypatch.context() as forked:
        forked.setattr(runtime.os, "getpid", lambda: -1)
        one.finalize(None)  # MPI is the parent's
    one.finalize(0.01)
    assert len(slow.callers) == 1
    slow.come.set()
    one.finalize(None)
    assert len(slow.callers) == 2
    assert len({*slow.callers}) == 1


class _Open:
    """A group that uses MPI."""

    def __init__(self, *, have_all_left):
        self._have_all_left = have_all_left
        self.is_closed = False

    def close(self):
        self.is_closed = True

    def wait_until_all_left(self, _patience):
        return self._have_all_left


@pytest.mark.parametrize(("has_failed", "kept", "patience"), [(False, 0, None), (True, 0, 5.0), (False, 1, 5.0)])
def test_finalizing_has_a_limit_only_after_a_failure(monkeypatch, has_failed, kept, patience):
    """MPI_Finalize is waited for without limit, unless some rank may never call it."""
    monkeypatch.setattr(runtime, "_module", SimpleNamespace(Is_finalized=lambda: False))
    monkeypatch.setattr(runtime, "_groups", set())
    monkeypatch.setattr(runtime, "_has_lost", False)
    monkeypatch.setattr(runtime, "num_leaked", lambda: kept)
    runtime.unregister(_Open(have_all_left=True), has_failed=has_failed)
    ended = []
    runtime._finalize(SimpleNamespace(finalize=ended.append))
    assert ended == [patience]
    group = _Open(have_all_left=False)
    runtime.register(group)
    runtime._finalize(SimpleNamespace(finalize=ended.append))
    assert ended == [patience], "others still use it"
    assert group.is_closed


def test_an_mpi_that_cannot_start(monkeypatch):
    """An error status of MPI_Init_thread is raised, and MPI is not finalized."""
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _path: SimpleNamespace(MPI_Init_thread=lambda *_: 15))
    one = runtime.MpiRuntime(SimpleNamespace(__file__="", THREAD_MULTIPLE=3))
    with pytest.raises(RuntimeError, match="MPI_Init_thread returned 15"):
        one.await_start(Deadline(60))
    one.finalize(None)


_ALONE = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)


@pytest.fixture
def some_mpi(monkeypatch):
    """An MPI with a name."""
    monkeypatch.setattr(runtime, "_module", SimpleNamespace(get_vendor=lambda: ("Some MPI", (1, 2))))


@pytest.mark.usefixtures("some_mpi")
@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_ranks_started_by_another_mpis_launcher(name):
    """Ranks started by another MPI's launcher raise, unless a world size of 1 was asked for."""
    with pytest.raises(fd.InvalidWorldSizeError, match=rf"to be 4 \({name}\), but Some MPI 1\.2 .* one of 1: it was"):
        check_job(_ALONE, variables={name: "4"})
    check_job(_ALONE, world_size=1, variables={name: "4"})
    check_job(_ALONE, variables={name: "1"})
    check_job(_ALONE, variables={})


def test_the_world_is_checked_against_the_launcher(monkeypatch):
    """`MpiBackend()` raises when MPI has one rank and the launcher has started more."""
    mpi = SimpleNamespace(
        Is_finalized=lambda: False,
        Is_initialized=lambda: True,
        Query_thread=lambda: 3,
        THREAD_MULTIPLE=3,
        COMM_WORLD=_ALONE,
        get_vendor=lambda: ("Some MPI", (1, 2)),
    )
    monkeypatch.setattr(runtime, "_process", None)
    monkeypatch.setattr(runtime, "_module", mpi)
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(fd.InvalidWorldSizeError, match=r"to be 4 \(PMI_SIZE\)"):
        fd.MpiBackend()


@pytest.mark.usefixtures("some_mpi")
def test_a_rank_or_world_size_that_is_not_mpis():
    """A rank or world size other than MPI's raises; launchers' variables are ignored when MPI has several ranks."""
    pair = SimpleNamespace(Get_size=lambda: 2, Get_rank=lambda: 1)
    with pytest.raises(fd.InvalidWorldSizeError, match="to be 7, but Some MPI"):
        check_job(pair, world_size=7)
    with pytest.raises(fd.InvalidRankError, match=r"the rank is to be 0, .* this is rank 1"):
        check_job(pair, rank=0, world_size=2)
    check_job(pair, rank=1, variables={"SLURM_STEP_NUM_TASKS": "4"})


def test_the_mpi_of_a_parent_is_refused(monkeypatch):
    """A forked process can't use its parent's MPI."""
    monkeypatch.setattr(runtime, "_module", SimpleNamespace())
    monkeypatch.setattr(runtime, "_process", -1)
    with pytest.raises(BackendUnavailable, match="the process that this one was forked from"):
        fd.MpiBackend()


def test_arguments_that_do_not_apply_to_mpi():
    """An address is refused: MPI's ranks are connected already."""
    with pytest.raises(ValueError, match="leave init_method='env://' out"):
        fd.init_process_group("mpi", init_method="env://")
    with pytest.raises(ValueError, match="there is a backend 'mpi' already"):
        fd.register_backend("mpi", lambda *_: None)


def test_importing_ferrodist_does_not_load_mpi():
    """The package, and its names, load without mpi4py."""
    code = "import sys, ferrodist; ferrodist.MpiBackend; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_frames_round_trip():
    """Frames of every type are unpacked as they were packed."""
    for kind in set(FrameType) - {FrameType.DIED, FrameType.READY}:  # these are only TCP's
        size = {FrameType.EAGER: 5, FrameType.DATA: 5}.get(kind, 0)
        frame = Frame(kind, 2**40, 2**63 + 1, 2**64 - 1, size, 0)
        assert Frame.unpack(memoryview(frame.pack() + b"x" * size)) == frame


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"short", "a message of 5 bytes"),
        (b"\0" * HEADER_SIZE, "not a frame"),
        (b"fm\x63" + b"\0" * (HEADER_SIZE - 3), "not a frame"),
        (Frame(FrameType.EAGER, size_bytes=3).pack() + b"xx", "EAGER frame with 2 bytes of a message of 3"),
        (Frame(FrameType.EAGER, size_bytes=1 << 19).pack() + bytes(1 << 19), "EAGER frame"),
        (Frame(FrameType.DATA, size_bytes=9, offset=8).pack() + b"xx", "DATA frame with 2 bytes from 8 on"),
        (Frame(FrameType.DATA, size_bytes=9).pack(), "DATA frame with 0 bytes"),
        (Frame(FrameType.DATA, size_bytes=1 << 30).pack() + bytes(MAX_PAYLOAD + 1), "DATA frame"),
    ],
)
def test_malformed_frames_are_refused(data, words):
    """Bytes that no rank sends raise ProtocolError."""
    with pytest.raises(ProtocolError, match=words):
        Frame.unpack(memoryview(data))


class _DataPlane:
    """A data plane whose operations end at once."""

    def __init__(self):
        self.sequencer = Sequencer(lambda: False)

    def all_gather_calls(self, own, table):
        table.reshape(2, -1)[:] = own

    def await_briefly(self, _request):
        return None

    def wait_for(self, _requests, _deadline, meanwhile=lambda: None):
        meanwhile()
        return True


def small_call(**options):
    return CollectiveSignature(operation="allreduce", dtype="float32", reduce_op="SUM", count=2, **options)


def group_of_two(**options):
    """A group in which an abort is a failure."""
    group = SimpleNamespace(rank=1, world_size=2, name="world", failure=None, **options)

    def abort(why):
        group.failure = why if isinstance(why, fd.DistributedError) else fd.DistributedError(why)

    group.abort = abort
    return group


def test_an_encoded_call_is_stamped():
    """Another sequence number and payload give what encoding such a call gives."""
    for payload in (b"", b"12345678", bytes(MAX_CALL_PAYLOAD)):
        call = small_call(payload=payload)
        assert stamp(small_call().encode(), 1 << 40, payload) == call.at(1 << 40).encode()


def test_a_small_call_needs_one_exchange():
    """All ranks' records, with the sequence numbers that calls of both ways take in turns."""
    plane = _DataPlane()
    verifier = MpiVerifier(group_of_two(), plane, lambda _sequence: (), lambda: None)
    for sequence in (0, 2):
        records = verifier.exchange(small_call().encode(), b"elements", 30)
        assert records == 2 * small_call(payload=b"elements").at(sequence).encode()
        assert verifier.num_entered == sequence + 1
        verifier.verify(small_call(), 30)
    assert plane.sequencer.position == 4


def test_a_small_call_of_a_late_rank_is_waited_for(monkeypatch):
    """A call that is not over at once is waited for like any other, once, and gives the same records."""
    plane, waited = _DataPlane(), []
    monkeypatch.setattr(plane, "await_briefly", lambda request: request or "pending", raising=False)
    monkeypatch.setattr(plane, "wait_for", lambda requests, *_: waited.append(requests) or True)
    verifier = MpiVerifier(group_of_two(), plane, lambda _sequence: (), lambda: None)
    assert verifier.exchange(small_call().encode(), b"x", 30) == 2 * small_call(payload=b"x").encode()
    assert waited == [["pending"]]
    verifier.verify(small_call(), 30)
    assert len(waited) == 2


def test_small_calls_that_differ(monkeypatch):
    """Another call of the other rank is an error that names both, and ends the group."""
    plane, group = _DataPlane(), group_of_two()

    def gather(own, table):
        rows = table.reshape(2, -1)
        rows[1] = own
        rows[0] = np.frombuffer(small_call(root=1).encode(), np.uint8)

    monkeypatch.setattr(plane, "all_gather_calls", gather)
    verifier = MpiVerifier(group, plane, lambda _sequence: (), lambda: None)
    for _ in range(2):  # the second time the group has ended
        with pytest.raises(fd.CollectiveMismatchError, match="root=1"):
            verifier.exchange(small_call().encode(), b"x", 30)
    assert isinstance(group.failure, fd.CollectiveMismatchError)


@pytest.mark.parametrize("where", ["await_briefly", "turn", "poll"])
def test_an_interrupted_small_call_ends_the_group(where, monkeypatch):
    """An exception of a signal's handler is raised, the other ranks learn of it, and MPI keeps what it still needs."""
    plane, group, abandoned = _DataPlane(), group_of_two(), []

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plane, "all_gather_calls", lambda own, table: "request")
    monkeypatch.setattr(plane, "abandon", abandoned.extend, raising=False)
    if where == "await_briefly":
        monkeypatch.setattr(plane, where, interrupt)
    if where == "turn":
        plane.sequencer.reserve()  # a started call that has not ended
        monkeypatch.setattr(plane.sequencer, "wait", interrupt)
    verifier = MpiVerifier(group, plane, lambda _sequence: (), interrupt)
    with pytest.raises(KeyboardInterrupt):
        verifier.exchange(small_call().encode(), b"x", 30)
    assert group.failure is not None
    assert abandoned == (["request"] if where == "await_briefly" else [])


def test_a_group_that_fails_during_a_small_call_keeps_its_request(monkeypatch):
    """A request that is not over when the group fails is left to MPI with its memory."""
    plane, group, abandoned = _DataPlane(), group_of_two(), []

    def fail(request):
        group.failure = fd.PeerLostError("rank 0 left", ranks=(0,))
        return request

    monkeypatch.setattr(plane, "all_gather_calls", lambda own, table: "request")
    monkeypatch.setattr(plane, "abandon", abandoned.extend, raising=False)
    monkeypatch.setattr(plane, "await_briefly", fail)
    verifier = MpiVerifier(group, plane, lambda _sequence: (), lambda: None)
    with pytest.raises(fd.PeerLostError, match="rank 0 left"):
        verifier.exchange(small_call().encode(), b"x", 30)
    assert abandoned == ["request"]


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_elements_in_records(dtype):
    """Elements are taken from records at any place in memory, and what is no plain tensor is left to others."""
    enable_tensor_views()
    compiled = load()
    parts = [torch.arange(rank, rank + 5).to(dtype) for rank in range(3)]
    out = torch.empty_like(parts[0])
    sent = [compiled.eager_elements(one, out, 0, fd.ReduceOp.MAX.number, 64) for one in parts]
    assert sent == [bytes(bytes_of(one)) for one in parts]
    for start in (0, 3, 4):
        table = b"".join((b"?" * start + one).ljust(64) for one in sent)
        assert compiled.fold_eager(out, table, 3, start, out.nbytes, fd.ReduceOp.MAX.number)
        assert torch.equal(out, torch.stack(parts).amax(0))
        assert compiled.join_eager(out, table, 3, start, out.nbytes, 1, 1)
        assert torch.equal(out, parts[1])
        joined = out.new_empty(15)
        assert compiled.join_eager(joined, table, 3, start, out.nbytes, 0, 3)
        assert torch.equal(joined, torch.cat(parts))
    resized = torch.empty(1000, dtype=dtype)
    assert not compiled.fold_eager(resized, table, 3, 4, out.nbytes, fd.ReduceOp.MAX.number)
    assert not compiled.join_eager(resized, table, 3, 4, out.nbytes, 0, 3)
    assert compiled.eager_elements(parts[0], None, 3, -1, 64) == sent[0]
    refused = [
        (torch.ones(5, requires_grad=True), torch.empty(5), 0),
        (parts[0], out[:4], 0),
        (parts[0], out.view(5, 1), 0),
        (parts[0], torch.empty(16, dtype=dtype), 3),
        (torch.ones(5, 2).to(dtype).t(), torch.empty(2, 5, dtype=dtype), 0),
        (torch.ones(65, dtype=torch.int8), torch.empty(65, dtype=torch.int8), 0),
    ]
    assert [compiled.eager_elements(*one, -1, 64) for one in refused] == [None] * 6
    bits = compiled.eager_elements(parts[0], out, 0, fd.ReduceOp.BAND.number, 64)
    assert (bits is None) == dtype.is_floating_point  # no bits are folded there


@pytest.mark.parametrize("gave_up", [False, True])
def test_a_late_rank_raises_when_others_gave_up(gave_up):
    """A collective that others gave up raises on the late rank, though MPI completes it there."""
    group = SimpleNamespace(rank=1, world_size=2, name="world", failure=None, abort=lambda _: None)

    def look():
        if gave_up:
            group.failure = fd.DistributedTimeoutError("rank 1 was late", ranks=(1,))

    agreement = MpiVerifier(group, _DataPlane(), lambda _sequence: (), look)
    if gave_up:
        with pytest.raises(fd.DistributedTimeoutError, match="rank 1 was late"):
            agreement.verify(CollectiveSignature(operation="barrier"), 30)
    else:
        assert agreement.verify(CollectiveSignature(operation="barrier", payload=b"x"), 30) == [b"x", b"x"]


@pytest.mark.parametrize(("rank", "late", "speaks"), [(0, (1,), True), (1, (0,), True), (1, (2,), False)])
def test_a_long_wait_names_late_ranks(rank, late, speaks, monkeypatch, caplog):
    """The first waiting rank logs which ranks have not called; others don't."""
    monkeypatch.setattr("ferrodist.deadline.LONG_WAIT_SECONDS", 0.0)
    group = SimpleNamespace(rank=rank, world_size=2, name="world", failure=None)
    MpiVerifier(group, _DataPlane(), lambda _sequence: late, lambda: None).verify(
        CollectiveSignature(operation="barrier"), 30
    )
    expected = f"barrier() on group 'world', operation 0: rank {late[0]} has not called it yet, and rank {rank} waits"
    assert [record.getMessage().startswith(expected) for record in caplog.records] == [True] * speaks


def _interrupt(*_arguments):
    raise KeyboardInterrupt


def _group_of_two(aborts):
    return SimpleNamespace(rank=0, world_size=2, name="world", failure=None, attachments={}, abort=aborts.append)


def test_an_interrupted_verification_ends_the_group():
    """When Ctrl-C breaks off a rank's verification, the group is aborted."""
    aborts, plane = [], _DataPlane()
    plane.wait_for = _interrupt
    agreement = MpiVerifier(_group_of_two(aborts), plane, lambda _sequence: (), lambda: None)
    with pytest.raises(KeyboardInterrupt):
        agreement.verify(CollectiveSignature(operation="barrier"), 30)
    assert aborts == ["rank 0 left barrier() by KeyboardInterrupt"]


def test_an_interrupted_collective_ends_the_group():
    """When Ctrl-C breaks off a rank's data movement, the group is aborted."""
    aborts, plane = [], _DataPlane()
    group = _group_of_two(aborts)
    group.data_plane, group.verifier = plane, MpiVerifier(group, plane, lambda _sequence: (), lambda: None)
    plane.broadcast = _interrupt
    with pytest.raises(KeyboardInterrupt):
        DataPlaneEngine(group).run(
            CollectiveOp(kind=CollectiveKind.BROADCAST, out=torch.ones(100), root=0, timeout=30),
            group.verifier.reserve(),
        )
    assert len(aborts) == 1
    assert "rank 0 left broadcast(float32[100], root=0), operation 0, by KeyboardInterrupt" in aborts[0]


class _NoMessages:
    """A communicator of two ranks that accepts sends and has nothing to receive."""

    def __init__(self):
        self.sent = []
        self.has_room = True

    def Get_size(self):
        return 2

    def Isend(self, buffer, destination, _tag):
        self.sent.append(destination)
        return SimpleNamespace(Test=lambda: self.has_room)

    def Improbe(self, *_arguments):
        return None


def test_frames_beyond_the_window_can_be_dropped():
    """MPI gets one window of frames per rank, and more when these are sent; urgent frames don't wait."""
    communicator = _NoMessages()
    communicator.has_room = False
    transport = FrameTransport(SimpleNamespace(Status=object, BYTE=0, ANY_SOURCE=-1), communicator, lambda *_: None)
    for owner in range(9):
        data = memoryview(bytearray(MAX_PAYLOAD))
        transport.push(1, QueuedFrame(Frame(FrameType.DATA, size_bytes=MAX_PAYLOAD), data, owner))
    assert len(communicator.sent) == 4
    transport.push(1, QueuedFrame(Frame(FrameType.PING)))
    assert len(communicator.sent) == 5
    assert transport.drop(1, 0) == 0
    assert transport.drop(1, 8) == 1
    communicator.has_room = True
    assert transport.poll()
    assert len(communicator.sent) == 5 + 4
    assert transport.poll()
    assert transport.is_idle()


def test_senders_learn_of_copied_frames_when_a_later_one_fails():
    """A frame that MPI has copied is reported to its sender, also if MPI raises for another rank's frame after it."""
    communicator, copied = _NoMessages(), []
    transport = FrameTransport(SimpleNamespace(Status=object, BYTE=0, ANY_SOURCE=-1), communicator, lambda *_: None)
    communicator.has_room = False
    data = memoryview(bytearray(MAX_PAYLOAD))
    for rank in (0, 1):
        for number in range(5):
            queued = QueuedFrame(
                Frame(FrameType.DATA), data, on_sent=lambda rank=rank, n=number: copied.append((rank, n))
            )
            transport.push(rank, queued)
    assert len(copied) == 8

    def isend(_buffer, destination, _tag):
        if destination == 1:
            raise ConnectionError("rank 1 is dead")
        return SimpleNamespace(Test=lambda: True)

    communicator.has_room, communicator.Isend = True, isend
    with pytest.raises(ConnectionError, match="rank 1 is dead"):
        transport.poll()
    assert copied[8:] == [(0, 4)]


def test_a_closed_transport_does_not_use_its_communicator():
    """After close nothing is sent or received: the communicator may have been freed."""
    communicator = _NoMessages()
    transport = FrameTransport(SimpleNamespace(Status=object, BYTE=0, ANY_SOURCE=-1), communicator, lambda *_: None)
    transport.push(1, QueuedFrame(Frame(FrameType.PING)))
    assert communicator.sent == [1]
    assert transport.poll()
    transport.close()
    communicator.Isend = communicator.Improbe = lambda *_: pytest.fail("the communicator was used")
    transport.push(1, QueuedFrame(Frame(FrameType.PING)))
    assert not transport.poll()


def test_a_failed_collective_abandons_pending_requests(monkeypatch):
    """When a reduction fails, the request of the next segment is abandoned, which keeps its buffers."""
    aborts, plane, abandoned, started = [], _DataPlane(), [], []
    group = _group_of_two(aborts)
    group.data_plane, group.verifier = plane, MpiVerifier(group, plane, lambda _sequence: (), lambda: None)

    def start(*_arguments):
        started.append(len(started))
        return [started[-1]]

    def run_out_of_memory(*_arguments):
        raise MemoryError

    plane.all_to_all, plane.abandon = start, abandoned.extend
    monkeypatch.setattr(reference, "fold", run_out_of_memory)
    with pytest.raises(MemoryError):
        DataPlaneEngine(group).run(
            CollectiveOp(
                kind=CollectiveKind.REDUCE_SCATTER,
                source=torch.ones(1 << 21),
                out=torch.empty(1 << 20),
                reduction=fd.ReduceOp.SUM,
                counts=[1 << 20] * 2,
                dim=0,
                timeout=30,
            ),
            group.verifier.reserve(),
        )
    assert started == [0, 1]
    assert abandoned == [1]
    assert len(aborts) == 1


class _NoTransport(FramedBackend):
    """A group that receives frames and sends none."""

    def close(self, timeout=None):
        pass

    def _notify_left(self, group_id, members):
        pass

    def _push_frame(self, *_arguments, **_options):
        pass

    def _drop_frames(self, send):
        pass


def test_a_data_frame_out_of_order_is_refused():
    """A DATA frame that was not granted, or is not the next one, raises ProtocolError."""
    group = _NoTransport(0, 2, timeout=60, name="world")
    group._on_offer(1, Frame(FrameType.OFFER, 7, size_bytes=1 << 20), memoryview(b""))
    piece = Frame(FrameType.DATA, 7, size_bytes=1 << 20)
    with pytest.raises(ProtocolError, match="a piece of message 7 of rank 1 out of its order"):
        group._continued_message(1, piece)
    group._withdraw_from(1)
    assert group._continued_message(1, piece) is None  # of one that is withdrawn it goes nowhere
    group._on_offer(1, Frame(FrameType.OFFER, 7, size_bytes=1 << 20), memoryview(b""))
    (message,) = group._incoming.values()
    message.granted = True
    assert group._continued_message(1, piece) is message
    with pytest.raises(ProtocolError, match="out of its order"):
        group._continued_message(1, piece._replace(offset=5))


class _RefusingMpi:
    """An MPI that refuses everything."""

    BYTE = 0

    class Exception(RuntimeError):  # noqa: A001 - mpi4py's name
        """What it raises."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def Iallgather(self, *_arguments):
        raise self.Exception("invalid communicator")


def _make_plane(mpi, explained, *, cannot_complete=True):
    return MpiDataPlane(mpi, mpi, lambda: cannot_complete, explained.append, lambda: 0.0)


def test_an_operation_that_mpi_refuses_ends_the_group():
    """An operation that MPI refuses raises no exception of MPI's: the group fails, and waits return False."""
    explained = []
    plane = _make_plane(_RefusingMpi(), explained)
    before = num_leaked()
    assert not plane.wait_for([plane.all_gather_calls(b"", b"")], Deadline(60))
    assert [str(error) for error in explained] == ["invalid communicator"]
    assert num_leaked() == before, "MPI has nothing that this process must not end with"


def test_a_closed_data_plane_starts_nothing():
    """After close no operation is started: the communicator may have been freed."""
    explained = []
    plane = _make_plane(_RefusingMpi(), explained)
    plane.close()
    assert not plane.wait_for([plane.all_gather_calls(b"", b"")], Deadline(60))
    assert explained == []


def test_a_communicator_with_pending_operations_is_not_freed():
    """A group that is closed during a collective does not free its communicator."""
    has_ended = []
    mpi = _RefusingMpi()
    mpi.Iallgather = lambda *_arguments: SimpleNamespace(Test=lambda: bool(has_ended))
    plane = _make_plane(mpi, [], cannot_complete=False)
    request = plane.all_gather_calls(b"", b"")
    assert not plane.close()
    has_ended.append(True)
    assert plane.wait_for([request], Deadline(60))
    assert plane.close()


class _Coming(_NoMessages):
    """A communicator that is receiving messages, given as (source, test of the request, data)."""

    def __init__(self, *messages):
        super().__init__()
        self.messages = list(messages)

    def Improbe(self, _source, _tag, status):
        if not self.messages:
            return None
        source, outcome, content = self.messages.pop(0)
        status.Get_source, status.Get_count = lambda: source, lambda _type: len(content)

        def receive(buffer):
            buffer[0][:] = bytearray(content)
            return SimpleNamespace(Test=outcome)

        return SimpleNamespace(Irecv=receive)


def _raise():
    raise _RefusingMpi.Exception("the process has failed")


def test_an_incomplete_frame_of_a_dead_rank_is_dropped():
    """An incomplete frame of a dead rank is dropped; other ranks' frames are handled."""
    frame = Frame(FrameType.PING).pack()
    half_come, raises, whole = (0, lambda: False, frame), (0, _raise, frame), (1, lambda: True, frame)
    mpi = SimpleNamespace(Status=SimpleNamespace, BYTE=0, ANY_SOURCE=-1, Exception=_RefusingMpi.Exception)
    taken = []
    transport = FrameTransport(mpi, _Coming(raises, half_come, whole), lambda source, *_: taken.append(source))
    with pytest.raises(mpi.Exception):
        transport.poll()
    assert transport.poll()
    assert taken == [1]
    assert transport.num_receiving == 0
    transport = FrameTransport(mpi, _Coming(half_come, whole), lambda source, *_: taken.append(source))
    transport.mark_lost(0)
    assert transport.poll()
    assert taken == [1, 1]
    assert transport.num_receiving == 0
