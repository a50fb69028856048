"""Plain tensors that the program has divided itself."""

import pytest
import torch

from ferrodist.checkpoint import (
    AsyncCheckpointer,
    DistCheckpointError,
    DistributedCheckpoint,
    ShardMetadata,
    TensorShardSpec,
    flat_shard_metadata,
    load_distributed,
    save_distributed,
)
from ferrodist.testing import run_ranks

WHOLE = torch.arange(35.0).reshape(7, 5)


def shards(sizes, dim=0):
    """The sharding of WHOLE, nested in a state."""
    spec = TensorShardSpec(full_shape=(7, 5), shard_dim=dim, shard_sizes=sizes)
    return ShardMetadata(num_ranks=len(sizes), tensor_specs={"model.w": spec})


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("how", ["at once", "asynchronously"])
def test_other_ranks_and_sizes(tmp_path, dim, how):
    """Saved in uneven shards, one of them empty, and loaded in others along the other dim, and whole."""
    sizes = [4, 0, 3] if dim == 0 else [1, 4, 0]

    def save(group):
        state = {"model": {"w": WHOLE.split(sizes, dim)[group.rank], "same": torch.ones(2)}}
        given = shards(sizes, dim)
        if how == "at once":
            save_distributed(state, tmp_path, group=group, shards=given)
            return str(tmp_path)
        with AsyncCheckpointer(tmp_path, group=group, shards=given) as checkpointer:
            return checkpointer.save_async(state, 3).wait()

    path = run_ranks(save, 3)[0]
    other = [2, 3] if dim == 0 else [6, 1]

    def load(group):
        part = torch.zeros_like(WHOLE.split(other, 1 - dim)[group.rank])
        load_distributed(path, {"model": {"w": part}}, group=group, shards=shards(other, 1 - dim))
        assert torch.equal(part, WHOLE.split(other, 1 - dim)[group.rank])

    run_ranks(load, 2)
    assert torch.equal(load_distributed(path)["model"]["w"], WHOLE)


def test_flat_shards(tmp_path):
    """Flat tensors of one size on each rank; and what the checkpoint says of itself."""

    def save(group):
        state = {"a": torch.full((4,), float(group.rank)), "b": torch.full((2,), group.rank)}
        save_distributed(state, tmp_path, group=group, shards=flat_shard_metadata(state, group.world_size))

    run_ranks(save, 3)
    loaded = load_distributed(tmp_path)
    assert loaded["a"].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert loaded["b"].tolist() == [0, 0, 1, 1, 2, 2]
    checkpoint = DistributedCheckpoint(tmp_path)
    assert checkpoint.checkpoint_dir == str(tmp_path)
    found = checkpoint.shard_metadata
    assert found.num_ranks == 3
    assert found.tensor_specs["a"] == TensorShardSpec(full_shape=(12,), shard_dim=0, shard_sizes=[4, 4, 4])


def test_wrong_metadata(tmp_path):
    """Each mistake is named."""
    with pytest.raises(ValueError, match="no dim 2"):
        TensorShardSpec(full_shape=(7, 5), shard_dim=2, shard_sizes=[7])
    with pytest.raises(ValueError, match="not dim 0 of 7 together"):
        TensorShardSpec(full_shape=(7, 5), shard_dim=0, shard_sizes=[3, 3])
    with pytest.raises(ValueError, match="2 shards for 3 ranks"):
        ShardMetadata(num_ranks=3, tensor_specs=shards([3, 4]).tensor_specs)
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        flat_shard_metadata({"w": WHOLE}, 0)
    with pytest.raises(TypeError, match="world_size must be an integer"):
        flat_shard_metadata({"w": WHOLE}, 2.0)
    for num_ranks in (0, -1):
        with pytest.raises(ValueError, match=f"num_ranks must be at least 1, not {num_ranks}"):
            ShardMetadata(num_ranks=num_ranks)
        with pytest.raises(ValueError, match="num_ranks must be"):
            shards([3, 4]).for_ranks(num_ranks)
    with pytest.raises(TypeError, match=r"full_shape must be an integer, not 7\.0"):
        TensorShardSpec(full_shape=(7.0, 5), shard_dim=0, shard_sizes=[7])
    with pytest.raises(ValueError, match="full_shape must be at least 0, not -5"):
        TensorShardSpec(full_shape=(7, -5), shard_dim=0, shard_sizes=[7])
    with pytest.raises(ValueError, match="for 2 ranks, and the group has 1"):
        save_distributed({"model": {"w": WHOLE}}, tmp_path, shards=shards([3, 4]))
    with pytest.raises(ValueError, match=r"'model\.w': it has shape \(2, 5\) on rank 0, where shards has \(7, 5\)"):
        save_distributed({"model": {"w": WHOLE[:2]}}, tmp_path, shards=shards([7]))
    with pytest.raises(DistCheckpointError, match="is missing"):
        DistributedCheckpoint(tmp_path)
    with pytest.raises(TypeError, match="the spec of tensor 'w' must be a TensorShardSpec, not list"):
        ShardMetadata(num_ranks=1, tensor_specs={"w": [7]})
    with pytest.raises(TypeError, match="shards must be ShardMetadata or None, not dict"):
        save_distributed({"w": WHOLE}, tmp_path, shards={"w": 0})
    save_distributed({"w": WHOLE}, tmp_path)
    with pytest.raises(TypeError, match="shards must be ShardMetadata or None, not dict"):
        load_distributed(tmp_path, shards={"w": 0})


def test_flat_shards_of_several_dims(tmp_path):
    """Tensors of any shape count as flat, row-major, when they are saved and when they are loaded."""
    parts = torch.arange(24.0).view(2, 3, 4)

    def program(group):
        own = {"a": parts[group.rank], "b": torch.tensor(float(group.rank))}
        shards = flat_shard_metadata(own, group.world_size)
        save_distributed(own, tmp_path, group=group, shards=shards)
        into = {"a": torch.zeros(3, 4), "b": torch.zeros(())}
        load_distributed(tmp_path, into, group=group, shards=shards)
        assert into["a"].equal(parts[group.rank])
        assert into["b"] == group.rank
        with pytest.raises((ValueError, DistCheckpointError), match="is a flat shard, and not contiguous"):
            load_distributed(tmp_path, {"a": torch.zeros(4, 3).T}, group=group, shards=shards)

    run_ranks(program, 2)
    loaded = load_distributed(tmp_path)
    assert loaded["a"].equal(torch.arange(24.0))
    assert loaded["b"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_this_ranks_part_without_a_target(tmp_path, num_ranks):
    """A checkpoint's shard metadata gives each of any number of ranks its shards of all tensors."""

    def save(group):
        state = {"model": {"w": WHOLE.split([4, 3])[group.rank], "same": torch.ones(2)}, "step": 3}
        save_distributed(state, tmp_path, group=group, shards=shards([4, 3]))

    run_ranks(save, 2)

    def load(group):
        found = DistributedCheckpoint(tmp_path).shard_metadata.for_ranks(group.world_size)
        return load_distributed(tmp_path, group=group, shards=found)

    loaded = run_ranks(load, num_ranks)
    assert torch.cat([each["model"]["w"] for each in loaded]).equal(WHOLE)
    most = -(-7 // num_ranks)
    assert all(each["model"]["w"].shape[0] in (most, most - 1) for each in loaded)
    assert all(each["step"] == 3 and each["model"]["same"].tolist() == [1.0, 1.0] for each in loaded)


def test_metadata_of_another_checkpoint(tmp_path):
    """Shards of a tensor of another shape are refused where no target says one."""
    save_distributed({"model": {"w": WHOLE.T}}, tmp_path)
    with pytest.raises(DistCheckpointError, match=r"\['model'\]\['w'\] has shape \(7, 5\), and was saved with shape"):
        load_distributed(tmp_path, shards=shards([7]))
