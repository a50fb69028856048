"""Models in stages, and what one process finds of them."""

import functools

import torch
from torch import nn
from torch.nn import functional

from ferrodist.parallel.pipeline import PipelineSchedule

KINDS = [
    (PipelineSchedule.GPIPE, 1),
    (PipelineSchedule.ONE_F_ONE_B, 1),
    (PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, 2),
    (PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, 3),
    (PipelineSchedule.LOOPED_BFS, 2),
    (PipelineSchedule.LOOPED_BFS, 3),
    (PipelineSchedule.ZERO_BUBBLE_H1, 1),
    (PipelineSchedule.ZERO_BUBBLE_V, 2),
    (PipelineSchedule.DUAL_PIPE_V, 2),
]
"""Schedules, each with how many stages it has on a rank."""

FEW_KINDS = [
    (PipelineSchedule.ONE_F_ONE_B, 1),
    (PipelineSchedule.LOOPED_BFS, 2),
    (PipelineSchedule.DUAL_PIPE_V, 2),
]
"""Of these for what does not depend on the order: whole backwards, several stages a rank, and both halves in a V."""


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def fill(module, seed=0):
    """Give a module parameters that depend on the seed alone, whatever other threads draw."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module


class Block(nn.Module):
    """Causal attention and a network, each added to what comes in."""

    def __init__(self, width, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attention(self.first(x)).view(batch, length, 3, self.num_heads, -1)
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.second(x))


class Embedding(nn.Module):
    """Tokens and places."""

    def __init__(self, vocabulary, length, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.places.weight[: tokens.shape[1]]


class Mlp:
    """Layers of 6 numbers."""

    @staticmethod
    def stages(count):
        return [fill(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), seed) for seed in range(count)]

    @staticmethod
    def batch(size):
        return torch.randn(size, 6, generator=seeded(1)), torch.randn(size, 6, generator=seeded(2))

    loss = staticmethod(functional.mse_loss)


class Cnn:
    """Convolutions with batch norm, then a classifier."""

    @staticmethod
    def stages(count):
        convolutions = [
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(count)
        ]
        convolutions[-1].extend(nn.Sequential(nn.Flatten(), nn.Linear(3 * 5 * 5, 4)))
        return [fill(stage, seed) for seed, stage in enumerate(convolutions)]

    @staticmethod
    def batch(size):
        labels = torch.randint(4, (size,), generator=seeded(2))
        return torch.randn(size, 3, 5, 5, generator=seeded(1)), labels

    loss = staticmethod(functional.cross_entropy)


class Gpt:
    """A GPT of 11 words."""

    @staticmethod
    def stages(count):
        stages = [nn.Sequential(Block(8)) for _ in range(count)]
        stages[0].insert(0, Embedding(11, 5, 8))
        stages[-1].extend([nn.LayerNorm(8), nn.Linear(8, 11, bias=False)])
        return [fill(stage, seed) for seed, stage in enumerate(stages)]

    @staticmethod
    def batch(size):
        tokens = torch.randint(11, (size, 6), generator=seeded(1))
        return tokens[:, :-1], tokens[:, 1:]

    @staticmethod
    def loss(scores, tokens):
        return functional.cross_entropy(scores.transpose(1, 2), tokens)


@functools.cache
def one_process(model, num_stages, num_microbatches, size):
    """Losses of the microbatches, and each stage's gradients and buffers, after a batch in one process.

    They are kept, for all schedules and ranks have the same: call it before there are ranks, so that all know them.
    """
    stages = model.stages(num_stages)
    whole = nn.Sequential(*stages)
    inputs, targets = model.batch(size)
    losses = []
    for part, target in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True):
        loss = model.loss(whole(part), target)
        losses.append(loss.item())
        loss.backward(torch.full_like(loss, len(part) / size))
    gradients = [[parameter.grad for parameter in stage.parameters()] for stage in stages]
    return losses, gradients, [list(stage.buffers()) for stage in stages]


class Wrapped(nn.Module):
    """A module in another, as in DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def checkpoint_module(self):
        return self.module
