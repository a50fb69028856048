"""A backend of one's own that has the seven methods of the contract and nothing else: everything works over it."""

import queue
import threading

import pytest
import torch

import ferrodist as fd
from ferrodist import checkpoint
from ferrodist.parallel.pipeline import split_sequential
from ferrodist.testing import run_ranks

BARRIER_TAG = 2**40


class Wires:
    """Queues from each rank to each, by tag, and what has ended them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.queues = {}
        self.end = None

    def between(self, src, dst, tag):
        with self.lock:
            return self.queues.setdefault((src, dst, tag), queue.SimpleQueue())


class SevenMethods(fd.Backend):
    """What somebody writes who reads the names of the contract: no constructor of `Backend`'s, no `failure`."""

    def __init__(self, rank, world_size, wires):
        self.number, self.size, self.wires = rank, world_size, wires
        self.is_closed = False

    @classmethod
    def create_group(cls, world_size):
        wires = Wires()
        return [cls(rank, world_size, wires) for rank in range(world_size)]

    @property
    def rank(self):
        return self.number

    @property
    def world_size(self):
        return self.size

    def send(self, data, dst, *, tag=0, timeout=None):
        self.check()
        self.wires.between(self.rank, dst, tag).put(bytes(memoryview(data).cast("B") if len(data) else b""))

    def recv(self, buffer, src, *, tag=0, timeout=None):
        limit = self.timeout if timeout is None else timeout
        sources = range(self.world_size) if src == fd.ANY_SOURCE else [src]
        waited = threading.Event()
        step = 0.002
        while True:
            self.check()
            for source in sources:
                try:
                    message = self.wires.between(source, self.rank, tag).get_nowait()
                except queue.Empty:
                    continue
                memoryview(buffer).cast("B")[:] = message
                return source
            if limit <= 0:
                raise fd.DistributedTimeoutError(f"nothing came from rank {src}", ranks=(src,) if src >= 0 else ())
            waited.wait(step)
            limit -= step

    def barrier(self, timeout=None):
        for rank in range(self.world_size):
            if rank != self.rank:
                self.send(b"", rank, tag=BARRIER_TAG)
        for rank in range(self.world_size):
            if rank != self.rank:
                self.recv(bytearray(1)[:0], rank, tag=BARRIER_TAG, timeout=timeout)

    def abort(self, reason):
        error = reason if isinstance(reason, fd.DistributedError) else fd.GroupAbortedError(reason, ranks=(self.rank,))
        self.wires.end = self.wires.end or error

    def close(self, timeout=None):
        self.is_closed = True
        self._run_close_callbacks()

    def check(self):
        if self.is_closed:
            raise fd.GroupClosedError("this rank has closed the group")
        if self.wires.end is not None:
            raise self.wires.end.fresh()


def same_as_simulated(program, world_size=2):
    """Run on both, and compare the results."""
    found = run_ranks(program, world_size, backend=SevenMethods.create_group)
    assert repr(found) == repr(run_ranks(program, world_size))
    return found


def linear(size=4):
    """A layer with the same parameters on every rank."""
    layer = torch.nn.Linear(size, size)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, size * size).view(size, size))
        layer.bias.zero_()
    return layer


def batch(group, rows=2):
    """Inputs that differ from rank to rank."""
    return torch.linspace(0, 1, 4 * rows).view(rows, 4) + group.rank


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(world_size):
    """All collectives, those that are started, and several as one."""

    def program(group):
        rank, size = group.rank, group.world_size
        own = torch.arange(2.0 * size) + rank
        fd.barrier()
        fd.monitored_barrier()
        group.barrier()
        group.synchronize()
        with fd.coalesce():
            started = [fd.async_allreduce(own), fd.async_allreduce(own[:1])]
        return [
            *[fd.allreduce(own, op) for op in (fd.ReduceOp.SUM, fd.ReduceOp.MEAN, fd.ReduceOp.MAX)],
            fd.reduce(own)[:0],
            fd.broadcast(own, size - 1),
            fd.all_gather(own),
            fd.all_gather_uneven(own[: rank + 1]),
            fd.gather(own, 0)[:0],
            fd.scatter(own if rank == 0 else None),
            fd.reduce_scatter(own),
            fd.all_to_all(own),
            fd.all_gather_object({"rank": rank}),
            fd.broadcast_object([rank]),
            [pending.wait() for pending in started],
            fd.async_all_gather(own).wait(),
        ]

    same_as_simulated(program, world_size)


def test_messages_and_sub_groups():
    """Tensors from rank to rank, groups of some ranks and groups of these, and meshes."""

    def program(group):
        rank, size = group.rank, group.world_size
        following, before = (rank + 1) % size, (rank - 1) % size
        found = [fd.sendrecv(torch.full((3,), float(rank)), following, None, before)]
        incoming = torch.empty(2)
        fd.batch([fd.Send(torch.full((2,), float(rank)), following), fd.Recv(incoming, before)])
        found += [incoming, fd.allreduce(torch.ones(1), group=fd.new_group(range(size)))]
        pair = fd.new_group([2, 0])
        if pair.is_member:
            swapped = fd.new_group([1, 0], group=pair)
            found.append(fd.all_gather(torch.tensor([rank]), group=swapped))
            if swapped.rank:
                fd.send(torch.ones(200_000), 0, group=swapped)
            else:
                found.append(fd.recv(None, None, fd.ANY_SOURCE, group=swapped).sum())
            pair.close()
        mesh = fd.DeviceMesh(group, (-1,), ("rows",))
        spread = fd.distribute(torch.arange(7.0), mesh, fd.Shard(0))
        found.append(spread.sum().full_tensor())
        return found

    same_as_simulated(program, 3)


def test_data_parallel_training():
    """DDP, with its buffers, and batch norm over the ranks."""

    def program(group):
        model = fd.DDP(torch.nn.Sequential(linear(), torch.nn.BatchNorm1d(4), fd.SyncBatchNorm1d(4)), group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch(group, 3)).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    same_as_simulated(program)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_sharded_training(strategy):
    """FSDP in each of its strategies, with clipping, and its states."""

    def program(group):
        model = torch.nn.Sequential(linear(), linear())
        model = fd.FSDP(model, group, strategy=getattr(fd.ShardingStrategy, strategy), wrap=torch.nn.Linear)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch(group)).square().sum().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
        return model.full_state_dict()

    same_as_simulated(program)


@pytest.mark.parametrize("schedule", list(fd.PipelineSchedule), ids=lambda schedule: schedule.name)
def test_pipelines(schedule):
    """Every schedule, and a model that the ranks divide together."""

    def program(group):
        has_several = schedule.name.startswith(("INTERLEAVED", "LOOPED")) or schedule.name.endswith("V")
        model = torch.nn.Sequential(*[linear() for _ in range(4 if has_several else 2)])
        stages = split_sequential(model, len(model), group=group)
        pipeline = fd.Pipeline(stages, group, 4, schedule=schedule, loss_fn=torch.nn.functional.mse_loss)
        inputs = torch.linspace(0, 1, 32).view(8, 4)
        return [pipeline.step(inputs, inputs), *[parameter.grad for parameter in pipeline.parameters()]]

    same_as_simulated(program)


def test_checkpoints(tmp_path):
    """What is saved over it, also while the program goes on, is what is loaded, in other divisions too."""

    def program(group):
        mesh = fd.DeviceMesh(group, (-1,))
        spread = fd.distribute(torch.arange(8.0), mesh, fd.Shard(0))
        checkpoint.save_distributed({"spread": spread, "step": 3}, tmp_path / "now", group=group)
        with checkpoint.AsyncCheckpointer(tmp_path / "later", group=group) as saves:
            saves.save_async({"spread": spread}, 1).wait()
        target = fd.distribute(torch.zeros(8), mesh, fd.Replicate())
        checkpoint.load_distributed(tmp_path / "now", {"spread": target, "step": 0}, group=group)
        whole = checkpoint.load_distributed(checkpoint.find_latest(tmp_path / "later"), group=group)
        return [target.to_local().tolist(), whole["spread"].tolist()]

    assert run_ranks(program, 2, backend=SevenMethods.create_group) == [[[*range(8)]] * 2] * 2


def test_calls():
    """Agents call each other's functions and keep references."""

    def program(group):
        with fd.rpc.RpcContext(group, {"add": lambda one, other: one + other}) as agent:
            peer = 1 - group.rank
            return agent.rpc_sync(peer, "add", 1, 2), agent.remote(peer, "add", torch.ones(2), 1).to_here().tolist()

    assert run_ranks(program, 2, backend=SevenMethods.create_group) == [(3, [2, 2])] * 2


def test_torchs_groups():
    """A group over it is one of torch's, too."""
    from ferrodist.torch_backend.process_group import FerrodistProcessGroup  # noqa: PLC0415 - loads torch.distributed

    def program(group):
        tensor = torch.ones(2)
        FerrodistProcessGroup(group).allreduce([tensor]).wait()
        return tensor.tolist()

    assert run_ranks(program, 2, backend=SevenMethods.create_group) == [[2, 2]] * 2


def test_mismatches_raise_on_all_ranks():
    """Calls are compared over any backend."""

    def program(group):
        with pytest.raises(fd.CollectiveMismatchError, match=r"rank 1 called broadcast"):
            fd.broadcast(torch.ones(1)) if group.rank == 1 else fd.allreduce(torch.ones(1))

    run_ranks(program, 3, backend=SevenMethods.create_group)


def test_a_late_rank_is_named_by_all():
    """A group that failed by a timeout says so at once, though the backend keeps no failure: nobody blames rank 0."""
    is_over = threading.Event()

    def program(group):
        if group.rank == 1:
            assert is_over.wait(30)
            return (1,)
        with pytest.raises(fd.DistributedTimeoutError) as caught:
            fd.allreduce(torch.ones(1), timeout=0.4 if group.rank == 0 else 0.5)
        if group.rank == 0:
            is_over.set()
        return caught.value.ranks

    assert run_ranks(program, 3, backend=SevenMethods.create_group) == [(1,)] * 3


@pytest.mark.parametrize("name", ["rank", "world_size", "timeout", "name", "failure"])
def test_properties_are_not_written_as_methods(name):
    """Who forgets @property, as in other languages, learns it where the class is made."""
    with pytest.raises(TypeError, match=rf"Own\.{name} is a property of every Backend: put @property before it"):
        type("Own", (fd.Backend,), {name: lambda self: 0})


def test_what_is_missing_is_named():
    """A class without some of the methods can't be made."""
    Own = type("Own", (fd.Backend,), {"send": lambda self: None})
    with pytest.raises(TypeError, match=r"abort.*close.*recv"):
        Own(0, 1)
