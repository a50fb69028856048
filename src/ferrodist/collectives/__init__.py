"""Collectives and point-to-point operations: what users call, and the engines that run it.

::

    reduce.py          allreduce, reduce, broadcast             all_gather.py      all_gather, reduce_scatter
    gather.py          gather, scatter                          all_to_all.py      all_to_all
    p2p.py             send, recv, sendrecv, batch              objects.py         the same of Python objects
    coalescing.py      coalesce                                 symmetric_memory.py  tensors in shared memory
    reduce_op.py       reduce operations and their arithmetic   arguments.py       checks, output buffers, autograd
    work.py            runs CollectiveCalls, now or later       fast_path.py       plain async calls, compiled
    engines/           who moves the bytes, by device           host_staging.py    copies between GPU and host
    tensor_protocol.py  a tensor as header and payload          serialization.py   nested values as messages
    pytree.py          nested values as lists of tensors        payloads.py        decoding of shared payloads
    fused.py           allreduce_add_rms_norm                   mpi_small_calls.py  small collectives over MPI
    profiling.py       calls in torch's profiler                host_p2p.py        several host tensors at once
    barrier.py         barrier, monitored_barrier               fast_p2p.py        the compiled path of p2p
"""
