"""Models that `parallelize` divides, compiled: one graph, with the results of the eager model.

Ranks are processes: torch's compiler has state that threads share.
"""

import importlib
import logging
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import ferrodist as fd
from ferrodist.errors import CollectiveMismatchError
from ferrodist.testing import run_ranks

pytestmark = [
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore"),  # the compiler looks at the .grad of all inputs, and at much else
]

TOKENS, WIDTH, LENGTH = 11, 8, 6


class Attention(nn.Module):
    """With a mask that it makes, a plain tensor."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        batch, length, width = hidden.shape
        q, k, v = (
            layer(hidden).view(batch, length, -1, width // 4).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return hidden + self.out(attended.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.mlp = Attention(), Mlp()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids, labels):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        hidden = self.attention(hidden)
        logits = self.head(self.mlp(hidden))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "last": hidden[:, -1]}


PLAN = {
    "tokens": fd.VocabularyParallel(),
    "attention.queries": fd.ColumnParallel(),
    "attention.keys": fd.ColumnParallel(),
    "attention.values": fd.ColumnParallel(),
    "attention.out": fd.RowParallel(),
    "mlp.up": fd.ColumnParallel(),
    "mlp.down": fd.RowParallel(),
    "head": fd.ColumnParallel(),
}

SEQUENCE_PLAN = PLAN | {
    "tokens": fd.VocabularyParallel(outputs=fd.Shard(1)),
    "attention": fd.Style(wanted=fd.Replicate()),
    "attention.out": fd.RowParallel(outputs=fd.Shard(1)),
    "mlp.norm": fd.SequenceParallel(),
    "mlp.down": fd.RowParallel(outputs=fd.Shard(1)),
}


def train(model, called, steps):
    """The losses and results of some steps, and the parameters after them; after the first nothing is compiled."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch._dynamo.config.error_on_recompile = step > 0
        ids = torch.randint(TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(step))
        outputs = called(ids, ids)
        (outputs["loss"] + outputs["last"].square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [outputs["loss"].detach(), outputs["last"].detach()]
    torch._dynamo.config.error_on_recompile = False
    return [*found, *(whole(parameter) for parameter in model.parameters())]


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, fd.DTensor) else tensor.detach()


def check(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def divided(mesh, plan):
    return fd.parallelize(Decoder().double(), mesh, plan)


@pytest.mark.parametrize(("plan", "steps"), [(PLAN, 2), (SEQUENCE_PLAN, 1)])
def test_whole_models_are_one_graph(plan, steps):
    """With vocabulary, heads, loss and the sequence sharded; the results are those of one process."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        own, model = Decoder().double(), divided(mesh, plan)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        stats = torch._dynamo.utils.counters["stats"]  # which has the graphs of other tests, too
        before = stats["unique_graphs"]
        check(train(model, compiled, steps), train(own, own, steps))
        assert stats["unique_graphs"] - before == 1

    run_ranks(program, 2, backend="native", timeout=300)


class Layers(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.breaks = Mlp(), Mlp(), breaks

    def forward(self, hidden):
        hidden = self.first(hidden)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden)


def test_messages_of_a_graph_are_in_order():
    """Each takes the result of the last one, so that no compiler sends them in another order on some rank."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        plan = {name: style for name, style in PLAN.items() if name.startswith("mlp")}
        plan = {name.replace("mlp", layer): style for name, style in plan.items() for layer in ("first", "second")}
        model, graphs = fd.parallelize(Layers().double(), mesh, plan), []

        def record(graph, _):
            graphs.append(graph.graph)
            return importlib.import_module("functorch.compile").make_boxed_func(graph.forward)

        backend = importlib.import_module("torch._dynamo.backends.common").aot_autograd(fw_compiler=record)
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(1, 4, WIDTH).double()).sum().backward()
        assert len(graphs) == 2
        for graph in graphs:
            sent = [node for node in graph.nodes if str(node.target).startswith("ferrodist.")]
            assert len(sent) >= 2
            assert [node.args[1] for node in sent] == [None, *sent[:-1]]

    run_ranks(program, 2, backend="native", timeout=300)


def test_layers_that_share_an_input_send_its_gradient_once():
    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        model, counts = divided(mesh, PLAN), []

        def record(graph, _):
            moved = [node.meta["val"] for node in graph.graph.nodes if "ferrodist" in str(node.target)]
            counts.append(sum(value is not None and value.shape == (1, LENGTH, WIDTH) for value in moved))
            return importlib.import_module("functorch.compile").make_boxed_func(graph.forward)

        backend = importlib.import_module("torch._dynamo.backends.common").aot_autograd(fw_compiler=record)
        ids = torch.arange(LENGTH).view(1, LENGTH)
        torch.compile(model, backend=backend, fullgraph=True)(ids, ids)["loss"].backward()
        # Forward: the tokens and two row parallel layers; backward: queries, keys and values together, MLP and head.
        assert counts == [3, 3]

    run_ranks(program, 2, backend="native", timeout=300)


def gradients_of_layers(model, called):
    inputs = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(1, 4, WIDTH).requires_grad_()
    outputs = called(inputs)
    found = torch.autograd.grad(outputs.square().sum(), [inputs, *model.parameters()])
    return [outputs.detach(), *map(whole, found)]


def test_parts_that_are_compiled():
    """Uneven shards, a model with a break of its own, and compiled parts of an eager model have the same results."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        own = Layers().double()
        expected = gradients_of_layers(own, own)
        plan = {"*.up": fd.ColumnParallel(), "*.down": fd.RowParallel()}
        sequence = {
            "*.norm": fd.SequenceParallel(),
            "*.up": fd.ColumnParallel(chunks=2),
            "*.down": fd.RowParallel(outputs=fd.Shard(1)),
        }
        model = fd.parallelize(Layers(breaks=True).double(), mesh, plan)
        check(gradients_of_layers(model, torch.compile(model, backend="aot_eager")), expected)
        torch._dynamo.reset()
        model = fd.parallelize(Layers().double(), mesh, sequence)
        model.first.compile(backend="aot_eager", fullgraph=True)
        check(gradients_of_layers(model, model), expected)

    run_ranks(program, 2, backend="native", timeout=300)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 7)

    def forward(self, inputs):
        return functional.dropout(self.layer(inputs), 0.5)


def test_dropout_is_that_of_the_eager_model():
    """Ranks draw the same mask; ranks whose generators differ get an error, as without a compiler."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        model = fd.parallelize(Dropped().double(), mesh, {"layer": fd.ColumnParallel(outputs=fd.Shard(-1))})
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        inputs = torch.linspace(1, 2, 10, dtype=torch.float64).view(2, 5)

        def gradients(called):
            torch.manual_seed(3)
            outputs = called(inputs)
            return [outputs.detach(), whole(torch.autograd.grad(outputs.sum(), [model.layer.weight])[0])]

        check(gradients(compiled), gradients(model))
        torch.manual_seed(group.rank)
        with pytest.raises(CollectiveMismatchError, match="generators of ranks 1"):
            compiled(inputs)

    run_ranks(program, 2, backend="native", timeout=300)


def test_bad_input_of_a_graph():
    """Tokens and targets out of range, and plain tensors that differ between ranks, are errors when the graph runs."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = nn.Linear(4, 4), 1.0

        def forward(self, inputs):
            return self.layer(inputs) * (torch.ones(4, dtype=torch.float64) * self.factor)

    @torch.no_grad()
    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        model = divided(mesh, PLAN)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        with pytest.raises(IndexError, match=f"index out of range: {TOKENS} in an embedding"):
            compiled(ids + TOKENS, ids)
        with pytest.raises(IndexError, match=r"Target -3 is out of bounds"):
            compiled(ids, ids - 3)
        assert torch.isfinite(compiled(ids, ids)["loss"])
        torch._dynamo.reset()
        scaled = fd.parallelize(Scaled().double(), mesh, {"layer": fd.ColumnParallel()})
        scaled.factor = float(group.rank)
        with pytest.raises(CollectiveMismatchError, match="plain tensors beside distributed ones"):
            torch.compile(scaled, backend="aot_eager")(torch.ones(2, 4, dtype=torch.float64))

    run_ranks(program, 2, backend="native", timeout=300)


def test_single_layers_take_plain_tensors():
    """Layers that are made sharded are compiled in a function, whose inputs and outputs are plain shards."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        torch.manual_seed(1)
        up = fd.ColumnParallelLinear(6, 10, mesh=mesh, dtype=torch.float64)
        down = fd.RowParallelLinear(10, 6, mesh=mesh, dtype=torch.float64)
        inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)

        def layers(inputs):
            return down(functional.gelu(up(inputs)))

        def gradients(function):
            outputs = function(inputs)
            found = torch.autograd.grad(outputs.square().sum(), [up.weight, down.weight])
            return [outputs.detach(), *map(whole, found)]

        assert type(layers(inputs)) is torch.Tensor
        check(gradients(torch.compile(layers, backend="aot_eager", fullgraph=True)), gradients(layers))

    run_ranks(program, 2, backend="native", timeout=300)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH * WIDTH).view(4, WIDTH, WIDTH).sin())

    def forward(self, hidden_states, top_k_index, top_k_weights):
        outputs = (hidden_states[:, None, None] @ self.up[top_k_index]).squeeze(2)
        return (outputs * top_k_weights[..., None]).sum(1)


class Routed(nn.Module):
    """With experts, and an operator without a rule between plain tensors that the code holds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.mlp, self.router, self.experts = Mlp(), nn.Linear(WIDTH, 4), Experts()

    def forward(self, hidden):
        flat = self.mlp(hidden).flatten(0, 1)
        weights, index = self.router(flat).softmax(-1).topk(2)
        routed = self.experts(flat, index, weights)
        factors = torch.arange(WIDTH, dtype=hidden.dtype) + 1
        square = routed.T @ routed + torch.diag(factors)
        return torch.linalg.lstsq(square, routed.T).solution.T * factors


def test_experts_and_operators_without_a_rule():
    """Graphs break at them; the code between two graphs counts plain tensors as replicated, and has the fallback."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        own = Routed().double()
        plan = {"mlp.up": fd.ColumnParallel(), "mlp.down": fd.RowParallel(), "experts": fd.ExpertParallel()}
        model = fd.parallelize(Routed().double(), mesh, plan)
        check(gradients_of_layers(model, torch.compile(model, backend="eager")), gradients_of_layers(own, own))

    run_ranks(program, 2, backend="native", timeout=300)


class Frozen(nn.Module):
    """With a layer that gets no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.other, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, hidden):
        with torch.no_grad():
            offset = self.other(hidden)
        return self.down(self.up(hidden) + offset)


def test_layers_without_a_gradient():
    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        plan = {"up": fd.ColumnParallel(), "other": fd.ColumnParallel(), "down": fd.RowParallel()}
        own, model = Frozen(), fd.parallelize(Frozen(), mesh, plan)
        for called in (own, torch.compile(model, backend="aot_eager", fullgraph=True)):
            called(torch.ones(4, WIDTH)).square().sum().backward()
        assert model.other.weight.grad is None
        torch.testing.assert_close(whole(model.up.weight.grad), own.up.weight.grad)

    run_ranks(program, 2, backend="native", timeout=300)


class Solver(nn.Module):
    """With an operator that has no rule."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)

    def forward(self, hidden):
        found = self.up(hidden)
        return torch.linalg.lstsq(found, found).solution


def test_each_compiled_model_warns_of_operators_without_a_rule():
    def program(group):
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        for _ in range(2):
            model = fd.parallelize(Solver(), mesh, {"up": fd.ColumnParallel()})
            with pytest.warns(UserWarning, match="lstsq"):
                torch.compile(model, backend="eager")(torch.ones(4, WIDTH))

    run_ranks(program, 2, backend="native", timeout=300)


def test_other_lengths():
    """As of a model that generates tokens: each is compiled, and the results are those of the eager model."""

    @torch.no_grad()
    def program(group):
        model = divided(fd.DeviceMesh(group, (2,), ("tensor",)), PLAN)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for length in (3, 4):
            ids = torch.arange(length)[None]
            check([compiled(ids, ids)["last"]], [model(ids, ids)["last"]])

    run_ranks(program, 2, backend="native", timeout=300)


def test_units_of_fsdp_that_are_divided():
    """Over two axes: each block is a unit, compiled once; the steps are those of the eager model."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2, 2), ("data", "tensor"))
        inputs = torch.linspace(-1, 1, 8 * WIDTH, dtype=torch.float64).view(2, 4, WIDTH)[group.rank // 2, None]
        found = []
        for is_compiled in (False, True):
            model = fd.parallelize(
                Layers().double(), mesh["tensor"], {"*.up": fd.ColumnParallel(), "*.down": fd.RowParallel()}
            )
            if is_compiled:
                model.compile(backend="eager")
            fsdp = fd.FSDP(model, mesh["data"].group, wrap=Mlp)
            optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.1)
            for step in range(2):
                torch._dynamo.config.error_on_recompile = is_compiled and step > 0
                loss = fsdp(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        torch._dynamo.config.error_on_recompile = False
        check(found[2:], found[:2])

    run_ranks(program, 4, backend="native")


@pytest.mark.filterwarnings("default")
def test_the_cache_on_disk_is_left_alone():
    """inductor's, of graphs: those of DTensors are no part of it, and neither a warning nor a traceback says so."""

    def program(group):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
        )
        mesh = fd.DeviceMesh(group, (2,), ("tensor",))
        model = fd.parallelize(transformers.LlamaForCausalLM(config), mesh, "auto")
        model.compile()
        records = []
        log = logging.getLogger("torch._inductor.codecache")
        log.addHandler(handler := logging.Handler())
        handler.emit = records.append
        ids = torch.arange(8)[None]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found = [record.getMessage() for record in records] + [str(warning.message) for warning in caught]
        assert [text for text in found if "cache" in text or "pickle" in text or "_hash" in text] == []

    run_ranks(program, 2, backend="native", timeout=300)
