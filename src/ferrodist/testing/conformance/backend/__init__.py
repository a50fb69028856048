"""The single checks behind `ferrodist.testing.check_backend`, by topic.

::

    harness.py     running a program on ranks, and what assertions need
    messages.py    blocking messages    requests.py   started transfers    deadlines.py  deadlines, barrier
    arguments.py   wrong arguments      endings.py    abort and close      subgroups.py  groups within groups
"""
