"""Pipelines that are used in ways that few programs use them."""

import pytest
import torch
from pipeline_models import Mlp, fill
from torch import nn

from ferrodist.errors import PipelineError
from ferrodist.parallel.pipeline import Pipeline
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
