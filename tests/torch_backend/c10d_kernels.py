"""A program of one rank: what looks at torch's operators sees collectives of ferrodist; those of gloo still work."""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from ferrodist.torch_backend import use_c10d_kernels

CALLS = {
    "allreduce_": lambda: dist.all_reduce(torch.ones(2)),
    "broadcast_": lambda: dist.broadcast(torch.ones(2), 0),
    "reduce_": lambda: dist.reduce(torch.ones(2), 0),
    "allgather_": lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
    "_allgather_base_": lambda: dist.group.WORLD._allgather_base(torch.empty(2), torch.ones(2)),
    "gather_": lambda: dist.gather(torch.ones(2), [torch.empty(2)]),
    "scatter_": lambda: dist.scatter(torch.empty(2), [torch.ones(2)]),
    "reduce_scatter_": lambda: dist.reduce_scatter(torch.empty(2), [torch.ones(2)]),
    "_reduce_scatter_base_": lambda: dist.group.WORLD._reduce_scatter_base(torch.empty(2), torch.ones(2)),
    "alltoall_base_": lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2)),
}


class Operators(TorchDispatchMode):
    """The names of those that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def count(call):
    """What a debug mode sees of a call."""
    with CommDebugMode() as mode:
        call()
    return {str(packet).removeprefix("c10d."): number for packet, number in mode.get_comm_counts().items()}


def gather_into():
    """An operator that calls the group by itself."""
    out = torch.zeros(2)
    name = dist.group.WORLD.group_name
    work = torch.ops._c10d_functional.all_gather_into_tensor_out(torch.ones(2), 1, name, out=out)
    torch.ops._c10d_functional.wait_tensor(work)
    return out


def main():
    """See above."""
    dist.init_process_group("ferrodist", store=dist.HashStore(), rank=0, world_size=1)
    assert count(CALLS["allreduce_"]) == {}, "nothing is seen before"
    use_c10d_kernels()
    use_c10d_kernels()
    for operator, call in CALLS.items():
        assert count(call) == {operator: 1}, operator
    assert gather_into().tolist() == [1, 1]
    tensor = torch.full((3,), 2.0)
    with CommDebugMode():
        dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        dist.group.WORLD.allreduce([tensor], options).wait()
        assert options.asyncOp, "options are as they were"
    assert tensor.tolist() == [2, 2, 2]
    if hasattr(dist, "gather_single"):  # as torch has from 2.14; its mode does not count it
        with Operators() as mode:
            dist.gather_single(torch.ones(3), tensor)
        assert mode.names.count("gather_into_tensor_.default") == 1
        assert tensor.tolist() == [1, 1, 1]
        tensor.fill_(2.0)
    with FakeTensorMode():
        fake = torch.ones(4)
        dist.all_reduce(fake)
        assert fake.shape == (4,)
    gloo = dist.new_group([0], backend="gloo")
    assert count(lambda: dist.all_reduce(tensor, group=gloo)) == {"allreduce_": 1}
    dist.all_reduce(tensor, group=gloo, async_op=True).wait()
    assert tensor.tolist() == [2, 2, 2]
    dist.destroy_process_group()
    print("all right")


if __name__ == "__main__":
    main()
