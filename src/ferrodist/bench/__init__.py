"""``ferrodist bench``: ferrodist measured beside gloo, MPICH and Open MPI in the same run.

A *peer*, here and in ``--peers``, is a competing library with its settings, or one of ferrodist's backends; elsewhere
in ferrodist it is another rank.

::

    cli.py           options, exit code
    cases.py         operations, types, sizes, peers, and the suites
    driver.py        the run: starts peers, and measures case after case, all peers in turn; progress
    targets.py       one peer: its ranks or iperf3, and how it is measured in a case
    environments.py  the commands of ranks, MPIs and emulated hosts
    model.py         the time that a collective should take, from a machine's constants
    calibration.py   the constants, from probes.py
    worker.py        one rank's process: inputs, timing, checks  ->  adapters/  libraries
    foreign.py       another interpreter
    report.py        statistics, JSON, tables
    plots.py         pictures

`worker`, `cases` and `adapters` also run in the interpreters of the MPI peers, which have neither ferrodist nor torch:
they import the standard library, each other, and the library that an adapter calls.
"""
