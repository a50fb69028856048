"""Models whose code does in a stage what it didn't in the trace: right results, NaN or a clear error, nothing else."""

import copy

import pytest
import torch
import transformers
from torch import nn

from ferrodist import split_model
from ferrodist.errors import PipelineError, RankFailedError, UnsupportedOpError
from ferrodist.parallel.pipeline import Balance, LossReduction, Pipeline
from ferrodist.testing import run_ranks

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.arange(4).reshape(4, 1)


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + self.layer(hidden).tanh()


class Model(nn.Module):
    """Four blocks behind an embedding; the code behind them is in `end`."""

    kind = Block

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))

    def forward(self, hidden, *more):
        hidden = first = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.end(hidden, first, *more).mean()

    def end(self, hidden, _first):
        return hidden


def make(kind):
    torch.manual_seed(0)
    return kind().double()


def run_stages(model, *batches, sample=None):
    """The losses of batches, each in one step of two stages, and the gradients of the last."""

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group, sample=batches[0] if sample is None else sample)
        pipeline = Pipeline(stages, group, 1)
        losses = [pipeline.step(batch).item() for batch in copy.deepcopy(batches)]
        return losses, {name: each.grad for name, each in pipeline.named_parameters()}

    (losses, one), (_, other) = run_ranks(program, 2)
    return losses, {**one, **other}


def check_same(kind, *batches):
    """Compare losses and gradients with those of one process."""
    model = make(kind)
    found, gradients = run_stages(model, *batches)
    expected = []
    for batch in copy.deepcopy(batches):
        loss = model(*batch)
        loss.backward()
        expected.append(loss.item())
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-15, msg=name)


def check_refused(kind, text, *batches):
    with pytest.raises(RankFailedError) as caught:
        run_stages(make(kind), *batches)
    error = caught.value.__cause__
    assert isinstance(error, (PipelineError, ValueError)), error
    assert text in str(error)


class BranchOnResult(Model):
    def end(self, hidden, first):
        return hidden + first if hidden.abs().max() > 0.01 else hidden


class BranchOnInput(Model):
    def end(self, hidden, _first, mask, bias):
        return hidden + bias if mask.any() else hidden


class BranchOnWeight(Model):
    def end(self, hidden, _first):
        return hidden + self.embedding.weight.sum() if hidden.abs().max() > 0.01 else hidden


class BranchOnOwn(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def end(self, hidden, _first):
        return hidden * self.scale if hidden.abs().max() > 0.01 else hidden


NO, YES = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        (BranchOnResult, [(X,)]),
        (BranchOnInput, [(X, NO, X), (X, YES, X)]),
        (BranchOnWeight, [(X,)]),
        (BranchOnOwn, [(X,)]),
    ],
)
def test_branches_by_values(kind, batches):
    """A branch that the trace didn't take has no plausible result from what the stage didn't get."""
    losses, _ = run_stages(make(kind), *batches)
    assert torch.tensor(losses[-1]).isnan()


def test_branches_with_integers():
    """Integers, which have no NaN, are in all stages, so that such a branch has its result."""
    check_same(BranchOnInput, (X, NO, NUMBERS), (X, YES, NUMBERS))


class BranchOnGradMode(Model):
    def forward(self, hidden):
        hidden = first = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden + first).mean() if torch.is_grad_enabled() else hidden


class BranchOnRequiresGrad(Model):
    def forward(self, hidden):
        hidden = first = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden) * (3 if first.requires_grad else 1)
        return hidden.mean()


class ReadsByNumpy(Model):
    def end(self, hidden, _first, scale):
        return hidden * torch.from_numpy(scale.numpy() * 2) + torch.tensor(scale.tolist(), dtype=hidden.dtype)


@pytest.mark.parametrize(
    ("kind", "more"), [(BranchOnGradMode, ()), (BranchOnRequiresGrad, ()), (ReadsByNumpy, (X[:, :1],))]
)
def test_what_the_trace_sees(kind, more):
    """The mode of gradients, requires_grad, and reads that are no operators are the same in the trace and in stages."""
    check_same(kind, (X, *more))


def test_grad_mode_of_each_call():
    """A step and a forward without gradients have flows of their own, in either order."""
    model = make(BranchOnGradMode)

    def program(group):
        pipeline = Pipeline(split_model(copy.deepcopy(model), 2, group, sample=X), group, 1)
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(pipeline(X))
            found.append(pipeline.step(X))
        return found

    _, found = run_ranks(program, 2)
    with torch.no_grad():
        expected = [model(X)]
    expected.append(model(X).detach())
    torch.testing.assert_close(found, expected * 2, rtol=1e-13, atol=1e-15)


class CountingBlock(Block):
    def forward(self, hidden):
        return super().forward(hidden), float(hidden.detach().abs().max() > 0) + 1


class UsesNumbers(Model):
    kind = CountingBlock

    def forward(self, hidden):
        hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden, factor = block(hidden)
        return (hidden * factor).mean()


def test_numbers_from_units():
    """A number that a unit computes from values is not what other stages know from the trace."""
    check_refused(UsesNumbers, "module 'blocks.0' returned 2.0 and not 1.0, as other stages expect", (X,))


class LosingBlock(Block):
    def __init__(self):
        super().__init__()
        self.loss = 0.0
        self.losses = []
        self.layer.loss = 0.0

    def forward(self, hidden):
        self.loss = hidden.pow(2).mean()
        self.losses.append(1.0)
        self.layer.loss = 2.0
        if hidden.sum() == torch.inf:  # not on the meta device, so that the trace runs it again
            raise OverflowError
        return super().forward(hidden)


class ReadsAttribute(Model):
    kind = LosingBlock

    def end(self, hidden, _first):
        return hidden + sum(block.loss for block in self.blocks)


class ReadsCollection(Model):
    kind = LosingBlock

    def end(self, hidden, _first):
        return hidden + sum(sum(block.losses) for block in self.blocks)


class ReadsInnerAttribute(Model):
    kind = LosingBlock

    def end(self, hidden, _first):
        return hidden + sum(block.layer.loss for block in self.blocks)


class SetsAttribute(Model):
    def forward(self, hidden):
        for block in self.blocks:
            block.factor = hidden.mean()
        return super().forward(hidden)


def test_attributes_set_from_outside():
    """What the model's code sets in a block would not come to the block's stage."""
    check_refused(SetsAttribute, "the model's code sets 'blocks.0.factor' outside of the forward of this module", (X,))


class ReadsNothing(Model):
    kind = LosingBlock


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ReadsAttribute, "loss"), (ReadsCollection, "losses"), (ReadsInnerAttribute, "layer.loss")],
)
def test_attributes_of_blocks(kind, name):
    """What a block leaves in its attributes can't be read by code of other stages; leaving it there is no error."""
    check_refused(kind, f"the model's code reads 'blocks.0.{name}', which the forward of this module sets", (X,))


def test_unread_attributes():
    """Blocks may set attributes that only they read."""
    check_same(ReadsNothing, (X,))


class WritesInput(Model):
    def forward(self, hidden, scale):
        scale.mul_(2)
        hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden) * scale
        return hidden.mean()


def test_inputs_written_in_place():
    """An input that the code writes would be written by each stage again."""
    check_refused(WritesInput, "input 1 of WritesInput is written in place by its code", (X, X[:, :1].clone()))


def test_any_error_ends_the_call_on_all_ranks():
    """Errors of any class on one rank, also while times are measured, are raised by the others at once."""

    def program(group):
        kind = LookupError if group.rank == 0 else UnsupportedOpError
        with pytest.raises(kind):
            split_model(make(Embeds), 2, group, Balance.TIMES, sample=torch.tensor([[50]]))

    run_ranks(program, 2, timeout=20)


class Embeds(Model):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).double().train()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_hugging_face(is_checkpointed):
    """Checkpointing of blocks may be on before the split; padded labels have one mean with num_items_in_batch."""
    model = llama()
    tokens = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 2:] = -100
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()
    if is_checkpointed:
        model.activation_checkpointing_enable()
    batch = {"input_ids": tokens, "labels": labels, "num_items_in_batch": (labels[:, 1:] != -100).sum()}

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group)
        pipeline = Pipeline(stages, group, 2, loss_reduction=LossReduction.SUM)
        torch.testing.assert_close(pipeline.step(batch).item(), loss.item(), rtol=1e-6, atol=0)  # of float32
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)

    run_ranks(program, 2)


class WithTable(Model):
    """Has a parameter and a buffer of its own, which its blocks' stages use."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8))
        self.register_buffer("factors", torch.arange(8.0), persistent=False)

    def forward(self, hidden):
        hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden + self.table) * self.factors
        return hidden.mean()


def set_table(module):
    with torch.no_grad():
        if isinstance(module, WithTable):
            module.table.fill_(0.5)
            module.factors = torch.arange(8.0, dtype=torch.float64)
        elif isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            module.bias.zero_()


def test_tensors_of_containers_from_meta():
    """``init`` gets a container as a module of its class; tensors that it leaves out are NaN, not what memory had."""
    with torch.device("meta"):
        model = WithTable().double()
    whole = WithTable().double()
    whole.apply(set_table)

    def program(group):
        stages = split_model(copy.deepcopy(model), 2, group, sample=X)
        stages[group.rank].materialise(set_table)
        loss = Pipeline(stages, group, 1).step(X)
        torch.testing.assert_close(loss.item(), whole(X).item(), rtol=1e-14, atol=0)
        other = split_model(copy.deepcopy(model), 2, group, sample=X)
        other[group.rank].materialise(lambda module: None if isinstance(module, WithTable) else set_table(module))
        assert other[group.rank].table.isnan().all()
        assert Pipeline(other, group, 1).step(X).isnan()
        with pytest.raises(UnsupportedOpError, match=r"\(WithTable\) is on the meta device and has no reset_param"):
            split_model(copy.deepcopy(model), 2, group, sample=X)[group.rank].materialise()

    run_ranks(program, 2)


class Rows(nn.Module):
    """A table whose rows are named by floats, as the patches of Pix2Struct have their places."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x):
        return self.table.weight[[int(row) for row in x[:, 0].long().tolist()]]


class WithRows(Model):
    """A model whose first module makes indices of its input."""

    def __init__(self):
        super().__init__()
        self.rows = Rows()

    def forward(self, x):
        x = self.rows(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_indices_made_of_inputs_that_later_stages_do_not_get():
    torch.manual_seed(0)
    model = WithRows().double()
    x = torch.tensor([[1.0], [3.0], [0.0]], dtype=torch.float64)
    stages = split_model(model, 2, None, sample=x)
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))
