"""Products of matrices on distributed tensors."""

import torch
from operator_checks import check_everywhere, make


def test_mm():
    check_everywhere(torch.mm, [make(4, 6), make(6, 2, seed=1)])


def test_addmm():
    check_everywhere(torch.addmm, [make(6), make(4, 6), make(6, 6, seed=1)])


def test_linear():
    check_everywhere(torch.nn.functional.linear, [make(2, 4, 6), make(8, 6, seed=1), make(8)])
