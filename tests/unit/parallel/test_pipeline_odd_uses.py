"""Pipelines that are used in ways that few programs use them."""

import gc
import weakref

import pytest
import torch
from pipeline_models import Mlp, fill
from torch import nn

from ferrodist.errors import PipelineError
from ferrodist.parallel.pipeline import Pipeline, PipelineSchedule
from ferrodist.testing import run_ranks


class Failing(nn.Module):
    """A layer that raises in forwards or backwards as long as it is told to; a layer may be in several."""

    def __init__(self, layer=None, fails=None):
        super().__init__()
        self.layer = fill(nn.Linear(6, 6)) if layer is None else layer
        self.fails = fails

    def forward(self, x):
        if self.fails == "forward":
            raise RuntimeError("no forward")
        made = self.layer(x)
        if self.fails == "backward":
            made.register_hook(self._backward)
        return made

    def _backward(self, gradient):
        raise RuntimeError("no backward")


def test_a_wrong_batch_after_a_failure():
    """The error is that of the batch; it names no stage, in which the step before has failed."""

    def program(group):
        stages = [Failing(fails="forward"), Failing()]
        pipeline = Pipeline(stages, group, 2, loss_fn=Mlp.loss)
        with pytest.raises(PipelineError, match="stage 0 failed in the forward"):
            pipeline.step(*Mlp.batch(4))
        kind = PipelineError if group.rank else ValueError
        with pytest.raises(kind, match="inputs has 1 samples") as failure:
            pipeline.step(Mlp.batch(1)[0], Mlp.batch(4)[1])
        assert "stage" not in str(failure.value)

    run_ranks(program, 2)


def test_what_a_step_leaves():
    """After a step, or one that failed, or a forward for inference, batch and activations are gone, without the collector."""

    class Watched(nn.Sequential):
        def forward(self, x):
            made = super().forward(x)
            seen.extend([weakref.ref(x), weakref.ref(made)])
            return made

    seen = []

    def use(pipeline, is_inference):
        inputs, targets = Mlp.batch(4)
        seen.extend([weakref.ref(inputs), weakref.ref(targets)])
        if is_inference:
            with torch.no_grad():
                pipeline(inputs)
        else:
            pipeline.step(inputs, targets)

    def program(group):
        failing = Failing()
        pipeline = Pipeline([Watched(nn.Linear(6, 6)), Watched(failing)], group, 2, loss_fn=Mlp.loss)
        gc.collect()
        gc.disable()  # in a process of its own
        for fails in (None, "forward", "backward", "inference"):
            failing.fails = fails
            seen.clear()
            try:
                use(pipeline, fails == "inference")
            except PipelineError:
                assert fails
            assert not any(each() is not None for each in seen), fails

    run_ranks(program, 2, backend="native")


def test_a_step_after_a_forward():
    """The forward is given up: the step keeps no more than it has itself, and there is no backward from the forward."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 4, schedule=PipelineSchedule.ONE_F_ONE_B, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(4)
        pipeline.step(inputs, targets)
        expected = [parameter.grad.clone() for parameter in pipeline.parameters()]
        peak = pipeline.peak_activations
        pipeline.zero_grad()
        pipeline(inputs)
        pipeline.step(inputs, targets)
        assert all(torch.equal(one.grad, two) for one, two in zip(pipeline.parameters(), expected, strict=True))
        assert pipeline.peak_activations == peak
        with pytest.raises((RuntimeError, PipelineError), match="no forward to go backward from"):
            pipeline.backward()

    run_ranks(program, 2)
