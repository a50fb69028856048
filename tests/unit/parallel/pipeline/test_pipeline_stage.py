"""One stage: when it averages gradients, and what it retains."""

import contextlib

import pytest
import torch
from pipeline_models import fill
from torch import nn

from ferrodist.collectives.serialization import PackedValue
from ferrodist.parallel.pipeline.stage import MAIN, Stage


class Averaging(nn.Linear):
    """Notes for each forward and backward whether averaging is put off."""

    def __init__(self):
        super().__init__(3, 3)
        self.is_put_off = False
        self.notes = []

    @contextlib.contextmanager
    def no_sync(self):
        self.is_put_off = True
        yield
        self.is_put_off = False

    def forward(self, x):
        made = super().forward(x)
        self.notes.append(("forward", self.is_put_off))
        if made.requires_grad:
            made.register_hook(lambda _: self.notes.append(("backward", self.is_put_off)))
        return made


def begin(stage, microbatch):
    """A forward of a microbatch that came from another stage and goes on to one."""
    came = PackedValue.of(torch.ones(2, 3, requires_grad=True), "it")
    output = stage.forward(microbatch, {MAIN: came}, None)
    stage.retain_outputs(microbatch, MAIN, [output.value] if output.value.requires_grad else [])
    return output.value


@pytest.mark.parametrize("is_whole", [True, False])
def test_gradients_are_averaged_once(is_whole):
    """Only the microbatch whose backward is last averages; also with split backwards, which then are whole."""
    stage = Stage(fill(Averaging()), last_microbatch=0)
    for microbatch in range(3):
        begin(stage, microbatch)
    assert stage.num_in_flight == 3
    for done, microbatch in enumerate((1, 2, 0), 1):
        given = {MAIN: [torch.ones(2, 3)]}
        found = stage.backward(microbatch, given) if is_whole else stage.backward_input(microbatch, given)
        assert torch.equal(stage.module.bias.grad, torch.full((3,), 2.0 * done))
        assert torch.allclose(found[MAIN][0], stage.module.weight.sum(0).expand(2, 3))
        if not is_whole:
            assert stage.num_in_flight == 4 - done
            stage.backward_weight(microbatch)
        assert torch.equal(stage.module.bias.grad, torch.full((3,), 2.0 * done))
        assert stage.num_in_flight == 3 - done
    forwards, backwards = stage.module.notes[:3], stage.module.notes[3:]
    assert forwards == [("forward", False), ("forward", True), ("forward", True)]
    assert backwards == [("backward", True), ("backward", True), ("backward", False)]


def test_without_gradients():
    """A forward in no_grad() retains nothing, nor does a reset stage."""
    stage = Stage(fill(nn.Linear(3, 3)), last_microbatch=0)
    with torch.no_grad():
        assert not begin(stage, 0).requires_grad
    assert stage.num_in_flight == 0
    begin(stage, 0)
    begin(stage, 1)
    stage.backward_input(1, {MAIN: [torch.ones(2, 3)]})
    assert stage.num_in_flight == 2
    stage.reset()
    assert stage.num_in_flight == 0


def test_outputs_without_gradients():
    """An output without a gradient is left out; if none has one there is no backward."""
    for made in ([None], [torch.ones(2, 3)]):
        stage = Stage(fill(nn.Linear(3, 3)), last_microbatch=0)
        output = begin(stage, 0)
        stage.retain_outputs(0, "skip", [output * 2])
        (found,) = stage.backward(0, {MAIN: made, "skip": [None]})[MAIN]
        assert (found is None) == (stage.module.weight.grad is None) == (made == [None])
