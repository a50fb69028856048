"""Answer requests with a model whose layers are spread over ranks.

    ferrodist run --nproc-per-node 3 examples/rpc/spread_inference.py
    python examples/rpc/spread_inference.py

Rank 0 is the client; every other rank keeps some of the layers, as an object that the client has a reference to. A
request waits a moment for others, so that they are answered in one batch. What one stage makes of a batch stays there,
the client gets a reference to it and passes that on, and the next stage fetches the activations itself: the client sees
none of them. While a batch is in one stage, others are in the stages before and after. The second form is one process
that is the client and has all layers. The weights are drawn; a real program would load them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import torch
from torch import nn

import ferrodist as fd

PATIENCE = 30.0  # seconds until a request has failed


class Block(nn.Module):
    """A network of one hidden layer, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        return x + self.layers(x)


def make_layers(first: int, last: int, width: int) -> nn.Sequential:
    """Make some of the model's layers; each has the same weights wherever it is made."""
    layers = []
    for number in range(first, last):
        torch.manual_seed(number)
        layers.append(Block(width))
    return nn.Sequential(*layers).eval()


class Stage:
    """Some of the model's layers, on the rank that has them.

    Args:
        first: Number of the first layer.
        last: Of the one after the last.
        width: Numbers that each layer takes and gives.
    """

    def __init__(self, first: int, last: int, width: int) -> None:
        self._layers = make_layers(first, last, width)
        self._times: list[tuple[float, float]] = []

    @torch.no_grad()
    def forward(self, activations: fd.rpc.RRef) -> torch.Tensor:
        """Run the layers.

        Args:
            activations: A reference to (batch, width), which the client has, or what another stage makes.
        """
        fetched = activations.to_here(timeout=PATIENCE)  # from its owner; waits until it is made
        began = time.monotonic()
        found = self._layers(fetched)
        self._times.append((began, time.monotonic()))
        return found

    def times(self) -> list[tuple[float, float]]:
        """When each batch was begun here, and ended, in seconds of the host's clock."""
        return self._times


class Client:
    """Answers requests: gathers them to batches, and sends these through the stages.

    Args:
        agent: Of this rank.
        stages: References to each `Stage`, in their order.
        batch_size: Requests in a batch; fewer, where they have waited for ``most_wait`` seconds.
        most_wait: See there.
        most_batches: That are on their way at once.
    """

    def __init__(
        self,
        agent: fd.rpc.RpcAgent,
        stages: list[fd.rpc.RRef],
        *,
        batch_size: int,
        most_wait: float,
        most_batches: int,
    ) -> None:
        self.num_batches = 0
        self._agent = agent
        self._stages = stages
        self._batch_size = batch_size
        self._most_wait = most_wait
        self._places = asyncio.Semaphore(most_batches)
        self._requests: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, request: torch.Tensor) -> torch.Tensor:
        """Give the model's output, (width,), for one request of the same shape."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[torch.Tensor] = loop.create_future()
        self._requests.append((request, answer))
        if len(self._requests) >= self._batch_size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._most_wait, self._send)
        return await answer

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        requests, self._requests = self._requests, []
        task = asyncio.create_task(self._answer(requests))
        self._sending.add(task)  # an event loop alone does not keep its tasks
        task.add_done_callback(self._sending.discard)

    async def _answer(self, requests: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]]) -> None:
        try:
            async with self._places:
                self.num_batches += 1
                outputs = await self._run_stages(torch.stack([request for request, _ in requests]))
        except Exception as error:  # noqa: BLE001 - whoever asked is to know, whatever it is
            for _, answer in requests:
                answer.set_exception(error)
            return
        for (_, answer), output in zip(requests, outputs, strict=True):
            answer.set_result(output)

    def _run_stages(self, batch: torch.Tensor) -> fd.rpc.Future:
        """Start a batch; nothing here waits, as each call takes a reference to what the one before will make."""
        activations = self._agent.reference(batch)
        for stage in self._stages[:-1]:
            activations = stage.remote(timeout=PATIENCE).forward(activations)
        return self._stages[-1].rpc_async(timeout=PATIENCE).forward(activations)


async def answer_all(client: Client, requests: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Ask everything at once, as many users would; give the outputs, and how long each took."""

    async def ask(request: torch.Tensor) -> tuple[torch.Tensor, float]:
        began = time.monotonic()
        return await client.ask(request), time.monotonic() - began

    answers = await asyncio.gather(*(ask(request) for request in requests))
    return torch.stack([output for output, _ in answers]), [seconds for _, seconds in answers]


def parse_arguments() -> argparse.Namespace:
    """How large the model is, and how it is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32, help="requests in a batch, at most (default: 32)")
    parser.add_argument(
        "--most-wait", type=float, default=0.01, metavar="SECONDS", help="for others to come (default: 0.01)"
    )
    parser.add_argument("--plot", type=Path, help="a PNG file for when each stage had which batch")
    return parser.parse_args()


def draw_plot(times: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw when each stage had which batch; ranks of several hosts have clocks that can't be compared."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - nothing else needs it

    figure = Figure(figsize=(11, 1.5 + 0.5 * len(times)), layout="constrained", dpi=150)
    axes = figure.subplots()
    zero = min(began for spans in times.values() for began, _ in spans)
    for place, spans in enumerate(times.values()):
        bars = [(1e3 * (began - zero), 1e3 * (ended - began)) for began, ended in spans]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=["#08519c", "#9ecae1"])
    axes.set(title="Batches in each stage", xlabel="ms", yticks=range(len(times)), yticklabels=list(times))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def serve(agent: fd.rpc.RpcAgent, options: argparse.Namespace) -> None:
    """Put the layers where they belong, ask, and compare with the model in one process."""
    names = [f"stage {number}" for number in range(1, agent.world_size)] or ["client"]
    bounds = [place * options.layers // len(names) for place in range(len(names) + 1)]
    stages = [
        agent.remote(name, "Stage", first, last, options.width)
        for name, first, last in zip(names, bounds[:-1], bounds[1:], strict=True)
    ]
    requests = torch.randn(options.requests, options.width, generator=torch.Generator().manual_seed(0))
    for stage in stages:
        stage.rpc_sync(timeout=PATIENCE).times()  # it has been made

    client = Client(
        agent, stages, batch_size=options.batch_size, most_wait=options.most_wait, most_batches=2 * len(stages)
    )
    began = time.perf_counter()
    outputs, latencies = asyncio.run(answer_all(client, requests))
    seconds = time.perf_counter() - began
    latencies.sort()
    print(f"{len(stages)} stage(s), {len(requests)} requests in {client.num_batches} batches")
    print(f"{len(requests) / seconds:.0f} requests a second, median {1e3 * latencies[len(latencies) // 2]:.0f} ms")

    with torch.no_grad():
        expected = make_layers(0, options.layers, options.width)(requests)
    print(f"largest difference to the model in one process: {(outputs - expected).abs().max():.1e}")
    if options.plot is not None:
        times = {name: stage.rpc_sync().times() for name, stage in zip(names, stages, strict=True)}
        draw_plot(times, options.plot)


def main() -> None:
    """Ask, or keep layers, as one rank of the job, or do both when no launcher has given this process a rank."""
    options = parse_arguments()
    group = fd.init_process_group() if "RANK" in os.environ else fd.SimulatedBackend.create_group(1)[0]
    name = "client" if group.rank == 0 else f"stage {group.rank}"
    with fd.rpc.RpcContext(group, {"Stage": Stage}, name=name, drain_timeout=600) as agent:
        if agent.rank == 0:
            serve(agent, options)
        # All others have nothing to do here: they serve the calls of Stage.
    fd.destroy_process_group()  # does nothing for a process that is alone


if __name__ == "__main__":
    main()
