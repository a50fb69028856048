"""Pooling, padding and interpolation, with every placement, forward and backward."""

from functools import partial

import pytest
import torch
from operator_checks import check_everywhere, make
from torch.nn import functional

import ferrodist as fd
from ferrodist import Partial, Shard
from ferrodist.testing import run_ranks

PLANES = {
    "reflect": partial(functional.pad, pad=(1, 2, 0, 1), mode="reflect"),
    "replicate": partial(functional.pad, pad=(1, 2, 0, 1), mode="replicate"),
    "circular": partial(functional.pad, pad=(1, 2, 0, 1), mode="circular"),
    "max": partial(functional.max_pool2d, kernel_size=2),
    "indices": lambda x: functional.max_pool2d(x, 2, return_indices=True),
    "average": partial(functional.avg_pool2d, kernel_size=2, stride=1),
    "adaptive average": partial(functional.adaptive_avg_pool2d, output_size=(2, 3)),
    "adaptive max": partial(functional.adaptive_max_pool2d, output_size=(2, 3)),
    **{
        mode: partial(functional.interpolate, scale_factor=1.5, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "antialias": partial(functional.interpolate, size=(2, 3), mode="bilinear", antialias=True),
}


@pytest.mark.parametrize("name", PLANES)
def test_planes(name):
    """Batches and channels stay sharded, unevenly and on ranks without any; pixels are gathered."""
    check_everywhere(PLANES[name], [make(2, 3, 4, 5)], meshes=[(3,)], rtol=1e-12, atol=1e-12)


LINES = {
    "reflect": partial(functional.pad, pad=(1, 2), mode="reflect"),
    "max": partial(functional.max_pool1d, kernel_size=2),
    "average": partial(functional.avg_pool1d, kernel_size=2),
    "adaptive average": partial(functional.adaptive_avg_pool1d, output_size=3),
    "average of all": lambda x: functional.adaptive_avg_pool1d(x.transpose(1, 2), 1),
    "linear": partial(functional.interpolate, size=7, mode="linear"),
}


@pytest.mark.parametrize("name", LINES)
def test_lines(name):
    """In one dim."""
    check_everywhere(LINES[name], [make(2, 3, 6)], meshes=[(3,)], rtol=1e-12, atol=1e-12)


VOLUMES = {
    "max": partial(functional.max_pool3d, kernel_size=2),
    "average": partial(functional.avg_pool3d, kernel_size=2),
    "adaptive average": partial(functional.adaptive_avg_pool3d, output_size=2),
    "trilinear": partial(functional.interpolate, scale_factor=2, mode="trilinear"),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes(name):
    """In three dims."""
    check_everywhere(VOLUMES[name], [make(2, 3, 2, 4, 3)], meshes=[(2,)], rtol=1e-12, atol=1e-12)


def test_planes_without_batch():
    """The dim before the pixels is the channels'."""
    check_everywhere(partial(functional.max_pool2d, kernel_size=2), [make(3, 4, 5)], rtol=1e-12, atol=1e-12)
    check_everywhere(partial(torch.nn.ReplicationPad2d(1)), [make(3, 4, 5)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("placement", [Shard(0), Shard(3), Partial()])
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (partial(functional.interpolate, size=(4, 4), mode="bilinear", antialias=True), torch.uint8),
        (partial(functional.avg_pool2d, kernel_size=2), torch.int64),
    ],
)
def test_integers_are_rounded_once(call, dtype, placement):
    """Partial sums of integers are added before pixels are averaged, which rounds."""
    x = (torch.arange(64).view(1, 1, 8, 8) * 3).to(dtype)
    expected = call(x)

    def program(group):
        mesh = fd.DeviceMesh(group, (3,))
        local = x if isinstance(placement, Shard) or group.rank == 0 else torch.zeros_like(x)
        given = (
            fd.distribute(x, mesh, placement)
            if isinstance(placement, Shard)
            else fd.DTensor.from_local(local, mesh, placement, shape=x.shape)
        )
        assert call(given).full_tensor().equal(expected)

    run_ranks(program, 3)
