"""Hybrid and NCCL groups as groups: control groups, refused calls, unavailable NCCL; over a fake of NCCL."""

from __future__ import annotations

import copy
import socket
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from nccl_fakes import FakeNccl, fake_groups

import ferrodist as fd
from ferrodist.backends.native import backend as native_backend
from ferrodist.backends.nccl import backend, communicator
from ferrodist.backends.nccl import backend as nccl_group
from ferrodist.backends.nccl.communicator import NcclUniqueId
from ferrodist.backends.tcp import TcpBackend
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.backend.suite import BACKEND_CHECKS
from ferrodist.testing.conformance.collectives.suite import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable


def native_hybrids(world_size: int) -> list[fd.HybridBackend]:
    """Hybrid groups over the native engine, whose ranks are threads."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    made: dict[int, fd.Backend] = {}

    def make(rank: int) -> None:
        made[rank] = fd.NativeBackend(rank, world_size, address, listener=listener if rank == 0 else None, timeout=45.0)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return fake_groups(world_size, control=lambda _: [made[rank] for rank in range(world_size)])


@pytest.mark.skipif(not fd.is_native_available(), reason="this installation was built without the native engine")
@pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_cpu_tensors_use_the_control_group(check) -> None:
    """Collectives and messages of CPU tensors pass the native engine's conformance checks."""
    run_ranks(check, 2, backend=native_hybrids, timeout=60.0)


def test_bytes_use_the_control_group() -> None:
    """Bytes, barriers and errors are the control group's."""

    def program(group: fd.HybridBackend) -> None:
        if group.rank == 0:
            group.send(b"abc", 1, tag=7)
        else:
            buffer = bytearray(3)
            assert group.recv(buffer, 0, tag=7) == 0
            assert buffer == b"abc"
        group.barrier()
        assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]
        assert fd.all_gather_object(group.rank) == [0, 1]
        assert isinstance(group.tcp, fd.SimulatedBackend)
        group.synchronize_nccl()
        assert group.shared.opened == [], "no GPU was used"

    run_ranks(program, 2, backend=fake_groups)


def test_nccl_and_tcp_of_a_hybrid_group_are_groups() -> None:
    """`nccl` and `tcp` can be passed as ``group=``, interleaved with the group itself, and have the named classes."""

    def program(group: fd.HybridBackend) -> None:
        assert isinstance(group.nccl, fd.NcclBackend)
        assert group.nccl is group.nccl
        assert (group.nccl.rank, group.nccl.world_size, group.nccl.name) == (group.rank, 2, "world")
        for one in (group.nccl, group, group.tcp, group.nccl, group.tcp):
            assert fd.allreduce(torch.ones(2), group=one).tolist() == [2, 2]
            assert fd.async_allreduce(torch.ones(2), group=one).wait().tolist() == [2, 2]
        fd.barrier(fd.new_group([1, 0], group=group.nccl))
        with pytest.raises(fd.UnsupportedOpError, match="no bytes"):
            group.nccl.send(b"x", 1 - group.rank)
        group.tcp.barrier()
        group.nccl.close()
        with pytest.raises(fd.GroupClosedError):
            group.barrier()

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("kind", [fd.HybridBackend, fd.NcclBackend])
def test_constructors_raise_without_nccl(kind: type[fd.HybridBackend | fd.NcclBackend]) -> None:
    """Without NCCL or a GPU the constructor raises the reason, and leaves the control group open."""
    (control,) = fd.SimulatedBackend.create_group(1)
    if fd.is_nccl_available():
        pytest.skip("this machine has NCCL and a GPU")
    with pytest.raises(fd.BackendUnavailable, match=rf"{kind.__name__} needs NCCL .* rank 0 can't use it: .*doctor"):
        kind(control)
    control.barrier()


@pytest.mark.parametrize("kind", [fd.HybridBackend, fd.NcclBackend])
@pytest.mark.parametrize("stream", ["x", 0, object()])
def test_a_stream_that_is_not_cudas_is_refused(kind: type[fd.HybridBackend | fd.NcclBackend], stream: object) -> None:
    """Another object is refused when the group is made, not when a GPU is first used."""
    (control,) = fd.SimulatedBackend.create_group(1)
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes a torch.cuda.Stream as stream, or None, not"):
        kind(control, stream=stream, library=FakeNccl)


def test_nccl_groups_refuse_bytes() -> None:
    """An NcclBackend's send and recv raise, with advice; everything else works, and the group stays usable."""

    def program(group: fd.NcclBackend) -> None:
        other = 1 - group.rank
        for one in (group, fd.new_group([0, 1])):
            for call in (
                lambda one=one: one.send(b"x", other),
                lambda one=one: one.recv(bytearray(1), other),
                lambda one=one: one.isend(b"x", other),
                lambda one=one: one.irecv(bytearray(1), other),
            ):
                with pytest.raises(fd.UnsupportedOpError, match=r"no bytes.*hybrid.*ferrodist.send"):
                    call()
            one.barrier()
            fd.barrier(one)
            assert fd.allreduce(torch.ones(2), group=one).tolist() == [2, 2]
            assert fd.all_gather_object(group.rank, group=one) == [0, 1]
            assert fd.sendrecv(torch.tensor([group.rank]), other, (1,), other, group=one).item() == other
        assert group.shared.opened == [], "no GPU was used"
        assert group.failure is None

    run_ranks(program, 2, backend=partial(fake_groups, kind=fd.NcclBackend))


_MODEL = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
_BATCH = torch.randn(4, 4)


def _train(group: fd.Backend, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    model, alone = copy.deepcopy(_MODEL), copy.deepcopy(_MODEL)
    wrapped = wrap(model)
    wrapped(_BATCH.chunk(2)[group.rank]).square().mean().backward()
    alone(_BATCH).square().mean().backward()
    for module in (wrapped, alone):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    found = wrapped.full_state_dict() if isinstance(wrapped, fd.FSDP) else model.state_dict()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(found[name], expected)


def _run_pipeline(group: fd.Backend) -> None:
    stages = [torch.nn.Linear(3, 300), torch.nn.Linear(300, 1)]
    pipeline = fd.Pipeline(stages[group.rank], group, 2, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.randn(200, 3)
    assert pipeline.step(batch if group.rank == 0 else None, batch[:, :1] if group.rank else None) >= 0


@pytest.mark.parametrize(
    "program",
    [partial(_train, wrap=fd.DDP), partial(_train, wrap=fd.FSDP), _run_pipeline],
    ids=["DDP", "FSDP", "Pipeline"],
)
def test_models_train_in_nccl_groups(program) -> None:
    """The metadata of training travels over an NcclBackend's control group."""
    run_ranks(program, 2, backend=partial(fake_groups, kind=fd.NcclBackend))


def test_attributes_are_the_control_groups() -> None:
    """Rank, size, name and timeout are the control group's."""
    (group,) = fake_groups(1, timeout=12.5)
    assert (group.rank, group.world_size, group.timeout, group.name) == (0, 1, 12.5, "world")
    assert "HybridBackend(rank=0" in repr(group)
    group.close()
    assert isinstance(group.failure, fd.GroupClosedError)


@pytest.mark.parametrize("reason", [None, "there is no GPU"])
def test_the_best_backend_is_hybrid_where_all_have_nccl(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name the group is hybrid when every rank can use NCCL, else the host's."""
    controls = iter(fd.SimulatedBackend.create_group(1))
    monkeypatch.setattr(backend, "open_host_group", lambda *_: next(controls))
    monkeypatch.setattr(nccl_group, "why_no_nccl", lambda: reason)
    group = backend.best_backend(None, 5.0, Deadline(5.0))
    assert type(group) is (fd.SimulatedBackend if reason else fd.HybridBackend)
    group.close()


def test_reasons_without_nccl_reach_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks learn in one step which ranks lack NCCL and why."""
    own = threading.local()
    monkeypatch.setattr(nccl_group, "why_no_nccl", lambda: own.reason)

    def program(group: fd.Backend) -> None:
        own.reason = "the driver is too old" if group.rank == 1 else None
        deadline = Deadline(5.0)
        assert nccl_group.reasons_without_nccl(group, deadline) == {1: "the driver is too old"}
        with pytest.raises(fd.BackendUnavailable, match=r"HybridBackend needs NCCL on all ranks, and rank 1.*too old"):
            fd.HybridBackend._check_nccl(group, deadline)

    run_ranks(program, 3)


@pytest.mark.parametrize("name", ["nccl", "hybrid"])
def test_named_backends_raise_the_reason_without_nccl(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Where NCCL can't be used, naming its backends raises the reason and leaves nothing behind."""
    monkeypatch.setattr(nccl_group, "why_no_nccl", lambda: "no GPU is there")
    with pytest.raises(fd.BackendUnavailable, match=r"no GPU is there.*ferrodist doctor"):
        fd.init_process_group(name, rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    assert not fd.is_initialized()


class _Reasons:
    """A loader that raises, or returns a fake."""

    @staticmethod
    def no_binding() -> FakeNccl:
        raise ModuleNotFoundError("No module named 'nccl'")

    @staticmethod
    def broken_binding() -> FakeNccl:
        raise ImportError("undefined symbol: ncclOfAnotherRelease")

    @staticmethod
    def no_library() -> FakeNccl:
        raise RuntimeError("libnccl.so.2: cannot open shared object file")


@pytest.mark.parametrize(
    ("opener", "said"),
    [
        (_Reasons.no_binding, r"\[nccl\]"),
        (_Reasons.broken_binding, "undefined symbol.*force-reinstall"),
        (_Reasons.no_library, "libnccl.so.2"),
        (FakeNccl, None),
    ],
)
def test_reasons_why_nccl_cannot_be_loaded(opener, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the missing part, with advice."""
    monkeypatch.setattr(communicator, "_loaded", None)
    monkeypatch.setattr(communicator, "why_no_gpu", lambda: None)
    reason = communicator.why_no_nccl(opener)
    assert fd.is_nccl_available() is (said is None)
    if said is None:
        assert isinstance(communicator.load_nccl(), FakeNccl)
        return
    assert communicator.why_no_nccl(FakeNccl) == reason, "it is tried once"
    with pytest.raises(fd.BackendUnavailable, match=said):
        communicator.load_nccl()


def test_reasons_for_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA and a torch that sees no GPU have different reasons."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in communicator.why_no_gpu()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" in communicator.why_no_gpu()
    assert "CUDA_VISIBLE_DEVICES" in communicator.why_no_nccl()
    assert not fd.is_nccl_available()


def test_unique_ids() -> None:
    """A unique id has 128 bytes, and its repr does not reveal them."""
    made = NcclUniqueId.create(FakeNccl())
    assert len(bytes(made)) == 128
    assert fd.NcclUniqueId(made.internal) == made
    assert made.internal.hex() not in repr(made)
    with pytest.raises(ValueError, match="128"):
        fd.NcclUniqueId(b"short")
    with pytest.raises(TypeError, match="bytes"):
        fd.NcclUniqueId("x" * 128)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_hybrid_groups_conform(check) -> None:
    """A hybrid group passes the public conformance suite of backends."""
    check(fake_groups, 3)


def test_a_missing_engine_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 warns where TCP was not asked for; a group of one rank does not."""
    native_backend._warn_of_slow_collectives.cache_clear()
    monkeypatch.setattr(native_backend, "is_native_available", lambda: False)
    monkeypatch.setattr(native_backend, "why_no_native", lambda: "No module named 'ferrodist._native'")
    monkeypatch.setattr(TcpBackend, "from_membership", lambda *_: "a group")
    for rank, world_size in ((0, 1), (1, 2), (0, 2), (0, 2)):
        member = SimpleNamespace(rank=rank, world_size=world_size)
        assert native_backend.open_host_group(member, 5.0, Deadline(5.0)) == "a group"
        assert len(caplog.records) == ((rank, world_size) == (0, 2))
    assert "no native engine (No module named 'ferrodist._native')" in caplog.text
    native_backend._warn_of_slow_collectives.cache_clear()
