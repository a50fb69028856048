"""CPU bindings of ranks: the NUMA nodes and cores of this host, and the CPUs that ``--bind`` gives each rank.

[Note: bindings] Of each node only the CPUs count that the launcher itself may use: its affinity mask, which cpusets and
containers narrow. Ranks follow the nodes in order, in proportion to their cores, so neighbours share a node. A rank has
one node; if there are fewer ranks than nodes, several whole ones, so that no node is idle. ``numa`` leaves the ranks of
a node all its CPUs, between which the system moves their threads. ``core`` divides the node's cores among its ranks.
Both choose the CPUs before the program starts, so all its threads inherit them, and memory that it touches first is
taken from its node.
"""

from __future__ import annotations

import contextlib
import enum
import os
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BindPolicy(enum.Enum):
    """The CPUs that a rank may use."""

    NONE = "none"  # the launcher's
    NUMA = "numa"  # those of a NUMA node
    CORE = "core"  # whole cores that no other rank has


def bind_ranks(policy: BindPolicy, num_ranks: int) -> list[frozenset[int]]:
    """Return the CPUs of each rank of this host, by local rank; empty sets where the launcher's are left to it.

    Raises ValueError if this system can't bind processes, or has too few cores.
    """
    if policy is BindPolicy.NONE:
        return [frozenset()] * num_ranks
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"--bind {policy.value} needs Linux: this system can't bind processes; leave it out")
    return plan_binding(read_topology(frozenset(os.sched_getaffinity(0))), num_ranks, policy)


def read_topology(cpus: frozenset[int], root: Path = Path("/sys")) -> dict[int, list[frozenset[int]]]:
    """Return the cores of each NUMA node, as sets of hardware threads, of which only those in ``cpus`` count.

    Nodes without such CPUs (excluded ones, or memory alone) are left out, and so are CPUs that are offline. Where the
    system shows no nodes, all CPUs are in node 0; where it shows no cores, each CPU is one. ``root`` is sysfs.
    """
    nodes: dict[int, frozenset[int]] = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        own = cpus & _read_cpus(folder / "cpulist")
        if own:
            nodes[int(folder.name.removeprefix("node"))] = own
    topology = {}
    for node, own in sorted((nodes or {0: cpus}).items()):
        siblings = {cpu: _read_cpus(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in own}
        topology[node] = sorted({own & (siblings[cpu] | {cpu}) for cpu in own}, key=min)
    return topology


def _read_cpus(path: Path) -> frozenset[int]:
    """The CPUs of a file with a list such as "0-3,8"; none if it can't be read."""
    with contextlib.suppress(OSError, ValueError):
        ranges = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",") if part]
        return frozenset(chain.from_iterable(range(int(each[0]), int(each[-1]) + 1) for each in ranges))
    return frozenset()


def plan_binding(
    topology: Mapping[int, Sequence[frozenset[int]]], num_ranks: int, policy: BindPolicy
) -> list[frozenset[int]]:
    """Return the CPUs of each rank, given the result of `read_topology`; see [Note: bindings].

    Raises ValueError if ``policy`` is ``core`` and ranks outnumber cores.
    """
    nodes = list(topology.values())
    if num_ranks < len(nodes):
        bounds = [rank * len(nodes) // num_ranks for rank in range(num_ranks + 1)]
        return [frozenset().union(*chain(*nodes[start:end])) for start, end in pairwise(bounds)]
    node_of_core = [node for node, cores in enumerate(nodes) for _ in cores]
    num_cores = len(node_of_core)
    if policy is BindPolicy.CORE and num_ranks > num_cores:
        raise ValueError(
            f"--bind core gives every rank cores of its own, but {counted(num_ranks, 'rank')} are"
            f" more than {counted(num_cores, 'core')}; give --nproc-per-node {num_cores} or less, or --bind numa"
        )
    # A rank is where the middle of its share of all cores is: no node has more ranks than cores, if there are enough.
    places = [node_of_core[(2 * rank + 1) * num_cores // (2 * num_ranks)] for rank in range(num_ranks)]
    bound: list[frozenset[int]] = []
    for node, ranks in groupby(places):
        cores, num_local = nodes[node], len(list(ranks))
        for local in range(num_local):
            share = (local * len(cores) // num_local, (local + 1) * len(cores) // num_local)
            bound.append(frozenset().union(*(cores[slice(*share)] if policy is BindPolicy.CORE else cores)))
    return bound


def describe_binding(bound: Sequence[frozenset[int]], first_rank: int) -> str:
    """Return the CPUs of each rank in words, ranks with the same ones together: "ranks 0-1 on CPUs 0-7"."""
    groups = []
    rank = first_rank
    for cpus, ranks in groupby(bound):
        last = rank + len(list(ranks)) - 1
        numbers = f"rank {rank}" if last == rank else f"ranks {rank}-{last}"
        groups.append(f"{numbers} on {'CPU' if len(cpus) == 1 else 'CPUs'} {format_cpus(cpus)}")
        rank = last + 1
    return "; ".join(groups)


def format_cpus(cpus: frozenset[int]) -> str:
    """Return a list as the system's: "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], cpu]
        else:
            ranges.append([cpu])
    return ",".join("-".join(map(str, each)) for each in ranges)
