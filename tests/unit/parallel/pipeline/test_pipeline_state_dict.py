"""A rank's stages under the names of the whole model, and its states under those of the stages."""

import torch
from pipeline_models import Wrapped
from torch import nn

from ferrodist.parallel.pipeline.state_dict import StateDictMapper


class Own(nn.Module):
    """A stage that has all that a module may have itself."""

    _version = 3

    def __init__(self, name):
        super().__init__()
        self.register_parameter(f"{name}_weight", nn.Parameter(torch.zeros(2)))
        self.register_buffer(f"{name}_mean", torch.zeros(2))
        self.register_buffer(f"{name}_mask", torch.zeros(2), persistent=False)
        self.add_module(f"{name}_layer", nn.Linear(2, 2, bias=False))


def test_stages_with_one_prefix():
    """The module has the contents of both, and the state dict of both."""
    stages = {0: Own("one"), 1: Own("other")}
    for prefix in ("", "deep.", "deep.er."):
        whole = StateDictMapper(stages, [prefix, prefix]).make_module()
        found = whole.state_dict(keep_vars=True)
        expected = {
            f"{prefix}{name}": each
            for stage in stages.values()
            for name, each in stage.state_dict(keep_vars=True).items()
        }
        assert len(expected) == 6
        assert found.keys() == expected.keys()
        assert all(found[name] is each for name, each in expected.items())


def test_states_get_the_names_of_stages():
    """Each stage gets all names below its prefix, known or not; other names stay."""
    stage = nn.Linear(2, 2)
    whole = StateDictMapper({1: stage}, ["a.", "b.", "c."])
    weight = torch.ones(2, 2)
    state = {"in.b.weight": weight, "in.b.old": weight, "in.a.weight": torch.zeros(1), "out.b.bias": torch.zeros(1)}
    assert whole.rename(state, "in.") == {"in.stages.1.": "in.b."}
    assert state.keys() == {"in.stages.1.weight", "in.stages.1.old", "out.b.bias"}
    assert state["in.stages.1.weight"] is weight


def test_versions_get_the_names_of_stages():
    """Versions of this rank's modules have both names then."""
    model = nn.ModuleDict({"a": Own("one"), "b": nn.Sequential(nn.BatchNorm1d(2))})
    state = model.state_dict()
    whole = StateDictMapper({0: model["a"], 1: Wrapped(model["b"])}, ["a.", "b."])
    expected = {
        **state._metadata,
        "stages.0": {"version": 3},
        "stages.0.one_layer": {"version": 1},
        "stages.1.module": {"version": 1},
        "stages.1.module.0": {"version": 2},
    }
    renamed = whole.rename_versions(state)
    assert renamed._metadata == expected
    assert renamed == state
    assert whole.rename_versions({"a": 1}) == {"a": 1}
