"""How a schedule is told of the calls of units."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.parallel.sharded.schedule import Schedule
    from ferrodist.parallel.sharded.unit import Unit

__all__ = ["install_hooks", "outside_of_compiler"]

R = TypeVar("R")


def install_hooks(unit: Unit, schedule: Schedule) -> None:
    """Have the schedule told of a unit's calls, and have modules refuse to be called without their parameters."""

    def before(_module: torch.nn.Module, _args: object) -> None:
        schedule.before_call(unit)

    def after(_module: torch.nn.Module, _args: object, output: Any) -> None:
        schedule.after_call(unit, output, succeeded=output is not None or sys.exc_info()[0] is None)

    def check(module: torch.nn.Module, _args: object) -> None:
        if not unit.is_shown:
            raise RuntimeError(
                f"{with_article(type(module).__name__)} of {unit.title} was called where its parameters are not"
                " gathered: call the"
                " FSDP, or use summon_full_params()"
            )

    owners = {module for flat in unit.flats for places in flat.places for module, _ in places}
    for module in owners:
        module.register_forward_pre_hook(outside_of_compiler(check), prepend=True)
    if unit.number:
        unit.module.register_forward_pre_hook(outside_of_compiler(before), prepend=True)
        unit.module.register_forward_hook(outside_of_compiler(after), always_call=True)


def outside_of_compiler(function: Callable[..., R]) -> Callable[..., R]:
    """The same function, into which torch.compile of a module around it does not look.

    The compiler is slow to load, and asked only where somebody else has loaded it.
    """

    @wraps(function)
    def apart(*arguments: Any, **keywords: Any) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        disabled: Callable[..., R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments, **keywords)

    return apart
