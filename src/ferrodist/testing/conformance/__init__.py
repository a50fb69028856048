"""Conformance suites: the specification of stores, backends and collectives, as checks.

::

    harness.py    how suites run checks, how checks run on ranks, assertions
    store.py      check_store      backend/    check_backend      collectives/    check_collectives
"""
