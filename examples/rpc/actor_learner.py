"""Learn to balance a pole on a cart: actors play, and a learner improves the policy from what they send.

    ferrodist run --nproc-per-node 3 examples/rpc/actor_learner.py
    python examples/rpc/actor_learner.py

Rank 0 is the learner, all other ranks are actors. Each plays several carts at once with the newest policy, and while
the learner makes a step with what one actor sent, the others play on, with policies that are a few steps old. The
learner takes the actors in turns, so the same seed on as many ranks gives the same numbers, however fast each is. The
second form is one process that does both. No process group is needed: agents reach each other over TCP.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import ferrodist as fd

PATIENCE = 60.0  # seconds that the episodes of an actor may take
DISCOUNT = 0.99

GRAVITY = 9.8  # m/s^2
CART_MASS, POLE_MASS = 1.0, 0.1  # kg
HALF_POLE = 0.5  # m
FORCE = 10.0  # N
SECONDS = 0.02  # of a step
FARTHEST, STEEPEST = 2.4, 0.2095  # m and radians: beyond one of these an episode ends


def move(state: torch.Tensor, push_right: torch.Tensor) -> torch.Tensor:
    """Move carts for one step.

    The equations are of Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning
    control problems" (1983), without friction.

    Args:
        state: (carts, 4): place, speed, the pole's angle from upright, and its angular speed.
        push_right: (carts,): the direction in which each cart is pushed; False is left.

    Returns:
        The next state.
    """
    _, speed, angle, turn = state.unbind(dim=1)
    force = torch.where(push_right, FORCE, -FORCE)
    mass = CART_MASS + POLE_MASS
    sine, cosine = angle.sin(), angle.cos()
    push = (force + POLE_MASS * HALF_POLE * turn**2 * sine) / mass
    turn_change = (GRAVITY * sine - cosine * push) / (HALF_POLE * (4 / 3 - POLE_MASS * cosine**2 / mass))
    speed_change = push - POLE_MASS * HALF_POLE * turn_change * cosine / mass
    change = torch.stack([speed, speed_change, turn, turn_change], dim=1)
    return state + SECONDS * change


def make_network(num_outputs: int) -> nn.Module:
    """Make a network for states of carts."""
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, num_outputs))


class Actor:
    """Plays episodes. It stays on its rank, and the learner calls it by a reference.

    Args:
        seed: Of its episodes.
        num_carts: How many it plays at once.
        most_steps: An episode that has not ended by then does.
    """

    def __init__(self, seed: int, num_carts: int, most_steps: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self._num_carts = num_carts
        self._most_steps = most_steps
        self._policy = make_network(2)

    @torch.no_grad()
    def play(self, policy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Play an episode with each cart.

        Args:
            policy: The newest weights.

        Returns:
            "states" (steps, carts, 4); of the same steps and carts the "pushes" to the right, the "chances" that these
            pushes had, and "were_playing": whether the cart was in its episode still, which is a reward of one.
        """
        self._policy.load_state_dict(policy)
        state = 0.1 * torch.rand(self._num_carts, 4, generator=self._draw) - 0.05
        is_playing = torch.ones(self._num_carts, dtype=torch.bool)
        steps = []
        while is_playing.any() and len(steps) < self._most_steps:
            chance_of_right = self._policy(state).softmax(dim=1)[:, 1]
            push_right = torch.rand(self._num_carts, generator=self._draw) < chance_of_right
            chance = torch.where(push_right, chance_of_right, 1 - chance_of_right)
            steps.append((state, push_right, chance, is_playing))
            state = move(state, push_right)
            is_playing = is_playing & (state[:, 0].abs() < FARTHEST) & (state[:, 2].abs() < STEEPEST)
        parts = [torch.stack(part) for part in zip(*steps, strict=True)]
        return dict(zip(("states", "pushes", "chances", "were_playing"), parts, strict=True))


class Learner:
    """Improves a policy by REINFORCE, with a network for the returns to be expected as its baseline.

    Episodes are of policies that are a few steps old. So each push counts as much more, or less, as the policy of now
    would rather do it, up to a limit: see Schulman and others, "Proximal policy optimization algorithms" (2017).
    """

    def __init__(self) -> None:
        self._policy, self._critic = make_network(2), make_network(1)
        weights = [*self._policy.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(weights, lr=0.01)

    def policy(self) -> dict[str, torch.Tensor]:
        """A copy of the weights: what is sent must not change on its way."""
        return {name: weight.clone() for name, weight in self._policy.state_dict().items()}

    def learn(self, game: dict[str, torch.Tensor]) -> float:
        """Make a step with what `Actor.play` gives, and give the mean return of these episodes."""
        were_playing = game["were_playing"]
        returns = torch.zeros(were_playing.shape)
        following = torch.zeros(were_playing.shape[1])
        for step in reversed(range(len(returns))):
            following = returns[step] = were_playing[step] * (1 + DISCOUNT * following)
        states, pushes, chances = (game[name][were_playing] for name in ("states", "pushes", "chances"))
        returns = returns[were_playing]
        expected = self._critic(states).squeeze(1)
        advantages = returns - expected.detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        chance_of_right = self._policy(states).softmax(dim=1)[:, 1]
        ratio = torch.where(pushes, chance_of_right, 1 - chance_of_right) / chances
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = functional.smooth_l1_loss(expected, returns) - gain.mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return were_playing.sum(dim=0).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    """How long to learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100, help="steps of the learner (default: 100)")
    parser.add_argument("--carts", type=int, default=16, help="that an actor plays at once (default: 16)")
    parser.add_argument("--most-steps", type=int, default=200, help="of an episode (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="a PNG file for the returns")
    return parser.parse_args()


def draw_plot(means: list[float], path: Path) -> None:
    """Draw the returns."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - nothing else needs it

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.plot(range(1, len(means) + 1), means, color="#08519c")
    axes.set(title="Steps until the pole falls", xlabel="update", ylabel="mean of an actor's carts", ylim=(0, None))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def learn(agent: fd.rpc.RpcAgent, options: argparse.Namespace) -> None:
    """Have all actors play, and improve the policy."""
    torch.manual_seed(options.seed)
    learner = Learner()
    names = [f"actor {number}" for number in range(1, agent.world_size)] or ["learner"]
    actors = deque(
        agent.remote(name, "Actor", 1000 * options.seed + number, options.carts, options.most_steps)
        for number, name in enumerate(names[: options.updates])
    )
    means: list[float] = []
    began = time.perf_counter()
    games = deque(actor.rpc_async(timeout=PATIENCE).play(learner.policy()) for actor in actors)
    while games:
        means.append(learner.learn(games.popleft().result()))
        if len(means) + len(games) < options.updates:
            games.append(actors[0].rpc_async(timeout=PATIENCE).play(learner.policy()))
            actors.rotate(-1)
        if len(means) % 10 == 0:
            print(f"update {len(means):4}: {sum(means[-10:]) / 10:6.1f} steps until the pole falls", flush=True)
    seconds = time.perf_counter() - began

    first, last = (sum(part) / len(part) for part in (means[: len(names)], means[-10:]))
    episodes = len(means) * options.carts
    print(f"{len(names)} actor(s), {episodes} episodes, {episodes / seconds:.0f} a second")
    print(f"mean return: untrained {first:.1f}, trained {last:.1f}, most possible {options.most_steps}")
    if options.plot is not None:
        draw_plot(means, options.plot)


def main() -> None:
    """Learn, or act, as one rank of the job, or do both when no launcher has given this process a rank."""
    options = parse_arguments()
    alone = {"rank": 0, "world_size": 1, "address": "127.0.0.1:0"}
    backend = fd.rpc.TcpRpcBackend(**({} if "RANK" in os.environ else alone))
    name = "learner" if backend.rank == 0 else f"actor {backend.rank}"
    with fd.rpc.RpcContext(backend, {"Actor": Actor}, name=name, drain_timeout=600) as agent:
        if agent.rank == 0:
            learn(agent, options)
        # All others have nothing to do here: they serve the calls of Actor.play.


if __name__ == "__main__":
    main()
