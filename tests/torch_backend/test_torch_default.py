"""One default group for ferrodist's functions and torch's, whoever made it."""

import contextvars
import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import ferrodist as fd
from ferrodist.backends.torch_default_group import open_torch_default
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks
from ferrodist.torch_backend import group_of


def run_jobs(program, size=2):
    """Run ``program(place)`` on forked ranks that have no group yet; ``place`` is what they meet by."""
    with tempfile.TemporaryDirectory() as folder:

        def body(group):
            place = {"init_method": f"file://{folder}/meeting", "rank": group.rank, "world_size": group.world_size}
            return contextvars.Context().run(program, place)

        return run_ranks(body, size, backend="tcp", timeout=100)


def run_program(program, size=2, **options):
    """Run ``program(group)`` in a job whose group is torch's default group, too."""

    def body(place):
        group = fd.init_process_group(**place, **options, torch_default=True, timeout=30)
        try:
            return program(group)
        finally:
            fd.destroy_process_group()
            assert not dist.is_initialized()
            assert not fd.is_initialized()

    return run_jobs(body, size)


def test_torchmetrics_sees_all_ranks():
    """A metric of a native program is that of all ranks' samples, on each rank."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    def program(group):
        metric = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        metric.update(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 0] if group.rank else [1, 2, 0, 0]))
        mean = torchmetrics.MeanMetric()
        mean.update(float(group.rank))
        return metric.compute().item(), mean.compute().item()

    assert run_program(program) == [(0.625, 0.5)] * 2


def test_distributed_sampler_divides_the_data():
    """Without arguments torch's sampler gives each rank its share, and all together everything."""

    def program(group):
        del group
        return list(DistributedSampler(range(8), shuffle=False))

    assert run_program(program) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_sync_batch_norm_is_torchs_own_again():
    """torch's SyncBatchNorm finds the group: on a CPU it refuses, as on any backend, and is no plain batch norm."""

    def program(group):
        del group
        with pytest.raises(ValueError, match="expected input tensor to be on"):
            torch.nn.SyncBatchNorm(2)(torch.ones(4, 2))

    run_program(program)


@pytest.mark.parametrize("backend", [None, "tcp", "gloo"])
def test_calls_of_both_kinds_share_an_order(backend):
    """Native calls and torch's, of the default group and of others, may alternate."""

    def program(group):
        assert group_of() is fd.default_group() is group
        total = torch.ones(3)
        dist.all_reduce(total)
        more = fd.allreduce(total)
        work = dist.all_reduce(total, async_op=True)
        last = fd.async_allreduce(more)
        work.wait()
        alone = dist.new_group([0])
        if group.rank:
            with pytest.raises(fd.InvalidRankError, match="rank 1 is not in this group of torch's"):
                group_of(alone)
        with pytest.raises(TypeError, match=r"not FerrodistProcessGroup: pass ferrodist\.torch_backend\.group_of"):
            fd.allreduce(total, group=dist.group.WORLD)
        pair = dist.new_group([1, 0])
        dist.all_reduce(total, group=pair)
        return total.tolist(), last.wait().tolist()

    assert run_program(program, backend=backend) == [([8.0] * 3, [8.0] * 3)] * 2


def test_groups_of_other_backends_meet_in_the_jobs_store():
    """torch's gloo makes groups in such a world, and torch's barriers at openings work."""

    def program(group):
        gloo = dist.new_group(backend="gloo")
        total = torch.ones(1)
        dist.all_reduce(total, group=gloo)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key {group.rank}", "value")
        assert store.get(f"key {1 - group.rank}") == b"value"
        dist.barrier()
        assert store.check([f"key {group.rank}"])
        assert not store.check(["nobody's"])
        assert store.compare_set("fresh", "", str(group.rank)) in {b"0", b"1"}
        dist.barrier()
        assert store.delete_key(f"key {group.rank}")
        with pytest.raises(RuntimeError, match="nobody's"):
            store.wait(["nobody's"], timedelta(seconds=0.1))
        return total.item()

    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        assert run_program(program) == [2, 2]
    finally:
        del os.environ["TORCH_DIST_INIT_BARRIER"]


def test_ranks_without_a_store_have_groups_of_our_backend():
    """Where MPI brought the ranks together torch's groups need no store, and one that does says what to do."""

    def program(group):
        end = open_torch_default(group, None, Deadline(30))
        try:
            total = torch.ones(1)
            dist.all_reduce(total, group=dist.new_group([0, 1]))
            with pytest.raises(
                (fd.UnsupportedOpError, RuntimeError), match="with backend='ferrodist', which need none"
            ):
                dist.new_group(backend="gloo")
        finally:
            end()
        assert not dist.is_initialized()
        return total.item()

    assert run_ranks(program, 2, backend="native") == [2, 2]


def test_where_only_some_ranks_ask_all_are_told():
    """The ranks would have other groups under the same name."""

    def program(place):
        def start():
            fd.init_process_group(**place, torch_default=place["rank"] == 1, timeout=30)
            fd.allreduce(torch.ones(1))

        with pytest.raises(fd.CollectiveMismatchError) as caught:
            start()
        assert not dist.is_initialized()
        return str(caught.value)

    other, asked = run_jobs(program)
    assert "barrier" in other
    assert asked.endswith("Pass torch_default=True to init_process_group on all ranks, or on none.")


def test_torchs_own_default_group_is_not_taken_away():
    """Where torch has a default group the argument is refused, and native calls go on without it."""

    def program(place):
        store = dist.FileStore(place["init_method"].removeprefix("file://") + "-torch", 2)
        dist.init_process_group("gloo", store=store, rank=place["rank"], world_size=2)
        with pytest.raises(ValueError, match=r"has a default group already, of backend 'gloo'"):
            fd.init_process_group(**place, torch_default=True)
        assert not fd.is_initialized()
        fd.init_process_group(**place)
        found = fd.allreduce(torch.ones(1)).item()
        fd.destroy_process_group()
        assert dist.is_initialized()
        dist.destroy_process_group()
        return found

    assert run_jobs(program) == [2, 2]


def test_native_calls_use_torchs_default_group_where_it_is_ours():
    """A program of torch's calls ferrodist's functions without a group, as long as torch's group lasts."""

    def program(place):
        store = dist.FileStore(place["init_method"].removeprefix("file://") + "-torch", 2)
        dist.init_process_group("ferrodist", store=store, rank=place["rank"], world_size=2)
        assert fd.is_initialized()
        assert fd.default_group() is group_of()
        found = [fd.allreduce(torch.ones(1)).item(), fd.default_group().rank]
        own = fd.init_process_group(**place)
        assert fd.default_group() is own
        assert fd.default_group() is not group_of()
        fd.destroy_process_group()
        assert fd.default_group() is group_of()
        with pytest.raises(ValueError, match="Calls without a group use it already"):
            fd.init_process_group(**place, torch_default=True)
        dist.destroy_process_group()
        assert not fd.is_initialized()
        return found

    assert run_jobs(program) == [[2, 0], [2, 1]]


def test_a_program_that_keeps_torch_from_loading_backends_has_it_too():
    """Where torch is told not to look for backends ours is registered when it is asked for."""
    code = (
        "import torch, torch.distributed as dist, ferrodist as fd\n"
        "assert 'ferrodist' not in dist.Backend.backend_list\n"
        "fd.init_process_group(torch_default=True, init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "assert dist.get_backend() == 'ferrodist'\n"
        "fd.destroy_process_group()\n"
        "assert not dist.is_initialized()\n"
    )
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)


def test_torchs_end_of_the_group_is_known():
    """After torch has destroyed the group native calls say that it is closed, and another may be made."""

    def program(place):
        fd.init_process_group(**place, torch_default=True)
        dist.destroy_process_group()
        with pytest.raises(fd.GroupClosedError):
            fd.allreduce(torch.ones(1))
        fd.destroy_process_group()
        fd.destroy_process_group()
        return fd.is_initialized()

    assert run_jobs(program) == [False, False]
