"""The ``ferrodist`` command.

::

    main.py        the subcommands: run, secret, bench, demo, ckpt, doctor
    checkpoint.py  ``ferrodist ckpt``  ->  checkpoint_display.py  its tables and progress bars, with rich
    doctor.py      ``ferrodist doctor``
"""
