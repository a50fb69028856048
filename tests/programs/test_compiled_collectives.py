"""Collectives in functions that torch.compile compiles: operators of one graph, with the results of the eager function.

Ranks are processes: torch's compiler has state that threads share.
"""

import importlib

import pytest
import torch

import ferrodist as fd
from ferrodist.testing import run_ranks

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler looks at the .grad of all inputs, and at much else
]


def check(collectives, group, backend):
    """Compare results and gradients of a compiled function with those of the eager one: in two steps, three lengths."""

    def results_of(function, scale, length):
        inputs = (torch.linspace(-1, 1, 2 * length, dtype=torch.float64).view(2, length) * scale).requires_grad_()
        out = torch.zeros(2, length, dtype=torch.float64)
        result = function(inputs, out)
        result.backward()
        return result.detach(), out, inputs.grad

    compiled = torch.compile(collectives, backend=backend, fullgraph=True)
    for step, length in enumerate((3, 3, 5, 8)):
        torch._dynamo.config.error_on_recompile = step == 1
        scale = group.rank + step + 1
        torch.testing.assert_close(
            results_of(compiled, scale, length), results_of(collectives, scale, length), rtol=0, atol=0
        )


def keeping(graphs):
    """A backend of the compiler that keeps the graphs, which it runs as they are."""
    aot_autograd = importlib.import_module("torch._dynamo.backends.common").aot_autograd
    make_boxed_func = importlib.import_module("functorch.compile").make_boxed_func

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep)


def calls_in(graph):
    """The nodes of a graph that call a collective."""
    return [node for node in graph.nodes if torch.ops.ferrodist.collective.default in node.args]


def test_operators_of_one_graph():
    """With gradients; in order, also where nothing takes a result: each has the result of the one before it."""

    def program(group):
        graphs = []

        def collectives(inputs, out):
            gathered = fd.all_gather(inputs * 2, 1, group=group)
            part = fd.reduce_scatter(gathered.sin(), fd.ReduceOp.MEAN, dim=1, group=group)
            rows = fd.all_to_all(part.reshape(-1, 1), group=group)
            fd.allreduce(inputs.detach(), group=group, out=out)
            copied = fd.broadcast(rows.detach(), 0, group=group)  # which rank 0 doesn't use
            return fd.allreduce(rows if group.rank == 0 else rows + copied, group=group).square().sum()

        check(collectives, group, keeping(graphs))
        forward, backward = (calls_in(graph) for graph in graphs[:2])
        assert (len(forward), len(backward)) == (6, 4)
        for calls in (forward, backward):
            before = [node.args[3] and node.args[3].args[0] for node in calls]
            assert before == [None, *calls[:-1]]

    run_ranks(program, 2, backend="native")


def test_calls_of_one_graph():
    """Of the other collectives, and with other arguments."""

    def program(group):
        def collectives(inputs, out):
            size = inputs.numel()
            send, receive = ([2, size - 2], [2, 1]) if group.rank == 0 else ([1, size - 1], [size - 2, size - 1])
            largest = fd.allreduce(inputs, fd.ReduceOp.MAX, group=group, timeout=20.0)
            first, _ = fd.all_to_all([largest, inputs + 1], group=group)
            uneven = fd.all_to_all_single_uneven(first.view(-1), send, receive, group=group)
            columns = fd.reduce_scatter(inputs.sin(), dim=1, group=group)
            fd.all_gather(inputs.detach()[0], group=group, out=out[:, : inputs.shape[1]].view(-1))
            return fd.reduce(uneven.sum(), 0, group=group).sum() + largest.sum() + columns.square().sum()

        check(collectives, group, "eager")

    run_ranks(program, 2, backend="native")


def test_checkpoints():
    """Also with calls whose results nothing takes; the backward sends gradients, and nothing again."""

    def program(group):
        graphs = []

        def layer(inputs):
            fd.broadcast(inputs.detach(), 0, group=group)
            return fd.allreduce(inputs.sin(), group=group).cos()

        def collectives(inputs, _):
            for _ in range(2):
                inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False)
            return fd.allreduce(inputs, group=group).sum()

        check(collectives, group, keeping(graphs))
        assert [len(calls_in(graph)) for graph in graphs[:2]] == [5, 3]

    run_ranks(program, 2, backend="native")


def test_groups():
    """A graph is of its group, and compiled again for another; without a group it breaks inside of `use_group`."""

    def program(group):
        def twice(inputs, other=None):
            return fd.allreduce(inputs, group=other) * 2

        alone, ones = fd.new_group([group.rank], group=group), torch.ones(2)
        compiled = torch.compile(twice, backend="eager", fullgraph=True)
        for other, expected in ((group, 4.0), (alone, 2.0), (group, 4.0)):
            assert compiled(ones, other).tolist() == [expected] * 2
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(ones)  # `run_ranks` gives the ranks their group by `use_group`
        broken = torch.compile(twice, backend="eager")
        assert broken(ones).tolist() == [4.0, 4.0]
        with fd.use_group(alone):
            assert broken(ones).tolist() == [2.0, 2.0]

    run_ranks(program, 2, backend="native")


def test_wrong_arguments():
    """The compiler's error has the text of the eager one, raised before anything is sent."""

    def program(group):
        outsider = fd.new_group([1 - group.rank], group=group)
        with pytest.raises(RuntimeError, match=r"out has shape \(3,\)"):
            torch.compile(lambda x, out: fd.allreduce(x, group=group, out=out), backend="eager")(
                torch.ones(2), torch.ones(3)
            )
        with pytest.raises(fd.InvalidRankError):
            torch.compile(lambda inputs: fd.allreduce(inputs, group=outsider), backend="eager")(torch.ones(2))
        assert fd.allreduce(torch.ones(1), group=group).item() == 2

    run_ranks(program, 2, backend="native")


def test_inner_dims_of_dynamic_shapes():
    """One graph for all shapes, whose sizes are symbols."""

    def program(group):
        def joined_and_divided(tensor):
            return fd.reduce_scatter(fd.all_gather(tensor, 1, group=group) * 2, dim=1, group=group)

        compiled = torch.compile(joined_and_divided, backend="eager", dynamic=True, fullgraph=True)
        for width in (4, 6):
            tensor = torch.arange(3.0 * width).view(3, width).requires_grad_()
            result = compiled(tensor)
            assert torch.equal(result, joined_and_divided(tensor))
            result.sum().backward()
            assert torch.equal(tensor.grad, torch.full_like(tensor, 4))

    run_ranks(program, 2, backend="native")
