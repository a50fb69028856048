"""The first calls of operators of tensor subclasses, by ranks that are threads, all at the same time."""

import subprocess
import sys

PROGRAM = """
import sys

import torch
from torch.utils._pytree import tree_map_only

from ferrodist.testing import run_ranks


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, plain):
        return torch.Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)

    def __init__(self, plain):
        self.plain = plain

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        calls.add(str(func))
        args, kwargs = tree_map_only(Wrapped, lambda tensor: tensor.plain, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))


def program(group):
    tensor = Wrapped(torch.full((2, 2), 1.0 + group.rank))
    for name in names:
        group.barrier()
        try:
            getattr(torch, name)(tensor)
        except Exception as error:  # of the operator: it takes other arguments
            assert "INTERNAL ASSERT" not in str(error), error


calls, known = set(), dir(torch.ops.aten)  # of operators that have objects
names = [name for name in dir(torch._C._VariableFunctions) if not name.startswith("_") and name not in known]
sys.setswitchinterval(1e-4)
run_ranks(program, 4)
assert len(calls) > 20, calls
"""


def test_threads_make_first_calls_at_the_same_time():
    """Torch fails or crashes where two threads make the first call of an operator, unless its object exists."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
