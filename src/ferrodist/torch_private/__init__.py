"""torch's private names: each is read in one of these modules, and nowhere else.

A private name may go with any release of torch. So each module is about one subject, says which versions of torch have
its names, and gives what its callers need: by another way where a name is missing, or by an error that says which
feature that version of torch lacks.

::

    versions.py    the versions that the tests have passed with    names.py      a name that may not be there
    c10d.py        process groups                                  autograd.py   backward passes, hooks, versions
    tensors.py     subclasses, memory, sparse tensors              operators.py  schemas, private operators
    modules.py     torch.nn.Module, batch norms, scalers           modes.py      modes of operators and functions
    compilers.py   torch.compile                                   profiling.py  the profiler
    pytree.py      trees of values
"""
