"""The checks that `tools/operator_database.py` makes of each operator of torch's database."""

from types import SimpleNamespace

import operator_calls
import pytest
import torch

import ferrodist as fd
from ferrodist.tensor import dispatch


def entry(op, *shapes, name="entry", in_place=None, supports_out=False):
    """An entry as those of torch's database, of float32."""

    def sample_inputs(device, dtype, *, requires_grad):
        tensors = [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]
        yield SimpleNamespace(
            input=tensors[0], args=tensors[1:], kwargs={}, output_process_fn_grad=lambda result: result
        )

    return SimpleNamespace(
        name=name,
        variant_test_name="",
        op=op,
        inplace_variant=in_place,
        supports_out=supports_out,
        supports_autograd=True,
        supports_dtype=lambda dtype, device: dtype is torch.float32,
        sample_inputs=sample_inputs,
    )


def outcomes(info):
    results = operator_calls.check_operator(info)
    assert all(result.num_calls or result.outcome.value == "not run" for result in results.values())
    return {form: result.outcome.value for form, result in results.items()}


def test_operators_with_a_rule():
    """All forms are run; a false report would send people after mistakes that aren't there."""
    info = entry(torch.mul, (4, 3), (3,), in_place=torch.Tensor.mul_, supports_out=True)
    assert outcomes(info) == {"function": "by rule", "out=": "by rule", "in place": "by rule"}


def test_operators_without_a_rule():
    """The fallback is tried where there is no rule; what it does not help is refused."""
    assert outcomes(entry(torch.geqrf, (3, 3)))["function"] == "by fallback"
    assert outcomes(entry(lambda x: x.share_memory_(), (3, 3)))["function"] == "refused"


def test_random_operators_are_compared_by_shape():
    """Ranks that are threads draw from one generator, so elements differ."""
    assert outcomes(entry(torch.nn.functional.dropout, (5, 4)))["function"] == "by rule"


@pytest.mark.parametrize("wrong", [torch.ops.aten.abs.default, torch.ops.aten.mul.Tensor])
def test_a_wrong_rule_shows(monkeypatch, wrong):
    """A rule that takes abs for linear is wrong for partial tensors, and a wrong rule for mul is so in gradients."""
    add = torch.ops.aten.neg.default if wrong is torch.ops.aten.abs.default else torch.ops.aten.add.Tensor
    monkeypatch.setitem(dispatch.RULES, wrong, dispatch.RULES[add])
    function = (lambda x: x.abs()) if wrong is torch.ops.aten.abs.default else (lambda x: x.square() * x)
    assert outcomes(entry(function, (4, 3)))["function"] == "wrong"


def test_an_error_on_one_rank_does_not_hang(monkeypatch):
    """The call is an error, and those after it are run on a new group."""
    monkeypatch.setattr(operator_calls, "_PATIENCE", 0.5)
    failed = []

    def fail_once(x):
        if isinstance(x, fd.DTensor) and x.mesh.coordinate == (1,) and not failed:
            failed.append(1)
            raise RuntimeError("one rank")
        return x.sum()

    results = operator_calls.check_operator(entry(fail_once, (4, 3)))
    assert results["function"].outcome.value == "error"
    assert "one rank" in results["function"].reason
    assert results["function"].num_calls == 8
