"""Models that are compiled, in FSDP and in DDP: one graph a unit, made once, and the results of one process.

Ranks are processes: torch's compiler has state that threads share.
"""

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist.testing import run_ranks

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler looks at the .grad of all inputs, and at much else
]

STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs):
        return self.layer(inputs)


class Model(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = First(), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            if self.checkpoints:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return self.last(hidden)


class Graphs:
    """A backend of the compiler that counts the graphs that it makes, and each run of one in forward."""

    def __init__(self, backend="aot_eager"):
        self.num_made = self.num_run = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.num_made += 1
        compiled = self._compile(graph, inputs)

        def run(*values):
            self.num_run += 1
            return compiled(*values)

        return run


def share(group, step):
    """This rank's rows of the batch of a step."""
    rows = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).roll(step, 0)
    return rows[group.rank :: group.world_size] if group is not None else rows


def train(model, group, graphs=None):
    """The losses of some steps; after the first nothing may be compiled again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, runs = [], []
    for step in range(STEPS):
        torch._dynamo.config.error_on_recompile = step > 0
        before = graphs.num_run if graphs else 0
        loss = model(share(group, step)).square().mean()
        runs.append(graphs.num_run - before if graphs else 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch._dynamo.config.error_on_recompile = False
    return torch.stack(losses), runs


def expected():
    """The losses and the parameters of one process after the same steps."""
    model = Model().double()
    return train(model, None)[0], model.state_dict()


def check(model, state_of, group, graphs, expected_runs):
    losses, runs = train(model, group, graphs)
    whole, state = expected()
    torch.testing.assert_close(fd.allreduce(losses, fd.ReduceOp.MEAN, group=group), whole, rtol=1e-13, atol=1e-14)
    found = state_of()
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)
    assert runs == [expected_runs] * STEPS


def compile_blocks(model, graphs):
    for block in model.blocks:
        block.compile(backend=graphs)


def compile_model(model, graphs):
    model.compile(backend=graphs)


def num_graphs_of_a_layer():
    """The graphs of a layer of torch.nn that is called after a break in a loop: one, and with torch 2.10 none."""
    graphs, layer = Graphs("eager"), nn.Linear(1, 1)
    layer.register_forward_pre_hook(lambda *_: None)

    def call(inputs):
        for _ in range(1):
            torch._dynamo.graph_break()
        return layer(inputs)

    torch.compile(call, backend=graphs)(torch.ones(1, 1))
    return graphs.num_made


def test_fsdp_runs_one_graph_a_unit():
    """However it is compiled; a break in each layer would fuse nothing, and blocks would each be compiled."""

    def program(group):
        num_last = num_graphs_of_a_layer()
        whole = (4 + num_last, 2 + num_last)
        for compile_part, num_runs, num_made in ((compile_blocks, 3, 1), (compile_model, *whole), (None, *whole)):
            torch._dynamo.reset()
            graphs = Graphs("aot_eager" if compile_part is compile_blocks else "eager")
            model = Model().double()
            if compile_part is not None:
                compile_part(model, graphs)
            fsdp = fd.FSDP(model, group, wrap=Block)
            called = torch.compile(fsdp, backend=graphs) if compile_part is None else fsdp
            check(called, fsdp.full_state_dict, group, graphs, num_runs)
            assert graphs.num_made == num_made

    run_ranks(program, 2, backend="native")


def test_ddp_runs_one_graph():
    """Of the whole model, compiled inside or outside."""

    def program(group):
        for is_inside in (True, False):
            torch._dynamo.reset()
            graphs, model = Graphs("eager" if is_inside else "aot_eager"), Model().double()
            if is_inside:
                compile_model(model, graphs)
            ddp = fd.DDP(model, group)
            called = ddp if is_inside else torch.compile(ddp, backend=graphs)
            check(called, ddp.state_dict, group, graphs, 1)
            assert graphs.num_made == 1

    run_ranks(program, 2, backend="native")


def test_fsdp_with_checkpoints_and_other_dtypes():
    """Units are gathered again to recompute what was compiled, and graphs take the dtype of computation."""

    def program(group):
        graphs, model = Graphs(), Model(checkpoints=True).double()
        compile_blocks(model, graphs)
        fsdp = fd.FSDP(model, group, wrap=Block)
        check(fsdp, fsdp.full_state_dict, group, graphs, 3)
        losses = []
        for is_compiled in (False, True):
            torch._dynamo.reset()
            graphs, model = Graphs("eager"), Model()
            if is_compiled:
                compile_blocks(model, graphs)
            precision = fd.MixedPrecision(param_dtype=torch.bfloat16)
            fsdp = fd.FSDP(model, group, wrap=Block, mixed_precision=precision)
            optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
            for step in range(2):
                loss = fsdp(share(group, step).float()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().float())
        torch.testing.assert_close(losses[2:], losses[:2], rtol=0.02, atol=1e-3)

    run_ranks(program, 2, backend="native")


def test_a_compiled_layer_outside_of_its_unit_s_forward():
    """The error is that of a layer that is not compiled; the graph must not take shards for parameters."""

    def program(group):
        model = Model().double()
        model.blocks[0].norm.compile(backend="eager")
        fsdp = fd.FSDP(model, group, wrap=Block)
        inputs = share(group, 0)
        before = fsdp(inputs)
        with pytest.raises(RuntimeError, match="was called while its parameters are not gathered"):
            model.blocks[0].norm(inputs)
        assert torch.equal(fsdp(inputs), before)
        with fsdp.summon_full_params():
            assert torch.equal(model.blocks[0].norm(inputs), Model().double().blocks[0].norm(inputs))

    run_ranks(program, 2, backend="native")
