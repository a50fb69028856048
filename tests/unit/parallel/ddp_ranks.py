"""What the tests of DDP share: models, ranks' errors, and a group that counts its collectives."""

import threading

import torch

from ferrodist import SimulatedBackend
from ferrodist.collectives.engines.reference import ReferenceEngine


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))


class Tied(torch.nn.Module):
    """Its weight is used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(6, 3)

    def forward(self, inputs):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Branches(torch.nn.Module):
    """Takes one of several ways through itself."""

    def __init__(self, num_branches=3):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(num_branches))

    def forward(self, inputs, *taken):
        return sum(self.branches[branch](inputs) for branch in taken).sum()


def seeded(make, dtype=torch.float64):
    """A model whose weights don't depend on who draws random numbers at the same time: make it before the ranks."""
    torch.manual_seed(1)
    return make().to(dtype)


def assert_same_bits(states):
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, states[0][name]), name


def caught(action):
    """What ``action`` raises, for ranks to return."""
    try:
        action()
    except Exception as error:
        return error
    return None


class CountingBackend(SimulatedBackend):
    """Counts its allreduces, and says when one has begun."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_engine("cpu", CountingCollectives(self))


class CountingCollectives(ReferenceEngine):
    def __init__(self, group):
        super().__init__(group)
        self.sizes = []
        self.num_broadcasts = 0
        self.begun = threading.Event()

    def run(self, op, sequence):
        if op.kind == "allreduce":
            self.sizes.append(op.source.numel())
            self.begun.set()
        elif op.kind == "broadcast":
            self.num_broadcasts += 1
        return super().run(op, sequence)


class TiedGpt(torch.nn.Module):
    """A small GPT whose output layer is its embedding."""

    def __init__(self, vocabulary=19, width=16, num_blocks=2, length=6):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        mask = torch.full((tokens.shape[1],) * 2, float("-inf"), dtype=self.norm.weight.dtype).triu(1)
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(self.norm(hidden))
