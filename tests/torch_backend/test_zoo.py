"""The zoo: some of its cells; and cells that are wrong, are refused, fail, crash or hang are told apart."""

import json
import os
import signal
import time
from functools import partial

import pytest
import torch
import zoo
from model_zoo.families import FAMILIES
from model_zoo.outcomes import NotApplicableError, Outcome, find_error, on_ranks
from model_zoo.processes import run_in_process

import ferrodist as fd


@pytest.mark.parametrize("family", ["Llama", "TransformerEncoder"])
@pytest.mark.parametrize("column", ["tensor", "pipeline", "checkpoint"])
def test_cells(family, column):
    """Models are those of one process in each way."""
    outcome = zoo.run_one(family, column)
    assert outcome.kind == "ok", str(outcome)
    assert outcome.error < 1e-9


def refuses():
    def program(group):
        fd.parallelize(torch.nn.Linear(2, 2), fd.DeviceMesh(group, (-1,), ("ranks",)), "auto")

    on_ranks(program)


def fails():
    on_ranks(lambda group: torch.ones(2) + torch.ones(3) * group.rank)


def differs():
    error = find_error({"w": torch.ones(3)}, {"w": torch.ones(3) + 1e-3})
    return Outcome(kind="ok", error=error)


def crashes():
    os.kill(os.getpid(), signal.SIGKILL)


def lacks():
    raise NotApplicableError("it has none")


@pytest.mark.parametrize(
    ("compare", "kind", "reason"),
    [
        (refuses, "refused", 'ValueError: plan="auto" takes a model'),
        (fails, "error", "RuntimeError: The size of tensor a (2) must match"),
        (differs, "wrong", "w differs by 1e-03 of its largest element"),
        (lacks, "not applicable", "it has none"),
        (partial(os._exit, 3), "error", "its process ended with code 3"),
        (crashes, "error", "its process ended by SIGKILL"),
        (partial(Outcome, kind="ok", error=float("nan")), "wrong", ""),
    ],
)
def test_other_outcomes(compare, kind, reason):
    """Nothing that goes wrong is an "ok", or ends the run."""
    outcome = run_in_process(compare)
    assert (outcome.kind, outcome.reason[: len(reason)]) == (kind, reason)


def test_a_cell_that_hangs_is_ended():
    """Its time limit is an error, and the process is gone."""
    outcome = run_in_process(partial(time.sleep, 60), time_limit=0.2)
    assert str(outcome) == "error: it was not done after 0.2 s"


def test_outcomes_are_merged(tmp_path, monkeypatch):
    """A run of some cells keeps the outcomes of others, unless torch or transformers have other versions."""
    monkeypatch.setattr(zoo, "run_one", lambda family, column: Outcome(kind="ok", error=1.26e-9))
    path = tmp_path / "zoo.json"
    assert zoo.main(["--families", "BERT;Llama", "--columns", "tensor", "--output", str(path)]) == 0
    monkeypatch.setattr(zoo, "run_one", lambda family, column: Outcome(kind="wrong", reason="x"))
    assert zoo.main(["--families", "BERT", "--columns", "generate", "--output", str(path)]) == 1
    stored = json.loads(path.read_text())
    ok = {"outcome": "ok", "error": 1e-9}
    wrong = {"outcome": "wrong", "error": 0.0, "reason": "x"}
    assert stored["cells"] == {"Llama": {"tensor": ok}, "BERT": {"tensor": ok, "generate": wrong}}
    assert list(stored["cells"]) == [name for name in FAMILIES if name in stored["cells"]]
    path.write_text(json.dumps({**stored, "torch": "1.0"}))
    zoo.main(["--families", "BERT", "--columns", "tensor", "--output", str(path)])
    assert list(json.loads(path.read_text())["cells"]) == ["BERT"]


def test_unknown_names_are_refused(capsys):
    """The message has the known ones."""
    with pytest.raises(SystemExit):
        zoo.main(["--families", "Lama"])
    assert "no such name: Lama; there are Llama, " in capsys.readouterr().err
