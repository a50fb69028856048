"""The outcome of a cell, a family distributed in one way; and the error of a result against that of one process."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.errors import CollectiveMismatchError, DistributedError, PipelineError, RankFailedError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.backends.base import Backend

TOLERANCE = 1e-5
"""The largest error of a right result: some steps of transformers, such as its norms, are in float32.

With those steps in float64, too, the largest one of tensor parallelism, of DeepSeek-V3, falls from 1e-6 to 1e-13.
"""

_MAX_REASON = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a cell: "ok", "refused", "wrong", "error" or "not applicable"."""

    kind: str
    error: float = 0.0
    """The largest difference from one process, relative to the largest element of its tensor."""
    reason: str = ""
    """Why it isn't "ok"; or what an "ok" is without."""

    def to_json(self) -> dict[str, Any]:
        """The outcome for a file, whose figures have one digit."""
        found: dict[str, Any] = {"outcome": self.kind}
        if self.kind in {"ok", "wrong"}:
            found["error"] = float(f"{self.error:.0e}")
        return {**found, "reason": self.reason} if self.reason else found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """The outcome from a file."""
        return cls(kind=found["outcome"], error=found.get("error", 0.0), reason=found.get("reason", ""))

    def __str__(self) -> str:
        figure = f" ({self.error:.0e})" if self.kind in {"ok", "wrong"} and self.error else ""
        return f"{self.kind}{figure}{f': {self.reason}' if self.reason else ''}"


class NotApplicableError(Exception):
    """The family has nothing that this column distributes."""


class WrongResultError(Exception):
    """A result differs from that of one process."""


class RefusedError(Exception):
    """ferrodist refuses a model or a call of it, by a clear error."""


class FailedError(Exception):
    """Something else was raised."""


def run_cell(compare: Callable[[], Outcome]) -> Outcome:
    """The outcome of a comparison that may raise."""
    try:
        outcome = compare()
    except NotApplicableError as reason:
        return Outcome(kind="not applicable", reason=str(reason))
    except WrongResultError as reason:
        return Outcome(kind="wrong", reason=_shortened(str(reason)))
    except Exception as error:  # noqa: BLE001 - an error is an outcome
        kind = "refused" if isinstance(error, RefusedError) else "error"
        said = str(error) if isinstance(error, (RefusedError, FailedError)) else f"{type(error).__name__}: {error}"
        return Outcome(kind=kind, reason=_shortened(said))
    return outcome if outcome.error <= TOLERANCE else Outcome(kind="wrong", error=outcome.error, reason=outcome.reason)


def on_ranks(program: Callable[[Backend], Any], num_ranks: int = 2) -> list[Any]:
    """The results of ranks that are processes; raises RefusedError or FailedError for the first error of one."""

    def classified(group: Backend) -> Any:
        torch.manual_seed(5)
        try:
            return program(group)
        except WrongResultError:
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, PipelineError) and error.__cause__ is not None else error
            said = f"{type(cause).__name__}: {cause}"
            raise (RefusedError if _is_refusal(cause) else FailedError)(said) from error

    try:
        return run_ranks(classified, num_ranks, backend="native", timeout=300)
    except RankFailedError as error:
        cause = error.__cause__
        if isinstance(cause, (RefusedError, FailedError, WrongResultError)):
            raise cause from None
        raise


def _is_refusal(error: BaseException) -> bool:
    """Whether ferrodist's own code has raised an error on purpose, about the model or its call."""
    if isinstance(error, DistributedError) and not isinstance(error, (fd.UnsupportedOpError, CollectiveMismatchError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not (frames[-1].line or "").lstrip().startswith("raise"):
        return False
    return Path(fd.__file__).parent in Path(frames[-1].filename).parents


def _shortened(text: str) -> str:
    """A reason without what differs from machine to machine: paths, and what only tracebacks are for."""
    text = re.sub(r"(?:/[\w.+-]+){2,}", lambda found: found[0].rpartition("/")[2], " ".join(text.split()))
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3].rstrip() + "..."


def find_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two sets of tensors, each relative to its largest element.

    Raises:
        WrongResultError: One isn't there, or has another shape, or differs by more than the tolerance.
    """
    if missing := set(expected) ^ set(found):
        raise WrongResultError(f"only one of the two has {sorted(missing)[:3]}")
    largest = 0.0
    for name, tensor in expected.items():
        other = found[name].detach()
        if other.shape != tensor.shape:
            raise WrongResultError(f"{name} has shape {tuple(other.shape)} and not {tuple(tensor.shape)}")
        if not tensor.numel():
            continue
        difference = (other.double() - tensor.detach().double()).abs().max().item()
        # Where all elements are near 0, such as new biases, their differences count as they are.
        error = difference / max(tensor.abs().max().item(), 1e-2)
        if not error <= TOLERANCE:  # NaN, too
            raise WrongResultError(f"{name} differs by {error:.0e} of its largest element")
        largest = max(largest, error)
    return largest
