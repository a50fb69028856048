"""Batches split and joined again, and the weights of microbatches' losses."""

import re

import pytest
import torch

from ferrodist.errors import CollectiveMismatchError
from ferrodist.parallel.pipeline.microbatch import Losses, LossReduction, Microbatches, Outputs, split_batch
from ferrodist.testing import run_ranks


def outputs_of(values, *, is_joined=True):
    """Outputs that have taken values for microbatches."""
    outputs = Outputs()
    outputs.is_joined = is_joined
    for microbatch, value in enumerate(values):
        outputs.add(microbatch, value)
    return outputs


def test_split_of_nested_batches():
    """Tensors are split along dim 0, the first microbatches one longer; other values are passed to all."""
    batch = ({"x": torch.arange(14).reshape(7, 2), "scale": torch.tensor(2.0)}, "mode", [None, 3])
    parts, counts = split_batch(batch, 3, "inputs")
    assert counts == [3, 2, 2]
    assert [part[0]["x"].tolist() for part in parts] == [
        each.tolist() for each in torch.arange(14).reshape(7, 2).tensor_split(3)
    ]
    assert all(part[0]["scale"] is batch[0]["scale"] and part[1:] == ("mode", [None, 3]) for part in parts)


def test_microbatches_are_not_views():
    """For autograd a write to one microbatch changes no other; those of a tensor with history keep it."""
    parts, _ = split_batch(torch.zeros(4), 2, "inputs")
    version = parts[1]._version
    parts[0].add_(1)
    assert parts[1]._version == version
    leaf = torch.ones(4, requires_grad=True)
    parts, _ = split_batch(leaf, 2, "inputs")
    parts[1].sum().backward()
    assert leaf.grad.tolist() == [0, 0, 1, 1]


def test_sparse_batches():
    """They can't be split, and the error is short."""
    with pytest.raises(ValueError, match=r"inputs has a tensor of layout torch\.sparse_coo, which can't be divided"):
        split_batch([torch.eye(4).to_sparse(), torch.eye(4)], 2, "inputs")


@pytest.mark.parametrize(("what", "stage"), [("inputs", "first"), ("targets", "last")])
def test_a_batch_that_is_missing(what, stage):
    """The error names the rank that needs it."""
    with pytest.raises(ValueError, match=f"{what} is None on the rank of the {stage} stage"):
        split_batch(None, 2, what)


def test_microbatches_are_not_split_again():
    """Microbatches are passed through, and their samples are not counted."""
    given = Microbatches([torch.ones(1), torch.ones(3)])
    parts, counts = split_batch(given, 2, "inputs")
    assert parts == given
    assert counts is None
    with pytest.raises(ValueError, match="inputs has 2 microbatches, and the pipeline is for 3"):
        split_batch(given, 3, "inputs")


@pytest.mark.parametrize("is_joined", [True, False])
def test_gradients_are_split(is_joined):
    """Outputs require grad where the stage's do; each microbatch gets its part of a given gradient, or None."""
    leaf = torch.ones(3, 2, requires_grad=True)
    values = [{"a": (part * 2, part.detach()), "b": part * 3, "n": 1} for part in leaf.split([1, 2])]
    outputs = outputs_of(values, is_joined=is_joined)
    given = outputs.result()
    first, gradient = torch.arange(6.0).reshape(3, 2), {"n": None}
    if is_joined:
        assert (given["a"][0].requires_grad, given["a"][1].requires_grad, given["n"]) == (True, False, 1)
        found = outputs.split({"a": [first, first], "b": None, **gradient})
    else:
        assert [each["a"][0].requires_grad for each in given] == [True, True]
        assert [each["a"][1].requires_grad for each in given] == [False, False]
        found = outputs.split(Microbatches({"a": [of, None], "b": None, **gradient} for of in first.split([1, 2])))
    assert [each[0].tolist() for each in found.values()] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert [each[1:] for each in found.values()] == [[None], [None]]


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(2),
        {"a": [None, None]},
        {"a": [torch.ones(2)]},
        {"b": torch.ones(2), "a": [1.0, None]},
        {"a": [None], "b": torch.ones(2)},
    ],
)
def test_gradients_in_another_nesting(wrong):
    """They are refused, with the right nesting."""
    leaf = torch.ones(2, requires_grad=True)
    outputs = outputs_of([{"a": [leaf * 1, leaf * 2], "b": leaf * 3}])
    with pytest.raises(ValueError, match="nested as the result of forward"):
        outputs.split(wrong)


def test_gradients_of_another_number_of_microbatches():
    """The numbers must match; a single gradient is that of a single microbatch."""
    leaf = torch.ones(2, requires_grad=True)
    outputs = outputs_of([leaf * 1, leaf * 2], is_joined=False)
    for wrong, number in ((Microbatches([leaf]), 1), (torch.ones(2), 1), (Microbatches([leaf] * 3), 3)):
        with pytest.raises(ValueError, match=f"there are 2 microbatches of outputs, and {number} of gradients"):
            outputs.split(wrong)
    assert outputs_of([leaf * 1], is_joined=False).split(torch.ones(2))[0][0].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
@pytest.mark.parametrize("is_joined", [True, False])
def test_gradients_of_another_shape(is_joined, shape):
    """They are refused, with both shapes."""
    leaf = torch.ones(1, requires_grad=True)
    outputs = outputs_of([leaf * 1, leaf * 2], is_joined=is_joined)
    wrong = torch.ones(shape) if is_joined else Microbatches([torch.ones(shape), None])
    expected = (2,) if is_joined else (1,)
    with pytest.raises(ValueError, match=re.escape(f"of shape {shape} for a tensor of shape {expected}")):
        outputs.split(wrong)


@pytest.mark.parametrize(
    "values",
    [
        [torch.ones(1), (torch.ones(1),)],
        [(torch.ones(1), 1), (torch.ones(1), 2)],
        [torch.tensor(1.0)] * 2,
        [torch.ones(2, 2), torch.ones(1, 1)],
    ],
)
def test_outputs_that_cannot_be_joined(values):
    """Outputs of different nestings or widths, or without a dim, are available one by one."""
    with pytest.raises(ValueError, match="can't be joined along dim 0: pass the inputs as Microbatches"):
        outputs_of(values).result()
    assert len(outputs_of(values, is_joined=False).result()) == 2


def share(losses):
    """What a pipeline of one rank knows of the losses at the end of a step."""
    return run_ranks(lambda group: losses.reduce_to_all(group, 10).item(), 1)[0]


def test_weights_of_losses():
    """In a mean by their samples, or equal where these are unknown; in a sum 1; a step forgets the previous one."""
    values = [torch.tensor(value, requires_grad=True) for value in (1.0, 2.0, 6.0)]
    mean, total = Losses(LossReduction.MEAN, 3), Losses(LossReduction.SUM, 3)
    for losses, counts, expected in (
        (mean, [3, 2, 2], [3 / 7, 2 / 7, 2 / 7]),
        (mean, None, [1 / 3] * 3),
        (total, [3, 2, 2], [1.0] * 3),
    ):
        losses.reset()
        losses.set_sample_counts(counts, "targets")
        weights = []
        for microbatch, value in enumerate(values):
            (begun,) = losses.add(microbatch, value)
            assert begun is value
            weights.append(losses.start_gradients[microbatch][0].item())
        assert weights == pytest.approx(expected)
        assert share(losses) == pytest.approx(sum(w * v.item() for w, v in zip(expected, values, strict=True)))
        assert losses.all_losses == [1.0, 2.0, 6.0]
    mean.reset()
    assert (share(mean), mean.all_losses) == (0, [0.0] * 3)


def test_losses_without_gradients():
    """Such a loss has no backward, an error in one process, too."""
    with pytest.raises(ValueError, match="the loss has no gradient"):
        Losses(LossReduction.MEAN, 1).add(0, torch.tensor(3.0))


@pytest.mark.parametrize("wrong", [1.0, torch.ones(2), torch.ones(0), torch.tensor(1j)])
def test_wrong_losses(wrong):
    """A loss is a tensor of one real element."""
    with pytest.raises((TypeError, ValueError), match="the loss is"):
        Losses(LossReduction.MEAN, 1).add(0, wrong)


@pytest.mark.parametrize(
    ("reduction", "inputs", "targets", "message"),
    [
        (LossReduction.MEAN, [2, 2], [2, 2], None),
        (LossReduction.MEAN, [2, 1], [2, 1], None),
        (LossReduction.MEAN, [2, 2], None, None),
        (LossReduction.MEAN, None, [2, 1], None),
        (LossReduction.SUM, [2, 1], None, None),
        (LossReduction.SUM, [2, 1], [2, 2], "a batch of 3 samples, and the last one targets of 4"),
        (LossReduction.MEAN, [2, 1], None, "a batch of 3 samples makes uneven microbatches"),
    ],
)
def test_numbers_of_samples_are_compared(reduction, inputs, targets, message):
    """Inputs and targets have equally many, where both are known; uneven ones can't be weighted without targets."""
    losses = Losses(reduction, 2)
    losses.set_sample_counts(inputs, "inputs")
    losses.set_sample_counts(targets, "targets")
    if message is None:
        share(losses)
        return
    with pytest.raises(Exception, match=message) as failure:
        share(losses)
    assert CollectiveMismatchError.__name__ in str(failure.value)
