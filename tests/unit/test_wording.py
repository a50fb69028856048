"""Articles and plurals of messages."""

import re
from pathlib import Path

import pytest
import torch

import ferrodist as fd
from ferrodist import checkpoint
from ferrodist.testing import run_ranks
from ferrodist.wording import counted, with_article


@pytest.mark.parametrize(
    ("names", "article"),
    [
        ("Embedding object int OrderedDict LSTM FSDP MSELoss Unfold Upsample", "an"),
        ("Linear dict DDP GRU ReLU UUID Unit UserModule uint8", "a"),
    ],
)
def test_articles(names, article):
    """As a name is spoken."""
    for name in names.split():
        assert with_article(name) == f"{article} {name}"


def test_plurals():
    """One is one."""
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(2, noun) for noun in ("axis", "child", "batch")] == ["2 axes", "2 children", "2 batches"]


def test_what_is_said_of_a_users_module():
    """The name of its class has the article that fits."""
    mesh = fd.DeviceMesh(fd.SimulatedBackend.create_group(1)[0], (1,))
    with pytest.raises(TypeError, match=r"and 'table' is an Embedding$"):
        fd.parallelize(torch.nn.ModuleDict({"table": torch.nn.Embedding(2, 2)}), mesh, {"table": fd.ColumnParallel()})


def test_one_of_a_kind_is_no_plural():
    """Sizes and counts of a program's own, as users meet them first."""

    def program(group):
        if group.rank:
            group.send(b"x", 0)
        else:
            with pytest.raises(fd.SizeMismatchError, match=r"sent 1 byte, the buffer"):
                group.recv(bytearray(2), 1)
        group.barrier()

    run_ranks(program, 2)
    with pytest.raises(ValueError, match=r"SyncBatchNorm1d of 1 channel got an input of 2$"):
        fd.SyncBatchNorm1d(1)(torch.ones(2, 2))
    spec = checkpoint.TensorShardSpec(full_shape=(2,), shard_dim=0, shard_sizes=(1, 1))
    with pytest.raises(ValueError, match=r"has 2 shards for 1 rank$"):
        checkpoint.ShardMetadata(num_ranks=1, tensor_specs={"x": spec})


def test_no_message_has_an_article_before_a_name_that_is_filled_in():
    """A fixed article would be wrong for half of the names."""
    source = Path(fd.__file__).parent
    wrong = re.compile(r"\b(?:a|an) \{(?:type\(\w+\)\.__(?:qual)?name__|kind|module|name)\b")
    files = [path for path in source.rglob("*.py") if "testing" not in path.parts]
    assert [path.name for path in files if wrong.search(path.read_text())] == []
