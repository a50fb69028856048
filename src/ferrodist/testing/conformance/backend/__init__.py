"""The checks of `ferrodist.testing.check_backend`, by topic.

::

    suite.py       check_backend       messages.py    messages
    deadlines.py   timeouts, stragglers, the barrier
    arguments.py   wrong arguments     failures.py    abort and close
    subgroups.py   groups within groups
"""
