"""What FSDP makes of a module, and which modules it leaves alone."""

import gc
import weakref

import pytest
import torch

from ferrodist import DDP, FSDP, CollectiveMismatchError, DiLoCo, LocalSGD, UnsupportedOpError
from ferrodist.parallel.sharded.layout import FlatLayout
from ferrodist.testing import run_ranks


def test_buffers_on_meta_of_modules_without_parameters(run):
    """Batch norm without weights has its buffers' values like any other module."""

    def program(group):
        with torch.device("meta"):
            module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6, affine=False))
        fsdp = FSDP(module, group, wrap=torch.nn.Linear)
        fsdp(torch.rand(4, 6)).sum().backward()
        return fsdp.full_state_dict()

    for state in run(program, 2):
        assert all(value.device.type == "cpu" and value.isfinite().all() for value in state.values())


class Masked(torch.nn.Linear):
    """A buffer whose elements are one."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mask", torch.ones(1).expand(4))


def is_untouched(module, shapes):
    return [tuple(parameter.shape) for parameter in module.parameters()] == shapes


def test_buffers_that_cannot_be_written_are_refused():
    """By name, on every rank, while the module is what it was."""

    def program(group):
        module = Masked()
        with pytest.raises(UnsupportedOpError, match=r"buffer 'mask' has elements that share memory.*clone"):
            FSDP(module, group)
        assert is_untouched(module, [(6, 6), (6,)])

    run_ranks(program, 2)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register):
    """They would never be called; without them the module is taken."""

    def program(group):
        module = torch.nn.Linear(6, 6)
        handle = getattr(module.bias, register)(lambda _: None)
        with pytest.raises(UnsupportedOpError, match="'bias' has hooks"):
            FSDP(module, group)
        assert is_untouched(module, [(6, 6), (6,)])
        handle.remove()
        FSDP(module, group)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    "wrap",
    [DDP, lambda module, group: LocalSGD(module, group, period=2), lambda module, group: DiLoCo(module, group)],
    ids=["DDP", "LocalSGD", "DiLoCo"],
)
def test_data_parallel_wrappers_refuse_an_fsdp(wrap, run):
    """Also its module, while it has its pieces and while it has whole parameters; the shards stay."""

    def program(group):
        fsdp = FSDP(torch.nn.Linear(16, 16), group, reshard_after_forward=False)
        before = fsdp.full_state_dict()
        for _ in range(2):
            for module in (fsdp, fsdp.module):
                with pytest.raises(UnsupportedOpError, match=r"weight' belongs to an FSDP"):
                    wrap(module, group)
            fsdp(torch.rand(2, 16))
        after = fsdp.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    run(program, 2)


def test_fsdp_refuses_a_ddp_until_it_is_gone():
    """Its hooks are on the parameters."""

    def program(group):
        module = torch.nn.Linear(6, 6)
        ddp = DDP(module, group)
        for wrapped in (ddp, module):
            with pytest.raises(UnsupportedOpError, match="weight' has hooks.*DDP"):
                FSDP(wrapped, group)
        assert is_untouched(module, [(6, 6), (6,)])
        del ddp, wrapped
        gc.collect()
        FSDP(module, group)

    run_ranks(program, 2)


def test_parameters_of_another_fsdp_are_refused():
    """By name; also when that is gone, for they are pieces still."""

    def program(group):
        one, other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        other.weight = one.weight
        fsdp = FSDP(one, group)
        gone = weakref.ref(fsdp)
        for _ in range(2):
            with pytest.raises(UnsupportedOpError, match=r"'weight' belongs to an FSDP.*anew"):
                FSDP(other, group)
            fsdp = None
            gc.collect()
        assert gone() is None
        assert fsdp is None

    run_ranks(program, 2)
