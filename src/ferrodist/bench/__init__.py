"""``ferrodist bench``: the collectives, measured beside gloo, MPICH and Open MPI in the same run.

::

    command.py       the command: options, what is shown, the exit code
    cases.py         what is measured: collective, type, size, ranks          <- quantities.py  "16K", "1.2 us"
    comparison.py    the run: who is started, which case is next
    rounds.py        one case: all peers in turn, round after round
    rank_group.py    the processes of one peer, and what they are asked       <- starting.py, environments.py
    worker.py        one rank's process  ->  workload.py  inputs, checks  ->  adapters/  a library's calls
    channel.py  peers.py  arrays.py  foreign.py     what both sides know; how another interpreter runs it
    report.py        what a run leaves: statistics, JSON                      <- machine.py
    table.py  plot.py  document.py     a report as text, as a picture, as docs/performance.md
    display.py       how far the run is

`worker`, `workload`, `adapters`, `channel`, `peers`, `arrays` and `cases` run in the MPI peers' interpreters too, which
have neither ferrodist nor torch: they import the standard library, each other, and what their adapter is for.
"""

from __future__ import annotations

from ferrodist.bench.command import BenchOptions, add_bench_arguments, bench_options, run_bench

__all__ = ["BenchOptions", "add_bench_arguments", "bench_options", "run_bench"]
