"""How torch's groups on ferrodist begin and end: stores, worlds of several backends, threads, timeouts, launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_world import run_world, same, world

import ferrodist
from ferrodist.backends.subgroup import SubBackend
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupAbortedError, PeerLostError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend import group_of, register

SOURCE = Path(ferrodist.__file__).parents[1]
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SOON = timedelta(milliseconds=200)

pytestmark = pytest.mark.filterwarnings("ignore")


def total(group=None):
    ones = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(ones, group=group)
    return ones.item()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_worlds_one_after_the_other(tmp_path, monkeypatch):
    """In one process, through the same store or another, and with the environment's variables."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def body(group):
        rank = group.rank
        file = dist.FileStore(f"{tmp_path}/file", 2)
        for _ in range(5):
            dist.init_process_group("ferrodist", store=file, rank=rank, world_size=2)
            assert total() == 3.0
            dist.destroy_process_group()
        for _ in range(3):
            dist.init_process_group("ferrodist", init_method=f"file://{tmp_path}/url", rank=rank, world_size=2)
            assert total() == 3.0
            group.barrier()  # or the last to leave deletes the file when another has begun with it anew
            dist.destroy_process_group()
            group.barrier()
        for _ in range(2):
            dist.init_process_group("ferrodist", rank=rank, world_size=2)
            assert total() == 3.0
            dist.destroy_process_group()
            group.barrier()  # the process of rank 0 serves the store
        served = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
        for number in range(3):
            store = dist.PrefixStore(f"job {number // 2}", served)
            dist.init_process_group("ferrodist", store=store, rank=rank, world_size=2)
            pairs = [dist.new_group([0, 1]) for _ in range(3)]
            assert [total(pair) for pair in pairs] == [3.0] * 3
            assert all(isinstance(group_of(pair), SubBackend) for pair in pairs)  # made without a message
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            assert future.then(lambda _: total()).then(lambda done: done.value() + total()).wait() == 6.0
            dist.destroy_process_group()
        dist.init_process_group("ferrodist", store=dist.HashStore(), rank=0, world_size=1)
        assert total() == 1.0
        dist.destroy_process_group()
        for each in threading.enumerate():
            if each.name.startswith("ferrodist-futures"):
                each.join(20.0)
                assert not each.is_alive()

    run_ranks(body, 2, backend="tcp")


def test_groups_in_worlds_of_others():
    """Groups of ferrodist's in gloo's world and the reverse, also of some ranks, and split ones."""

    def program():
        rank = dist.get_rank()
        own = dist.get_backend()
        other = {"gloo": "ferrodist", "ferrodist": "gloo"}[own]
        foreign = dist.new_group(backend=other)
        some = dist.new_group([0, 2], backend=other)
        found = [total(), total(foreign)]
        if rank != 1:
            found.append(total(some))
        if own == "ferrodist":
            world = dist.group.WORLD
            part = world.split_group([0, 2], group_name=f"part {dist.get_world_size()}")
            assert (part is None) == (rank == 1)
            if part is not None:
                ones = torch.ones(2)
                part.allreduce([ones]).wait()
                assert ones.tolist() == [2.0, 2.0]
        for group in (foreign, some) if rank != 1 else (foreign,):
            dist.destroy_process_group(group)
        return [*found, total()]

    ranks = run_world(program, 3)
    for backend in ("gloo", "ferrodist"):
        assert [found[backend] for found in ranks] == [[6.0, 6.0, 4.0, 6.0], [6.0, 6.0, 6.0], [6.0, 6.0, 4.0, 6.0]]


def test_one_device_for_ferrodist_and_another_for_others():
    """A group whose other device is another backend's is made, though torch can't look into groups of ours (2.15)."""

    def program():
        half = dist.new_group([0], backend="cpu:ferrodist,cuda:nccl")
        return [total(), half == dist.GroupMember.NON_GROUP_MEMBER]

    ranks = run_world(program, 2, backends=("cpu:ferrodist,cuda:nccl", "cpu:gloo,cuda:ferrodist"))
    assert [list(found.values()) for found in ranks] == [[[3.0, False]] * 2, [[3.0, True]] * 2]


@pytest.mark.skipif(TORCH < (2, 15), reason="before 2.15 torch splits groups of accelerators only")
def test_a_split_by_torch_s_function():
    """`torch.distributed.split_group` gives members a group with a name and a store, and others what torch gives."""

    def program():
        found = []
        for ranks in ([[0, 2]], [[2, 1], [0]]):
            part = dist.split_group(split_ranks=ranks, timeout=timedelta(seconds=7))
            if part == dist.GroupMember.NON_GROUP_MEMBER:
                found.append(None)
                continue
            assert group_of(part).timeout == 7.0
            part.get_group_store().set("name", part.group_name)
            mine = next(each for each in ranks if dist.get_rank() in each)
            found.append([dist.get_process_group_ranks(part) == mine, total(part)])
        return found

    found = [each["ferrodist"] for each in run_world(program, 3, backends=("ferrodist",))]
    assert found == [[[True, 4.0], [True, 1.0]], [None, [True, 5.0]], [[True, 4.0], [True, 5.0]]]


def test_coalesced_calls_and_batches():
    """Each way that torch's functions join calls in has the results that gloo has."""

    def program():
        rank, cpu = dist.get_rank(), torch.device("cpu")
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        found = []
        for device in (None, cpu) if dist.get_backend() == "ferrodist" else (None, None):
            for is_async in (False, True):
                summed = [torch.full((2,), rank + number + 1.0) for number in range(3)]
                gathered = [torch.zeros(4) for _ in summed]
                parts = [torch.zeros(1) for _ in summed]
                for calls in (
                    lambda summed=summed: [dist.all_reduce(each) for each in summed],
                    lambda summed=summed, out=gathered: [gather(*each) for each in zip(out, summed, strict=True)],
                    lambda summed=summed, out=parts: [scatter(*each) for each in zip(out, summed, strict=True)],
                ):
                    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=is_async) as manager:
                        calls()
                    if is_async:
                        manager.wait()
                found.append([summed, gathered, parts])
        mine, theirs = torch.tensor([float(rank)]), torch.zeros(1)
        batch = [dist.P2POp(dist.irecv, theirs, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
        works = dist.batch_isend_irecv(batch)
        for work in works:
            work.wait()
        return [*found, len(works), theirs]

    for found in run_world(program, 2):
        assert same(found["gloo"], found["ferrodist"])


ALONE = """
import torch, torch.distributed as dist
if {registered}:
    from ferrodist.torch_backend import register
    register()
dist.init_process_group("ferrodist", store=dist.HashStore(), rank=0, world_size=1)
dist.new_group([0], backend="ferrodist")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
print("done")
"""


def run_alone(env, *, registered=False):
    """A program of one rank with variables of the environment; what it printed."""
    paths = os.pathsep.join([*env.pop("paths", []), str(SOURCE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE.format(registered=registered)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_variables_that_change_how_torch_makes_groups():
    """Without backends loaded at torch's import, and with what torch attaches to groups, programs run as they are."""
    finds_backends = hasattr(dist.Backend, "_ensure_backend_registered")  # from 2.14 on
    done = run_alone(
        {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCH_FR_BUFFER_SIZE": "100",
            "TORCH_DIST_NAN_CHECK": "1",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        },
        registered=not finds_backends,
    )
    assert done.stdout == "done\n", done.stderr


def test_the_backend_is_found_by_both_groups_of_entry_points():
    """torch loads all of one group at its import, and one of the other when a program names a backend."""
    for group in ("torch.backends", "torch.distributed.backends"):
        assert [each.load() for each in entry_points(group=group) if each.name == "ferrodist"] == [register]


TORCHCOMMS = {
    "__init__.py": "def new_comm(name, *_, **__):\n    raise RuntimeError(f'torchcomms was asked for {name}')\n"
    "def is_backend_built(name):\n    return False\n",
    "_comms.py": "class _BackendWrapper: pass\ndef _is_backend_registered(name):\n    return False\n",
    "_backend_wrapper.py": "class _BackendWrapper: pass\n",
    "hooks.py": "class FlightRecorderHook: pass\n",
}


def test_torchcomms_is_not_asked_for_ferrodist(tmp_path):
    """A program that is told to use torchcomms works, or says which variable to unset: torchcomms has no ferrodist."""
    (tmp_path / "torchcomms").mkdir()
    for name, text in TORCHCOMMS.items():
        (tmp_path / "torchcomms" / name).write_text(text)
    done = run_alone({"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "paths": [str(tmp_path)]})
    if done.returncode:
        assert TORCH < (2, 14), done.stderr
        assert "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS, or use torch 2.14 or newer" in done.stderr
    else:
        assert done.stdout == "done\n"


def test_groups_in_threads_and_workers():
    """Each thread has a group; processes are forked in between, as those that load data are."""

    def program():
        groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(4)]
        results = {}

        def use(number):
            results[number] = [total(groups[number]) for _ in range(200)]
            dist.all_reduce(torch.ones(1), group=groups[number], async_op=True).get_future().then(
                lambda done: results.update({f"then {number}": done.value()[0].item()})
            ).wait()

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2, multiprocessing_context="fork")
        seen = [total() for _ in loader]
        for thread in threads:
            thread.join()
        assert seen == [3.0] * 4
        assert results == {number: [3.0] * 200 for number in range(4)} | {f"then {number}": 2.0 for number in range(4)}

    run_world(program, backends=("ferrodist",))


def test_timeouts_and_aborts(tmp_path):
    """A wait's ends only it; a call's or a group's ends the group. An abort wakes who waits."""

    def body(outer):
        rank = outer.rank
        with world("ferrodist", tmp_path, rank, 2):
            late = dist.new_group([0, 1], timeout=SOON)
            slow, aborted = dist.new_group([0, 1]), dist.new_group([0, 1])
            ones = torch.ones(2)
            if rank == 0:
                work = dist.all_reduce(ones, group=slow, async_op=True)
                with pytest.raises(DistributedTimeoutError):
                    work.wait(SOON)
                assert not work.is_completed()
                outer.barrier()
                work.wait()
                received = dist.irecv(torch.ones(1), 1, group=slow)
                with pytest.raises(DistributedTimeoutError):
                    received.wait(SOON)
                outer.barrier()
                received.wait()
                with pytest.raises(DistributedTimeoutError):
                    dist.barrier(group=late)
                with pytest.raises(DistributedError):
                    dist.all_reduce(ones, group=late)
                threading.Timer(0.1, aborted.abort).start()
            else:
                outer.barrier()
                dist.all_reduce(ones, group=slow)
                outer.barrier()
                dist.send(torch.ones(1), 0, group=slow)
            assert ones.tolist() == [2.0, 2.0]
            began = time.monotonic()
            with pytest.raises(GroupAbortedError if rank else DistributedError):
                dist.recv(ones, 1 - rank, group=aborted)
            assert time.monotonic() - began < 20.0
            assert total() == 3.0
            outer.barrier()

    run_ranks(body, 2, backend="tcp")


def test_who_leaves_after_its_last_collective(tmp_path):
    """It is no loss to the others, who go on among themselves; what they want of it fails."""

    def body(outer):
        with world("ferrodist", tmp_path, outer.rank, 3):
            rest = dist.new_group([0, 1])
            assert total() == 6.0
            if outer.rank == 2:
                dist.destroy_process_group()
                outer.barrier()
                return
            outer.barrier()
            assert total(rest) == 3.0
            with pytest.raises(PeerLostError, match=r"rank 2 .* has left"):
                dist.all_reduce(torch.ones(1))

    run_ranks(body, 3, backend="tcp")
