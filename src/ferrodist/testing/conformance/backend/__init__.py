"""The checks of `ferrodist.testing.check_backend`, by topic.

::

    suite.py       check_backend      harness.py    how a check runs on ranks, and its assertions
    messages.py    blocking messages  requests.py   started transfers
    arguments.py   wrong arguments    deadlines.py  timeouts, stragglers, the barrier
    failures.py    abort and close    subgroups.py  groups within groups
"""
