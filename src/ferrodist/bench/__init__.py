"""``ferrodist bench``: measured beside gloo, MPICH and Open MPI in the same run.

::

    command.py       the command: what is shown, the exit code    <- options.py
    suites.py        the questions a run answers                  <- cases.py  operation, type, size, ranks
    plan.py          what one run measures, in which order
    comparison.py    the run: who is started, which case is next
    rounds.py        one case: all peers in turn, round after round
    runners.py  link.py    one peer in one case; iperf3
    rank_group.py    the processes of one peer, and what they are asked    <- starting.py, environments.py, hosts.py
    worker.py        one rank's process  ->  batches.py  what is timed  ->  workload.py, product.py  inputs, checks
    adapters/        a library's calls
    channel.py  peers.py  arrays.py  meeting.py  foreign.py    what both sides know; where ranks meet; how another
                                                               interpreter runs it
    report.py        what a run leaves: statistics, JSON          <- machine.py
    table.py  plot.py  document.py    a report as text, as a picture, as docs/performance.md    <- quantities.py
    display.py       how far the run is

`worker`, what it leads to, `channel`, `peers`, `arrays`, `meeting` and `cases` run in the MPI peers' interpreters too,
which have neither ferrodist nor torch: they import the standard library, each other, and what their adapter is for.
"""

from __future__ import annotations

from ferrodist.bench.command import run_bench
from ferrodist.bench.options import BenchOptions, add_bench_arguments, bench_options

__all__ = ["BenchOptions", "add_bench_arguments", "bench_options", "run_bench"]
