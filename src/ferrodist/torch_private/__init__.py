"""torch's private names: each is read in one of these modules, and nowhere else.

Any release of torch may remove a private name. So each module covers one subject, lists the versions of torch that have
its names, and provides what its callers need: by a replacement if a name is missing, or by an error that names the
feature that this torch lacks.

::

    versions.py    the tested versions of torch                    names.py      looking up names that may be missing
    c10d.py        process groups                                  autograd.py   backward passes, hooks, versions
    tensors.py     subclasses, memory, sparse tensors              operators.py  schemas, private operators
    modules.py     torch.nn.Module, batch norms, scalers           modes.py      modes of operators and functions
    compilers.py   torch.compile                                   profiling.py  the profiler
    pytree.py      trees of values
"""
