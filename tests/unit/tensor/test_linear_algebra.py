"""Linear algebra, Fourier transforms, complex views, searches and copies of views, with every placement."""

from functools import partial

import pytest
import torch
from operator_checks import check_everywhere, make
from torch.nn import functional

import ferrodist as fd
from ferrodist import Partial, Replicate, Shard
from ferrodist.testing import run_ranks


def matrices(seed=0):
    """Three matrices that have an inverse."""
    return make(3, 4, 4, seed=seed) / 4 + torch.eye(4, dtype=torch.float64) * 3


OF_MATRICES = {
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "svdvals": torch.linalg.svdvals,
    "qr": lambda x: torch.linalg.qr(x)[1],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "lu": lambda x: torch.linalg.lu(x)[1:],
    "matrix_exp": torch.linalg.matrix_exp,
}


@pytest.mark.parametrize("name", OF_MATRICES)
def test_matrices(name):
    """Batches stay sharded; a rule that sharded a matrix would give other numbers."""
    check_everywhere(OF_MATRICES[name], [matrices()], meshes=[(2,)], rtol=1e-9, atol=1e-9)


def test_solutions():
    """A batch of vectors, and matrices with broadcasting."""
    check_everywhere(torch.linalg.solve, [matrices(), make(3, 4)], meshes=[(2,)], rtol=1e-9, atol=1e-9)
    check_everywhere(torch.linalg.solve, [matrices(), make(1, 4, 2)], meshes=[(3,)], rtol=1e-9, atol=1e-9)


def test_errors_of_one_matrix_are_raised_on_all_ranks():
    """The rank that has the singular matrix is not the only one to know."""

    def program(group):
        full = torch.eye(3).repeat(2, 1, 1)
        full[1] = 0
        with pytest.raises(torch.linalg.LinAlgError, match="Batch element 1"):
            torch.linalg.inv(fd.distribute(full, fd.DeviceMesh(group, (2,)), Shard(0), src=None))

    run_ranks(program, 2)


PAIRS = {
    "cross": (torch.linalg.cross, [make(4, 3), make(4, 3, seed=1)]),
    "cdist": (torch.cdist, [make(2, 3, 4), make(2, 5, 4, seed=1)]),
    "addr": (torch.addr, [make(3), make(4), make(3, seed=1)]),
    "addbmm": (torch.addbmm, [make(3, 2), make(2, 3, 4), make(2, 4, 2)]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_products_and_distances(name):
    """With all placements of both; linear operators of partial sums."""
    function, inputs = PAIRS[name]
    check_everywhere(function, inputs, meshes=[(2,)], rtol=1e-9, atol=1e-9)


OF_ONE = {
    "fft": lambda x: torch.view_as_real(torch.fft.fft(x)),
    "rfft2": lambda x: torch.fft.rfft2(x).abs(),
    "irfft": lambda x: torch.fft.irfft(torch.complex(x, x)),
    "complex": lambda x: torch.view_as_complex(x[..., :2].contiguous()).abs(),
    "glu": partial(functional.glu, dim=0),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x.reshape(1, 3, 2, 4), 2),
    "channel_shuffle": lambda x: functional.channel_shuffle(x.unsqueeze(0), 2),
    "unfold": lambda x: functional.unfold(x.unsqueeze(1), (2, 2)),
    "diag_embed": torch.diag_embed,
    "rot90": torch.rot90,
    "trace": lambda x: torch.trace(x[..., 0]),
    "renorm": lambda x: torch.renorm(x, 2, 1, 0.5),
    "copies": lambda x: [torch.permute_copy(x, (2, 0, 1)), *torch.unbind_copy(x)],
}


@pytest.mark.parametrize("name", OF_ONE)
def test_rearranged_elements(name):
    """Forward and backward, with every placement."""
    check_everywhere(OF_ONE[name], [make(4, 2, 3)], meshes=[(3,)], rtol=1e-9, atol=1e-9)


def test_searches():
    """Values may be sharded, sequences are whole."""
    edges = torch.arange(-2.0, 2.0, dtype=torch.float64)
    check_everywhere(torch.bucketize, [make(5, 2), edges], meshes=[(2,)], backward=False)
    rows = make(3, 4).sort()[0]
    check_everywhere(torch.searchsorted, [rows, make(3, 2)], meshes=[(2,)], backward=False)
    check_everywhere(torch.take, [make(3, 2), torch.tensor([0, 5, 2])], meshes=[(2,)])


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
def test_writes_that_need_other_placements(placement):
    """The tensor keeps its placement, and so do its views; only the views' values would change else."""

    def program(group):
        full = torch.tensor([[-1.0, 2.0, -3.0], [4.0, -5.0, 6.0]])
        tensor = fd.distribute(full, fd.DeviceMesh(group, (2,)), Replicate(), src=None).redistribute(placement)
        assert tensor.abs_() is tensor
        tensor[:, 1:].cumsum_(0)
        expected = full.abs()
        expected[:, 1:].cumsum_(0)
        assert tensor.placements == (placement,)
        assert tensor.full_tensor().equal(expected)

    run_ranks(program, 2)


def test_gradients_that_write_to_views_of_partial_sums():
    """A gradient's formula fills a diagonal; the write to the view was lost."""
    check_everywhere(
        torch.linalg.householder_product, [make(4, 3), make(3, low=0.1, high=0.9)], meshes=[(2,)], rtol=1e-9, atol=1e-9
    )


def test_conjugates_inside_of_the_fallback():
    """Operators that conjugate on their way ignored it there, and gave other gradients."""
    matrix, right = (torch.complex(make(2, 3, seed=seed), make(2, 3, seed=seed + 1)) for seed in (1, 3))

    def solve(*given):
        return torch.linalg.lstsq(*given, driver="gels").solution.abs().sum()

    plain = [one.clone().requires_grad_() for one in (matrix, right)]
    expected = torch.autograd.grad(solve(*plain), plain)

    def program(group):
        mesh = fd.DeviceMesh(group, (1,))
        given = [fd.distribute(one, mesh, Shard(0), src=None).requires_grad_() for one in (matrix, right)]
        with fd.allow_replication(), pytest.warns(UserWarning, match="has no rule"):
            found = torch.autograd.grad(solve(*given), given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-9, atol=1e-9)

    run_ranks(program, 1)


def test_out_of_which_torch_drops_a_part():
    """torch makes a plain tensor for the indices that it drops; the process crashed."""

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        full = make(5, 4)
        out = fd.distribute(torch.zeros_like(full), mesh, Shard(1), src=None)
        torch.msort(fd.distribute(full, mesh, Shard(0), src=None), out=out)
        assert out.full_tensor().equal(torch.msort(full))

    run_ranks(program, 2)
