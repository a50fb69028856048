"""Elementwise special functions, with every placement, forward and backward."""

import pytest
import torch
from operator_checks import check_everywhere, make
from torch.nn import functional

ONE = [
    functional.hardshrink,
    functional.softshrink,
    torch.special.entr,
    torch.special.erfcx,
    torch.special.i0e,
    torch.special.i1,
    torch.special.i1e,
    torch.special.log_ndtr,
    torch.digamma,
    torch.deg2rad,
    torch.rad2deg,
    lambda x: torch.polygamma(1, x),
    lambda x: torch.mvlgamma(x + 3, 2),
    lambda x: torch.special.ndtri(x / 2),
    torch.i0,
]
VALUES = [
    torch.special.airy_ai,
    torch.special.bessel_j0,
    torch.special.bessel_y1,
    torch.special.modified_bessel_i0,
    torch.special.scaled_modified_bessel_k1,
    torch.special.spherical_bessel_j0,
    lambda x: torch.special.hermite_polynomial_h(x, 3),
    lambda x: torch.special.chebyshev_polynomial_t(x, 2),
    lambda x: x.abs().lgamma_().frac_().sinc_(),
    lambda x: torch.frexp(x)[0],
    lambda x: torch.frexp(x)[1],
]
TWO = [
    torch.ldexp,
    torch.special.xlog1py,
    torch.xlogy,
]
TWO_VALUES = [
    torch.complex,
    torch.polar,
    torch.igamma,
    torch.igammac,
    torch.special.zeta,
    lambda x, y: torch.gcd((4 * x).long(), (4 * y).long()),
    lambda x, y: torch.lcm((4 * x).long(), (4 * y).long()),
    lambda x, y: (8 * x).long() << (2 * y).long(),
]


def elements(seed=0):
    return make(3, 4, low=0.2, high=1.9, seed=seed)


@pytest.mark.parametrize("function", ONE)
def test_functions_of_one_tensor(function):
    """A rule with wrong partial sums or gradients would change results."""
    check_everywhere(function, [elements()], meshes=[(3,)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", VALUES)
def test_functions_without_gradient(function):
    """Those that torch does not differentiate, in place too."""
    check_everywhere(function, [elements()], meshes=[(2,)], backward=False, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", TWO)
def test_functions_of_two_tensors(function):
    """With all pairs of placements."""
    check_everywhere(function, [elements(), elements(seed=1)], meshes=[(2,)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", TWO_VALUES)
def test_functions_of_two_tensors_without_gradient(function):
    """Of integers too."""
    check_everywhere(
        function, [elements(), elements(seed=1)], meshes=[(2,)], partial=False, backward=False, rtol=1e-12, atol=1e-12
    )
