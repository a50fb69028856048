"""``ferrodist ckpt``: what it prints, and its exit codes."""

import importlib.util
import io
import json
import re
import sys

import pytest
import torch
from offline_states import flip, make_state, save_sharded, save_whole

from ferrodist.checkpoint import compare, load_distributed, verify
from ferrodist.checkpoint.reader import read_manifest
from ferrodist.checkpoint.storage import LocalStorage
from ferrodist.checkpoint.tools.inspect import inspect_checkpoint
from ferrodist.cli import checkpoint
from ferrodist.cli.main import main
from ferrodist.errors import DistCheckpointError
from ferrodist.installation import how_to_install

needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="the extra 'ckpt' is not installed")


@pytest.fixture
def run(capsys):
    """Runs ``ferrodist ckpt``; gives exit code, output and what was said on standard error."""

    def run(*arguments):
        try:
            code = main(["ckpt", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint of three ranks."""
    return save_sharded(tmp_path_factory.mktemp("command") / "c", 3)


@needs_rich
def test_inspect(sharded, run):
    """A line for each place of the state, with all there is to say of tensors; no line is cut off where it is piped."""
    code, out, err = run("inspect", sharded)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith(f"{sharded}\nsaved by 3 ranks, 20")
    assert ["state", "value", "or", "shape", "dtype", "size", "placement", "parts"] in lines
    (weight,) = [line for line in out.splitlines() if line.strip().startswith("weight")]
    assert weight.split()[1:6] == ["[12,", "10]", "float32", "480", "B"]
    assert weight.endswith("of 3      3")
    assert "Shard(0)" in weight
    assert ["step", "7"] in lines
    assert ["own", "PerRank", "of", "3", "ranks"] in lines
    assert ["rank", "2", "dict", "of", "2"] in lines
    assert "All files are there" in out


def test_inspect_as_json(sharded, run):
    """The same for programs."""
    code, out, _ = run("inspect", sharded, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["world_size"], found["num_tensors"], found["problems"]) == (3, len(make_state()["model"]) + 3, [])
    places = {tuple(entry["place"]): entry for entry in found["state"]}
    assert places["step",] == {"place": ["step"], "kind": "value", "value": "7", "tensor": None}
    assert places["losses", "1"]["value"] == "inf"
    assert places["numbered", "5", "nested"]["value"] == "'text'"
    tensor = places["model", "weight"]["tensor"]
    assert (tensor["shape"], tensor["dtype"], tensor["size_bytes"], tensor["num_shards"]) == (
        [12, 10],
        "float32",
        480,
        3,
    )
    assert set(tensor["files"]) <= set(found["files"])


@needs_rich
def test_long_names_in_a_pipe(tmp_path, run):
    """Each place has a line of its own, however long."""
    path = save_whole(tmp_path / "c", {"x" * 300: torch.ones(2), "text": "y" * 300})
    _, out, _ = run("inspect", path)
    assert any(line.startswith("x" * 300) and "float32" in line for line in out.splitlines())
    assert any(line.startswith("text") and line.endswith("...") for line in out.splitlines())


@needs_rich
def test_inspect_reports_missing_files(tmp_path, run):
    """Missing files are found without reading tensors."""
    path = save_sharded(tmp_path / "c", 2)
    file = min(path.glob("*.safetensors"))
    file.unlink()
    code, out, _ = run("inspect", path)
    assert code == 1
    assert f"WRONG: {file.name}, tensor" in out
    assert "All files are there" not in out


def test_inspect_without_rich(tmp_path, run, monkeypatch):
    """The extra is named; JSON and the other commands do without."""
    path = save_whole(tmp_path / "c")
    monkeypatch.setattr(checkpoint, "_has_rich", lambda: False)
    code, out, err = run("inspect", path)
    assert (code, out) == (1, "")
    assert f": {how_to_install('ckpt')}; or give --json" in err
    assert err.count("\n") == 1
    assert run("inspect", path, "--json")[0] == 0
    assert run("verify", path)[0] == 0


def test_verify(tmp_path, run):
    """Sound is 0; problems are 1, a line for each."""
    path = save_sharded(tmp_path / "c", 3)
    code, out, err = run("verify", path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: sound, 11 tensors in 3 files, ")
    for file in path.glob("*.safetensors"):
        flip(file, file.stat().st_size - 1)
    code, out, err = run("verify", path)
    assert (code, err) == (1, "")
    assert out.count("don't have the hash") == 3
    assert out.splitlines()[-1].startswith(f"{path}: 3 problems, ")
    code, out, _ = run("verify", path, "--json")
    assert code == 1
    assert [problem["file"] for problem in json.loads(out)["problems"]] == sorted(f.name for f in path.glob("*.safet*"))


def test_diff(tmp_path, run):
    """Nothing and 0 where they are the same; a line for each difference, and 1."""
    one = save_whole(tmp_path / "one", {"a": torch.zeros(3), "b": 1})
    two = save_whole(tmp_path / "two", {"a": torch.tensor([0, 0, 2.0]), "b": 2})
    assert run("diff", one, one) == (0, "", "")
    lines = "['a']: 1 of 3 elements differ, by up to 2\n['b']: 1 and 2\n"
    assert run("diff", one, two) == (1, lines, "")
    code, out, _ = run("diff", one, two, "--json")
    assert code == 1
    assert [(each["kind"], each["largest"]) for each in json.loads(out)] == [("elements", 2.0), ("value", None)]


def test_reshard(sharded, tmp_path, run):
    """The options go where they belong."""
    options = ["--ranks", 2, "--dim", 1, "--max-file-mib", 1, "--max-memory-mib", 16, "--no-verify"]
    code, out, err = run("reshard", sharded, tmp_path / "new", *options)
    assert (code, err) == (0, "")
    report = verify(tmp_path / "new")
    assert out == f"{tmp_path}/new: written, 11 tensors in 2 files, {report.size_bytes} bytes\n"
    assert report.is_sound
    assert compare(sharded, tmp_path / "new") == []
    found = read_manifest(LocalStorage(tmp_path / "new"))
    assert found.tensors["model.weight"].placement == "Shard(1) over 2 ranks"
    assert len(found.files) == 2


@pytest.mark.parametrize("kind", ["dcp", "torch", "hf"])
def test_convert(tmp_path, run, kind):
    """There and back, by each format."""
    path = save_whole(tmp_path / "c", {f"t{number}": torch.full((5,), float(number)) for number in range(3)})
    code, out, err = run("convert", "--from", "ferrodist", "--to", kind, path, tmp_path / "other")
    assert (code, err) == (0, "")
    what = {"dcp": "2 files", "torch": "1 file", "hf": "3 tensors in 1 file"}[kind]
    assert re.fullmatch(rf"{tmp_path}/other: written, {what}, \d+ bytes\n", out)
    if kind == "hf":
        (tmp_path / "other" / "metadata.json").unlink()
    back = ["convert", "--from", kind, "--to", "ferrodist", tmp_path / "other", tmp_path / "back", "--ranks", 2]
    code, out, err = run(*back)
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path}/back: written, 3 tensors in 2 files, ")
    assert compare(path, tmp_path / "back") == []
    assert len(read_manifest(LocalStorage(tmp_path / "back")).files) == 2


def test_counts_of_one_are_singular(tmp_path, run):
    """One problem and one file are in the singular."""
    path = save_whole(tmp_path / "c", {"a": torch.zeros(3)})
    (file,) = path.glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    assert run("verify", path)[1].splitlines()[-1].startswith(f"{path}: 1 problem, 1 tensor in 1 file, ")


def test_convert_a_part(tmp_path, run):
    """A model out of a training state, for Hugging Face's tools."""
    path = save_whole(tmp_path / "c")
    assert run("convert", "--from", "ferrodist", "--to", "hf", path, tmp_path / "hf", "--part", "model")[0] == 0
    assert set(load_distributed(tmp_path / "hf")) == set(make_state()["model"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["nonsense", "a"], "invalid choice"),
        (["verify"], "required: PATH"),
        (["verify", ""], "a checkpoint's path is empty"),
        (["diff", "a"], "required: B"),
        (["reshard", "a", "b"], "required: --ranks"),
        (["reshard", "a", "b", "--ranks", "0"], "--ranks must be 1 or more, not 0"),
        (["reshard", "a", "b", "--ranks", "2", "--max-memory-mib", "1"], "--max-memory-mib must be 16 or more, not 1"),
        (["reshard", "a", "b", "--ranks", "2", "--max-file-mib", "-1"], "--max-file-mib must be 1 or more"),
        (["reshard", "a", "b", "--ranks", "2", "--dim", "x"], "invalid int value: 'x'"),
        (["convert", "--from", "dcp", "--to", "torch", "a", "b"], "one of --from and --to must be ferrodist"),
        (["convert", "--from", "ferrodist", "--to", "ferrodist", "a", "b"], "one of --from and --to must be ferrodist"),
        (["convert", "--from", "ferrodist", "--to", "dcp", "a", "b", "--ranks", "2"], "--ranks is for --to ferrodist"),
        (["convert", "--from", "ferrodist", "--to", "dcp", "a", "b", "--part", "x"], "--part is for --to hf"),
        (["verify", "a", "--storage-option", "x"], "--storage-option must be KEY=VALUE, not 'x'"),
    ],
)
def test_wrong_usage(run, arguments, message):
    """One line, and exit code 2."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere", "--json"],
        ["verify", "nowhere"],
        ["diff", "nowhere", "nowhere"],
        ["reshard", "nowhere", "new", "--ranks", "2"],
        ["convert", "--from", "ferrodist", "--to", "torch", "nowhere", "new"],
        ["convert", "--from", "hf", "--to", "ferrodist", "nowhere", "new"],
        ["convert", "--from", "dcp", "--to", "ferrodist", "nowhere", "new"],
        ["convert", "--from", "torch", "--to", "ferrodist", "nowhere", "new"],
    ],
)
def test_no_checkpoint(run, arguments, tmp_path, monkeypatch):
    """One line that names it, exit code 1, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert "nowhere" in err
    assert err.startswith("ferrodist: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@needs_rich
def test_bars(sharded, tmp_path, run, monkeypatch):
    """On a terminal there is a bar while it works."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["ckpt", "reshard", str(sharded), str(tmp_path / "new"), "--ranks", "2"]) == 0
    assert "reshard" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


def test_storage_options_are_for_urls(tmp_path, run, monkeypatch):
    """The options are JSON or text, and a local path beside a URL gets none."""
    got = []
    monkeypatch.setattr(
        "ferrodist.checkpoint.tools.diff.compare", lambda *paths, **options: got.append((paths, options)) or []
    )
    options = ["--storage-option", "anon=true", "--storage-option", "key=abc"]
    assert run("diff", "s3://bucket/a", tmp_path, *options)[0] == 0
    ((_, named),) = got
    assert named["storage_options"] == {"anon": True, "key": "abc"}
    assert named["other_storage_options"] is None


def test_files_that_only_the_tree_names(tmp_path):
    """A manifest that lacks a tensor can be inspected."""
    path = save_whole(tmp_path / "c", {"a": torch.ones(1)})
    manifest = read_manifest(LocalStorage(path))
    assert [entry.kind for entry in inspect_checkpoint(path).state] == ["dict", "tensor"]
    assert manifest.tree == {"dict": {"a": {"tensor": "a"}}}
    with pytest.raises(DistCheckpointError, match="not there"):
        inspect_checkpoint(tmp_path / "nowhere")
