"""Modules, optimizers and schedulers whose state is not as plain as most."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ferrodist.checkpoint import DistCheckpointError, OptimizerState, load_distributed, save_distributed

if TYPE_CHECKING:
    from pathlib import Path


class _Extra(torch.nn.Module):
    """A module with state of its own kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        """The extra state in state dicts."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ({"history": [1, 2, 3]}, {"history": []}),
        ({"seen": 3, "more": "x"}, {}),
        ([1, 2], None),
        (5, {"a": 1}),
        (torch.arange(5), torch.zeros(0)),
        (None, [1]),
    ],
)
def test_extra_state(tmp_path: Path, saved: Any, fresh: Any) -> None:
    """It is loaded as it was saved, whatever a fresh module has."""
    save_distributed({"model": _Extra(saved)}, tmp_path)
    model = _Extra(fresh)
    load_distributed(tmp_path, {"model": model})
    if isinstance(saved, torch.Tensor):
        assert model.extra.equal(saved)
    else:
        assert model.extra == saved


def test_extra_state_that_was_not_saved(tmp_path: Path) -> None:
    """It is reported as missing; without strict it stays."""
    model = _Extra([1])
    save_distributed({"model": {"linear.weight": torch.ones(2, 2), "linear.bias": torch.ones(2)}}, tmp_path)
    with pytest.raises(DistCheckpointError, match="_extra_state"):
        load_distributed(tmp_path, {"model": model})
    load_distributed(tmp_path, {"model": model}, strict=False)
    assert model.extra == [1]
    assert model.linear.bias.tolist() == [1.0, 1.0]


def test_counters(tmp_path: Path) -> None:
    """Counters stay counters, with their keys and counts."""
    counter = Counter({3: 2, "a": 1, (1, 2): 5})
    save_distributed({"counter": counter}, tmp_path)
    for into in ({"counter": None}, {"counter": Counter()}):
        loaded = load_distributed(tmp_path, into)["counter"]
        assert type(loaded) is Counter
        assert loaded == counter


def test_schedulers_in_sequence(tmp_path: Path) -> None:
    """MultiStepLR counts its milestones with a Counter, which SequentialLR needs as one."""

    def make() -> tuple[torch.optim.Optimizer, OptimizerState, torch.optim.lr_scheduler.SequentialLR]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = torch.optim.lr_scheduler
        schedule = [parts.LinearLR(optimizer), parts.MultiStepLR(optimizer, [3])]
        return optimizer, OptimizerState(model, optimizer), parts.SequentialLR(optimizer, schedule, milestones=[3])

    optimizer, state, scheduler = make()
    optimizer.step()
    scheduler.step()
    save_distributed({"optimizer": state, "scheduler": scheduler}, tmp_path)
    other, other_state, other_scheduler = make()
    load_distributed(tmp_path, {"optimizer": other_state, "scheduler": other_scheduler})
    rates = []
    for each, steps in ((optimizer, scheduler), (other, other_scheduler)):
        for _ in range(8):
            each.step()
            steps.step()
            rates.append(each.param_groups[0]["lr"])
    assert rates[:8] == rates[8:]


def test_optimizer_state_of_no_parameter_is_refused() -> None:
    """State that belongs to no parameter is refused rather than lost."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["seen"]["steps"] = 3  # type: ignore[index] # torch takes it all the same
    with pytest.raises(ValueError, match="'seen', which is none of its parameters"):
        OptimizerState(model, optimizer).state_dict()


@pytest.mark.parametrize("options", [{"capturable": True}, {"capturable": False}])
def test_scalar_state_is_on_the_optimizers_device(options: dict[str, bool]) -> None:
    """Fused and capturable optimizers have their step on the parameters' device, in the saved dtype."""
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved = OptimizerState(model, optimizer).state_dict()
    saved["param_groups"][0].update(options)
    for entries in saved["state"].values():
        entries["exp_avg"] = entries["exp_avg"].float()
    elsewhere = torch.nn.Linear(2, 2, device="meta", dtype=torch.bfloat16)
    other = torch.optim.Adam(elsewhere.parameters(), **options)
    OptimizerState(elsewhere, other).load_state_dict(saved)
    for entries in other.state.values():
        assert entries["step"].device.type == ("meta" if options["capturable"] else "cpu")
        assert (entries["exp_avg"].device.type, entries["exp_avg"].dtype) == ("meta", torch.float32)
        assert (entries["exp_avg_sq"].device.type, entries["exp_avg_sq"].dtype) == ("meta", torch.bfloat16)


def test_a_plain_optimizer_is_refused_as_a_target(tmp_path: Path) -> None:
    """Its parameters may be others than those with the same indices that were saved."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save_distributed({"optimizer": OptimizerState(model, optimizer)}, tmp_path)
    with pytest.raises(TypeError, match=r"\['optimizer'\] is an optimizer.*OptimizerState"):
        load_distributed(tmp_path, {"optimizer": optimizer})


def test_a_saved_state_fits_itself(tmp_path: Path) -> None:
    """A state loads into itself, with any containers."""
    state = {"shape": torch.Size([2, 3]), "tuple": (1, [2]), "set": {1}, "counter": Counter("aa"), "bytes": b"x"}
    save_distributed(state, tmp_path)
    assert load_distributed(tmp_path, state) == state


def test_a_list_of_another_length(tmp_path: Path) -> None:
    """The message says how to take it as it is."""
    save_distributed({"losses": [1.0, 2.0]}, tmp_path)
    with pytest.raises(DistCheckpointError, match="put None there"):
        load_distributed(tmp_path, {"losses": [0.0]})
    assert load_distributed(tmp_path, {"losses": None})["losses"] == [1.0, 2.0]
