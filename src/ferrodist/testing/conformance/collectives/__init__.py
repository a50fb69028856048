"""The single checks behind `ferrodist.testing.conformance.collectives.suite`, by topic.

::

    oracle.py      what reductions must give, by NumPy    harness.py    what checks are made of
    reductions.py  arithmetic                             movement.py   elements that only move
    forms.py       layouts, out=, async, coalesce         messages.py   tensors and objects from rank to rank
    refusals.py    wrong arguments                        endings.py    mismatches, late ranks, aborts
"""
