"""``ferrodist bench``: ferrodist measured beside gloo, MPICH and Open MPI in the same run.

::

    cli.py           options, exit code
    cases.py         operations, types, sizes, peers, and the suites
    driver.py        the run: starts the peers of a stage, and measures case after case, all peers in turn
    targets.py       one peer in one case: ranks, or iperf3
    processes.py     the rank processes of a peer  ->  environments.py  MPIs and emulated hosts
    worker.py        one rank's process: what is timed  ->  workload.py  inputs and checks;  adapters/  libraries
    channel.py       messages between driver and rank, and a barrier of the ranks;  foreign.py  another interpreter
    report.py        statistics, JSON, tables  ->  plot.py  the picture;  display.py  progress

`worker`, `workload`, `channel`, `cases` and `adapters` also run in the interpreters of the MPI peers, which have
neither ferrodist nor torch: they import the standard library, each other, and the library that an adapter calls.
"""

from __future__ import annotations

from ferrodist.bench.cases import BenchOptions
from ferrodist.bench.cli import add_bench_arguments, bench_options, run_bench

__all__ = ["BenchOptions", "add_bench_arguments", "bench_options", "run_bench"]
