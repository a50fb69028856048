"""``ferrodist demo``: train a small network on one rank and on several, and compare.

::

    cli.py         options
    comparison.py  the runs, their progress and comparison, the plot
    worker.py      the program of a rank: model, data and training loop
"""
