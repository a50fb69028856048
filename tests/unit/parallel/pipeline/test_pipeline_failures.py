"""A failure in a pipeline is an error on all ranks, with its stage, and they can continue."""

import os
import re
import signal
import time

import pipeline_models
import pytest
import torch
from pipeline_models import FEW_KINDS, Mlp
from torch import nn

from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedTimeoutError,
    PeerLostError,
    PipelineError,
    RankFailedError,
    UnsupportedOpError,
)
from ferrodist.parallel.pipeline import Microbatches, Pipeline, PipelineOutput, PipelineSchedule, Schedule
from ferrodist.parallel.pipeline.schedule.lowering import forward_only
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "native"]


class Failing(nn.Module):
    """A layer that raises in a forward or backward of its choice."""

    def __init__(self, forward=None, backward=None):
        super().__init__()
        self.layer = pipeline_models.fill(nn.Linear(6, 6))
        self.num_forwards, self.num_backwards = 0, 0
        self.fail_forward, self.fail_backward = forward, backward

    def forward(self, x):
        if self.num_forwards == self.fail_forward:
            raise RuntimeError("no forward")
        self.num_forwards += 1
        made = self.layer(x)
        if made.requires_grad:
            made.register_hook(self._backward)
        return made

    def _backward(self, gradient):
        if self.num_backwards == self.fail_backward:
            raise RuntimeError("no backward")
        self.num_backwards += 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_that_raises(backend):
    """Every rank raises the same, with stage and microbatch; the next step works on all."""

    def program(group):
        for kind, stages_per_rank in FEW_KINDS:
            num_stages = 2 * stages_per_rank
            for stage in range(num_stages):
                for direction in ("forward", "backward"):
                    stages = [Failing(**{direction: 2 if number == stage else None}) for number in range(num_stages)]
                    pipeline = Pipeline(stages, group, 4, schedule=kind, loss_fn=Mlp.loss)
                    what = f"stage {stage} failed in the {direction} of microbatch 2, on rank .: .*no {direction}"
                    with pytest.raises(PipelineError, match=what) as failure:
                        pipeline.step(*Mlp.batch(8))
                    owner = pipeline.schedule.stage_ranks[stage]
                    assert failure.value.ranks == (owner,)
                    assert isinstance(failure.value.__cause__, RuntimeError) == (group.rank == owner)
                    for each in stages:
                        each.fail_forward = each.fail_backward = None
                    pipeline.step(*Mlp.batch(8))
                    assert len(pipeline.losses) == 4

    run_ranks(program, 2, backend=backend)


class WordlessError(Exception):
    """What can't be put into words."""

    def __str__(self):
        raise RuntimeError("no words")


def test_an_exception_without_a_message():
    """The other ranks get an error all the same."""

    def loss(output, target):
        raise WordlessError

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=loss)
        with pytest.raises(
            PipelineError, match=r"stage 1 failed in the forward .* WordlessError: it can't be put into words"
        ):
            pipeline.step(*Mlp.batch(4), timeout=5)

    run_ranks(program, 2)


def test_a_wrong_loss():
    """A loss of several elements, or of another type, is a failure of the last stage."""

    def program(group):
        for loss, what in ((lambda x, y: x, "of shape"), (lambda x, y: 1.0, "of type float")):
            pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=loss)
            with pytest.raises(
                PipelineError, match=f"stage 1 failed in the forward of microbatch 0, on rank 1.*{what}"
            ):
                pipeline.step(*Mlp.batch(4))

    run_ranks(program, 2)


def test_wrong_batches():
    """The rank with the wrong batch raises the reason, and the other ranks that it could not take part."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 4, loss_fn=Mlp.loss)
        inputs, targets = Mlp.batch(8)
        cases = [
            (inputs[:3], targets, 0, r"inputs has 3 samples .* can't be divided into 4"),
            (inputs, targets[:3], 1, r"targets has 3 samples"),
            (Microbatches([inputs] * 3), targets, 0, r"inputs has 3 microbatches, and the pipeline is for 4"),
            ((inputs, inputs[:5]), targets, 0, r"sizes \[5, 8\]"),
            (None, targets, 0, "inputs is None on the rank of the first stage"),
            (torch.tensor(1.0), targets, 0, "no tensor with a dim"),
            (inputs, {"x": object()}, 1, r"targets\['x'\] is of type object"),
        ]
        for case, (given, wanted, wrong, what) in enumerate(cases):
            kind = PipelineError if group.rank != wrong else (TypeError, ValueError)
            with pytest.raises(kind, match=what):
                pipeline.step(given, wanted)
            del case
            pipeline.step(inputs, targets)

    run_ranks(program, 2)


def test_batches_of_two_sizes():
    """Inputs and targets of different sizes are an error on all ranks, though each can be split."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=lambda output, target: output.sum() + target.sum())
        with pytest.raises(CollectiveMismatchError, match="given a batch of 8 samples, and the last one targets of 6"):
            pipeline.step(Mlp.batch(8)[0], Mlp.batch(6)[1])

    run_ranks(program, 2)


def test_uneven_microbatches_without_targets():
    """A mean of losses that the last stage computes itself can't be weighted."""

    class Ends(nn.Module):
        def forward(self, x):
            return x.sum()

    def program(group):
        pipeline = Pipeline([*Mlp.stages(1), Ends()], group, 3)
        with pytest.raises(CollectiveMismatchError, match="uneven microbatches"):
            pipeline.step(Mlp.batch(7)[0])
        pipeline.step(Mlp.batch(6)[0])

    run_ranks(program, 2)


def test_ranks_that_make_different_pipelines():
    """The first difference is named on all ranks."""

    def program(group):
        stages = Mlp.stages(4)
        own = PipelineSchedule.GPIPE if group.rank else PipelineSchedule.ONE_F_ONE_B
        cases = [
            ("rank 1 has 4 microbatches where rank 0 has 3 microbatches", stages[:2], 3 + group.rank, {}),
            ("rank 1 has the schedule 'gpipe' where rank 0 has the schedule '1f1b'", stages[:2], 2, {"schedule": own}),
            (
                "rank 1 has the skip 'a' from stage 0 to stage 1",
                stages[:2],
                2,
                {"skips": {"a": (0, 1)} if group.rank else {}},
            ),
        ]
        for what, given, number, options in cases:
            with pytest.raises(CollectiveMismatchError, match=what):
                Pipeline(given, group, number, **options)
        with pytest.raises(UnsupportedOpError, match="rank 1: its stage 1 is None"):
            Pipeline([stages[0], None], group, 2)

    run_ranks(program, 2)


def test_wrong_arguments():
    """Each is refused with the reason."""

    def program(group):
        stages = Mlp.stages(3)
        mine = Schedule.from_text(
            "ferrodist pipeline schedule: mine\nstage ranks: 0 1\nmicrobatches: 1\n"
            "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n"
        )
        forwards = forward_only(mine)
        cases = [
            (stages[:2], 1, {"schedule": forwards}, ValueError, "'mine, forward only' has no backward: pass one that"),
            (stages, 2, {}, ValueError, "3 stages can't be divided among 2 ranks"),
            (stages[:2], 2, {"schedule": mine}, ValueError, "'mine' is for 2 ranks, 1 microbatch and 2 stages"),
            (stages[:2], 2, {"schedule": "gpipe"}, TypeError, "is a PipelineSchedule or a Schedule, not 'gpipe'"),
            (stages[:2], 0, {}, ValueError, "num_microbatches"),
            (stages[:2], 2, {"skips": {"a b": (0, 1)}}, ValueError, "can't be the name of an argument"),
            (stages[:2], 2, {"skips": {"a": (1, 0)}}, ValueError, "from stage 1 to stage 0"),
            (stages[:2], 2, {"loss_reduction": "mean"}, TypeError, "LossReduction"),
        ]
        for given, number, options, kind, what in cases:
            with pytest.raises(kind, match=what):
                Pipeline(given, group, number, **options)
        Pipeline(stages[:2], group, 1, schedule=mine, loss_fn=Mlp.loss).step(*Mlp.batch(3))

    run_ranks(program, 2)


def test_undeclared_skips():
    """A stage that returns none, or others, fails, and no rank waits for them."""

    class Gives(nn.Module):
        def __init__(self, **names):
            super().__init__()
            self.names = names

        def forward(self, x, **_):
            return PipelineOutput(x, **dict.fromkeys(self.names, x))

    def program(group):
        for names in ((), ("b",), ("a", "b")):
            pipeline = Pipeline([Gives(**dict.fromkeys(names)), Gives()], group, 2, skips={"a": (0, 1)})
            what = f"stage 0 returns the skips {list(names)}, and the pipeline was made with ['a']"
            with pytest.raises(PipelineError, match=re.escape(what)):
                pipeline(Mlp.batch(4)[0])

    run_ranks(program, 2)


def test_values_that_cannot_be_sent():
    """Values of other types are refused where they are returned, with their path."""

    class Odd(nn.Module):
        def __init__(self, made):
            super().__init__()
            self.made = made

        def forward(self, x):
            return x, {"deep": [self.made]}

    def program(group):
        for made, what in (
            (object(), r"\[1\]\['deep'\]\[0\] is of type object"),
            (2**80, "64 bits"),
            (torch.ones(3).to_sparse(), "dense"),
        ):
            pipeline = Pipeline([Odd(made), Odd(None)], group, 2)
            with pytest.raises(PipelineError, match=f"stage 0 failed in the forward of microbatch 0.*{what}"):
                pipeline(Mlp.batch(4)[0])

    run_ranks(program, 2)


def test_a_rank_that_is_killed():
    """The others raise within a second, wherever they wait."""

    def program(group, victim, stage):
        class Dies(nn.Linear):
            def forward(self, x):
                if stage is not None and self.calls == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.calls += 1
                return super().forward(x)

        stages = [Dies(6, 6) if number == stage else nn.Linear(6, 6) for number in range(3)]
        for each in stages:
            each.calls = 0
        pipeline = Pipeline(stages, group, 4, schedule=PipelineSchedule.ONE_F_ONE_B, loss_fn=Mlp.loss)
        begin = time.monotonic()
        with pytest.raises(PeerLostError) as failure:
            pipeline.step(*Mlp.batch(8))
        assert failure.value.ranks == (victim,)
        assert time.monotonic() - begin < 1.5

    for victim in range(3):
        with pytest.raises(RankFailedError) as failure:
            run_ranks(program, 3, victim, victim, backend="native", timeout=30)
        assert failure.value.ranks == (victim,), failure.value


def test_a_rank_that_does_not_come():
    """The wait ends with the name of the value; ranks that wait for a waiting rank raise, too."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(3), group, 2, loss_fn=Mlp.loss)
        if group.rank:
            what = "rank 1 waited 0.3 s for the outputs of stage 0 for microbatch 0, which come from rank 0"
            with pytest.raises(DistributedTimeoutError, match=what) as failure:
                pipeline.step(*Mlp.batch(4), timeout=0.3 if group.rank == 1 else 10)
            assert failure.value.ranks == (0,)

    run_ranks(program, 3)


def test_a_rank_that_goes_forward_only():
    """The others wait for gradients, and say so."""

    def program(group):
        pipeline = Pipeline(Mlp.stages(2), group, 2, loss_fn=Mlp.loss)
        what = "rank 0 waited 0.3 s for the gradients of stage 1 for microbatch 0, which come from rank 1"
        if group.rank == 0:
            with pytest.raises(DistributedTimeoutError, match=what):
                pipeline.step(*Mlp.batch(4), timeout=0.3)
        else:
            with pytest.raises(DistributedTimeoutError, match=what):
                pipeline(timeout=10)

    run_ranks(program, 2)
