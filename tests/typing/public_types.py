"""What type checkers see of the package; ``make check`` has mypy look at it.

An expected error that is not there is an error itself: the comment that allows it is unused then.
"""

import torch
from typing_extensions import assert_type

import ferrodist as fd
import ferrodist.testing


class Net(torch.nn.Module):
    """A user's own."""

    def own(self) -> int:
        """Something that modules don't have."""
        return 1


def wrappers_keep_the_type_of_their_module(net: Net, group: fd.Backend, mesh: fd.DeviceMesh) -> None:
    """What is called on the module inside is checked."""
    assert_type(fd.DDP(net, group).module, Net)
    assert_type(fd.FSDP(net, group).module, Net)
    assert_type(fd.parallelize(net, mesh, {}), Net)
    assert_type(fd.convert_sync_batchnorm(net), Net)
    assert_type(fd.DDP(net).module.own(), int)


def annotations_need_no_parameters(ddp: fd.DDP, fsdp: fd.FSDP) -> None:
    """As before these classes had any."""
    assert_type(ddp.module, torch.nn.Module)
    assert_type(fsdp.module, torch.nn.Module)


def names_that_are_not_there() -> None:
    """A misspelt name is found before the program runs."""
    fd.all_reduction  # type: ignore[attr-defined]  # noqa: B018
    fd.rpc.nothing  # type: ignore[attr-defined]  # noqa: B018
    ferrodist.testing.nothing  # type: ignore[attr-defined]  # noqa: B018
