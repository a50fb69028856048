"""The checks of the collectives, by topic.

::

    suite.py          check_collectives                  oracle.py   expected results, by NumPy
    reductions.py     arithmetic                         data_movement.py   elements that only move
    call_forms.py     layouts, out=, async, coalesce     p2p.py      tensors and objects from rank to rank
    arguments.py      wrong arguments                    failures.py   mismatches, stragglers, aborts
"""
