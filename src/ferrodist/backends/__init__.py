"""Groups: the contract of a backend, and one module or package for each backend.

::

    base.py            Backend: the contract                    interfaces.py      engines, data planes, device p2p
    process_group.py   init_process_group, default group        subgroup.py        sub-groups of any group
    simulated.py       ranks that are threads                   non_member.py      a group on a rank outside of it
    tcp/               a star of connections to rank 0          native/            shared memory, TCP; compiled
    mpi/               MPI moves the bytes                      ucc/, nccl/        libraries, over a control group
    delegating_backend.py  groups over a control group          group_observer.py  its events, for a data plane
    mailbox.py         matches messages with receives           mailbox_backend.py the control plane over a mailbox
    framed_backend.py  messages as frames: TCP and MPI          frame_type.py      their types
    request.py         Request: what has started                polling.py         waits without completions
    persistent_recv.py persistent receives, wait events
    collective_op.py   a collective call as a value             signature.py       its 192 bytes that ranks compare
    verification.py    the comparison                           sequencer.py       ordered execution
    liveness.py        which ranks respond                      stragglers.py      warnings about late ranks
    abort_reason.py    why a group has failed, encoded          lifecycle.py       exit and fork
    tags.py            message tags                             cuda_streams.py    streams and events of a GPU
    weak.py            weak collections and methods             subgroup_registry.py  a group's sub-groups
    torch_default_group.py  a group as torch's default group
"""
