"""The command ``ferrodist``.

::

    main.py        the subcommands: run, bench, demo, ckpt, doctor
    checkpoint.py  ``ferrodist ckpt``  ->  checkpoint_display.py  its tables and bars, with rich
    doctor.py      ``ferrodist doctor``
"""
