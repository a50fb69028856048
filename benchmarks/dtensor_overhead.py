"""The overhead of operators on distributed tensors, beside torch's DTensor.

    python benchmarks/dtensor_overhead.py [--rounds 40] [--plot overhead.png]

One rank and one thread, tensors of 8 x 8: almost all of the time is dispatch. The overhead is the CPU time of the
operator on distributed tensors less that of the plain operator, each the least of the rounds; rounds of the three
alternate, and are so short that other programs disturb few of them. "grad" means that inputs require gradients, so that
autograd records the operator; "backward" is the gradient of a pointwise operator's input, which some compute by several
others. Results are compared with the plain operator's, or the benchmark fails.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.distributed.tensor
from torch.nn import functional

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALLS = 100
KINDS = ("plain", "ferrodist", "torch")

OPERATORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "add": lambda t: t["rows"] + t["other"],
    "add a number": lambda t: t["rows"] + 1,
    "multiply": lambda t: t["rows"] * t["other"],
    "relu": lambda t: torch.relu(t["rows"]),
    "gelu": lambda t: functional.gelu(t["rows"]),
    "mm": lambda t: t["rows"] @ t["whole"],
    "linear": lambda t: functional.linear(t["rows"], t["whole"]),
    "sum of a dim": lambda t: t["rows"].sum(1),
    "softmax": lambda t: torch.softmax(t["rows"], -1),
    "layer_norm": lambda t: functional.layer_norm(t["rows"], (8,)),
    "view": lambda t: t["rows"].view(8, 2, 4),
    "transpose": lambda t: t["rows"].transpose(0, 1),
    "detach": lambda t: t["rows"].detach(),
}
IN_PLACE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "add_": lambda t: t["rows"].add_(t["other"]),
    "mul_ by a number": lambda t: t["rows"].mul_(1.0),
    "_foreach_add_ of 10": lambda t: torch._foreach_add_([t["rows"]] * 10, [t["other"]] * 10),
}
POINTWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "pow 2": lambda x, _: x.pow(2),
    "neg": lambda x, _: x.neg(),
    "abs": lambda x, _: x.abs(),
    "exp": lambda x, _: x.exp(),
    "cos": lambda x, _: x.cos(),
    "tanh": lambda x, _: x.tanh(),
    "sigmoid": lambda x, _: x.sigmoid(),
    "erf": lambda x, _: x.erf(),
    "clamp": lambda x, _: x.clamp(-1, 1),
    "relu": lambda x, _: x.relu(),
    "gelu": lambda x, _: functional.gelu(x),
    "silu": lambda x, _: functional.silu(x),
    "softplus": lambda x, _: functional.softplus(x),
    "leaky_relu": lambda x, _: functional.leaky_relu(x),
    "elu": lambda x, _: functional.elu(x),
}


def make_tensors(meeting_file: str) -> dict[str, dict[str, Any]]:
    """The same inputs, plain and distributed by both: two divided by rows, one whole."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=0, world_size=1)
    theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    ours = fd.DeviceMesh(fd.SimulatedBackend.create_group(1)[0], (1,))
    torch.manual_seed(0)
    plain = {name: torch.randn(8, 8) for name in ("rows", "other", "whole")}
    placed = {"rows": fd.Shard(0), "other": fd.Shard(0), "whole": fd.Replicate()}
    their_placed = {
        name: torch.distributed.tensor.Replicate() if name == "whole" else torch.distributed.tensor.Shard(0)
        for name in plain
    }
    return {
        "plain": plain,
        "ferrodist": {name: fd.distribute(one.clone(), ours, placed[name]) for name, one in plain.items()},
        "torch": {
            name: torch.distributed.tensor.distribute_tensor(one.clone(), theirs, [their_placed[name]])
            for name, one in plain.items()
        },
    }


def measure(tensors: dict[str, dict[str, Any]], num_rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each operator, of each kind."""
    found: dict[str, dict[str, float]] = {}
    for grad in (False, True):
        for kind in KINDS:
            for one in tensors[kind].values():
                one.requires_grad_(grad)
        for name, operator in OPERATORS.items():
            check(name, operator, tensors)
            found[f"{name}, grad" if grad else name] = time_kinds(operator, tensors, num_rounds)
    for name, function in POINTWISE.items():
        add_backward(name, function, tensors)
        found[f"{name}, backward"] = time_kinds(lambda t: t["graph"](), tensors, num_rounds)
    with torch.no_grad():
        for name, function in POINTWISE.items():
            operator = lambda t, one=function: one(t["rows"], t["other"])  # noqa: E731 - a function of its own
            found.setdefault(f"{name}, forward", time_kinds(operator, tensors, num_rounds))
        for name, operator in IN_PLACE.items():
            found[name] = time_kinds(operator, tensors, num_rounds)
    return found


def add_backward(
    name: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tensors: dict[str, dict[str, Any]]
) -> None:
    """Give each kind's tensors a "graph", which computes the gradient of an operator's first input."""
    expected = None
    for kind in KINDS:
        own = tensors[kind]
        result, rows = function(own["rows"], own["other"]), own["rows"]
        own["graph"] = functools.partial(torch.autograd.grad, result, rows, own["other"].detach(), retain_graph=True)
        (grad,) = own["graph"]()
        grad = grad.full_tensor() if kind != "plain" else grad
        expected = grad if expected is None else expected
        if not torch.allclose(grad, expected, atol=1e-5):
            raise RuntimeError(f"the gradient of {name} on distributed tensors of {kind} is not the plain one")


def time_kinds(
    operator: Callable[[dict[str, Any]], Any], tensors: dict[str, dict[str, Any]], num_rounds: int
) -> dict[str, float]:
    """Microseconds of one operator, of each kind, in turns."""
    least = dict.fromkeys(KINDS, float("inf"))
    for _ in range(num_rounds):
        for kind in KINDS:
            inputs = tensors[kind]
            for _ in range(10):
                operator(inputs)
            began = time.thread_time()
            for _ in range(CALLS):
                operator(inputs)
            least[kind] = min(least[kind], 1e6 * (time.thread_time() - began) / CALLS)
    return least


def check(name: str, operator: Callable[[dict[str, Any]], Any], tensors: dict[str, dict[str, Any]]) -> None:
    """Raise unless the three agree."""
    expected = operator(tensors["plain"]).detach()
    for kind in KINDS[1:]:
        got = operator(tensors[kind]).detach().full_tensor()
        if not torch.allclose(got, expected, atol=1e-6):
            raise RuntimeError(f"{name} on distributed tensors of {kind} is not what it is on plain ones")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--plot", help="a PNG file for the overheads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(make_tensors(f"{folder}/meeting"), options.rounds)
        torch.distributed.destroy_process_group()
    print(f"{'microseconds':24} {'plain':>8} {'ferrodist':>10} {'torch':>8}   {'overhead: ferrodist / torch':>26}")
    for name, times in found.items():
        ours, theirs = (times[kind] - times["plain"] for kind in KINDS[1:])
        print(
            f"{name:24} {times['plain']:8.2f} {times['ferrodist']:10.2f} {times['torch']:8.2f}"
            f"   {ours:8.2f} / {theirs:6.2f} = {ours / theirs:5.2f}"
        )
    for suffix in ("forward", "backward"):
        ours = sorted(
            found[f"{name}, {suffix}"]["ferrodist"] - found[f"{name}, {suffix}"]["plain"] for name in POINTWISE
        )
        middle = statistics.median(ours)
        print(f"{len(ours)} pointwise operators, {suffix}: median overhead {middle:.2f}, most {ours[-1]:.2f}")
    if options.plot:
        draw(found, options.plot)


def draw(found: dict[str, dict[str, float]], path: str | Path) -> None:
    """Draw the overheads."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for plots

    figure = Figure(figsize=(8, 14), layout="constrained", dpi=150)
    axes = figure.subplots()
    names = list(reversed(found))
    for offset, kind, color in ((0.2, "ferrodist", "#08519c"), (-0.2, "torch", "#bbbbbb")):
        places = [place + offset for place in range(len(names))]
        axes.barh(places, [found[name][kind] - found[name]["plain"] for name in names], 0.4, color=color, label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.set(title="Overhead of an operator on a distributed tensor", xlabel="microseconds")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    main()
