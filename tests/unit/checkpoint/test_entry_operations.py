"""Entries of a manifest are stacked, joined and split as torch does it with the tensors."""

import pytest
import torch
from safetensors.torch import save_file

from ferrodist.checkpoint.convert.external_tensors import manifest_of
from ferrodist.checkpoint.convert.hugging_face import find_tensors
from ferrodist.checkpoint.convert.transformers_weights import concatenate_entries, split_entry, stack_entries
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.storage import open_storage
from ferrodist.tensor.box import Box


@pytest.fixture
def files(tmp_path):
    """Tensors, their entries, and a function that reads an entry from the files."""
    torch.manual_seed(0)
    tensors = {"a": torch.randn(3, 4, 5), "b": torch.randn(3, 4, 5), "c": torch.randn(2, 4, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    storage = open_storage(tmp_path, None)
    manifest = manifest_of(storage, find_tensors(storage))

    def read(entry, box=None):
        manifest.tensors["made"] = entry
        box = box or Box((0,) * len(entry.shape), entry.shape)
        target = torch.full(box.shape, torch.nan)
        CheckpointReader(storage, manifest, verify=False).read_box("made", box, target)
        return target

    return tensors, manifest.tensors, read


@pytest.mark.parametrize("dim", [0, 1, 3, -1, -2])
def test_stacks(files, dim):
    """Along any dim, also counted from the end."""
    tensors, entries, read = files
    expected = torch.stack([tensors["a"], tensors["b"]], dim)
    assert read(stack_entries([entries["a"], entries["b"]], dim)).equal(expected)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_joins_and_splits(files, dim):
    """Parts of joined tensors are read from where they lie, in pieces that no part of a rank's box need match."""
    tensors, entries, read = files
    joined, expected = (
        concatenate_entries([entries["a"], entries["b"]], dim),
        torch.cat([tensors["a"], tensors["b"]], dim),
    )
    assert read(joined).equal(expected)
    box = Box((1, 1, 1), tuple(size - 1 for size in expected.shape))
    assert read(joined, box).equal(box.take(expected))
    for sizes_dim in (0, 1, 2):
        size = expected.shape[sizes_dim]
        sizes = [1, 0, size - 3, 2]
        for entry, part in zip(split_entry(joined, sizes_dim, sizes), expected.split(sizes, sizes_dim), strict=True):
            assert read(entry).equal(part)
            for again in split_entry(entry, 1, [1, entry.shape[1] - 1]) if entry.shape[1] else ():
                assert read(again).shape == again.shape


def test_shapes_that_do_not_fit(files):
    """An error, instead of bytes of another tensor."""
    _, entries, _ = files
    with pytest.raises(ValueError, match="doesn't fit to"):
        concatenate_entries([entries["a"], entries["c"]], 1)
    with pytest.raises(ValueError, match="can't be split into"):
        split_entry(entries["a"], 0, [1, 1])
