"""Run the tests that touch torch's internals with the installed torch, and write the table of their results.

::

    python tools/torch_versions.py run [SUBJECT...]    run them; the results go to docs/torch-versions/VERSION.json
    python tools/torch_versions.py table               write the table into docs/torch-backend.md

``make test-torch TORCH=2.15.0`` does the first, in an environment with that torch, and then the second.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "torch-versions"
PAGE = ROOT / "docs" / "torch-backend.md"
BEGIN, END = "<!-- of tools/torch_versions.py: begin -->", "<!-- of tools/torch_versions.py: end -->"

OWN_SUITE = "torch's own suite "
"""The prefix of the properties in which `test_torch_suite` records the number of passed tests."""

CHECKPOINTS = "tests/unit/checkpoint"
COLLECTIVES = "tests/unit/collectives"
SUBJECTS = {
    "torch backend": [
        *("tests/unit/torch_backend", "tests/torch_backend"),
        *(f"tests/programs/test_{name}.py" for name in ("torch_examples", "torch_launcher", "torch_suite")),
        *(f"tests/programs/test_{name}.py" for name in ("auto_plans", "transformers", "transformers_generate")),
    ],
    "tensors": ["tests/unit/tensor"],
    "parallel": [
        *("tests/unit/parallel", "tests/multiprocess/test_fsdp_against_torch.py"),
        *(f"tests/programs/test_compiled_{name}.py" for name in ("models", "parallel_models")),
    ],
    "checkpoints": [
        *(f"{CHECKPOINTS}/test_conversion_{kind}.py" for kind in ("dcp", "hugging_face", "torch")),
        f"{CHECKPOINTS}/test_parallel_checkpoints.py",
        f"{CHECKPOINTS}/test_state_objects.py",
        f"{CHECKPOINTS}/test_loading_into.py",
        f"{CHECKPOINTS}/test_random_state.py",
    ],
    "collectives": [
        *(f"{COLLECTIVES}/test_{name}.py" for name in ("signatures", "collective_autograd")),
        "tests/programs/test_compiled_collectives.py",
        *(
            f"{COLLECTIVES}/test_{name}.py"
            for name in ("default_device", "inference_mode", "other_differentiation", "views")
        ),
        "tests/unit/rpc/test_rpc_context.py",
        "tests/unit/rpc/test_rpc_values.py",
        "tests/unit/cli/test_doctor.py",
    ],
}
"""The tests by subject; each subject is a pytest run of its own."""


def run_subject(paths: list[str], report: Path) -> dict[str, Any]:
    """Run a subject's tests, and count the outcomes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.exists() or code not in (0, 1):
        return {"passed": 0, "skipped": 0, "failed": [f"pytest ended with {code}"]}
    root = ET.parse(report).getroot()  # noqa: S314 - pytest wrote it
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    found: dict[str, Any] = {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
    }
    said = {each.get("name", ""): each.get("value", "") for each in root.iter("property")}  # others are Hypothesis's
    suite = {name.removeprefix(OWN_SUITE): int(count) for name, count in said.items() if name.startswith(OWN_SUITE)}
    if suite:
        found[OWN_SUITE.strip()] = dict(sorted(suite.items()))
    return found


def run(subjects: list[str]) -> int:
    """Run subjects, or all, and store the results beside those of earlier runs."""
    found = {}
    for subject in subjects or SUBJECTS:
        with tempfile.TemporaryDirectory() as folder:
            found[subject] = run_subject(SUBJECTS[subject], Path(folder) / "report.xml")
        store(subject, found[subject])
    return int(any(counts["failed"] for counts in found.values()))


def store(subject: str, counts: dict[str, Any]) -> None:
    """Store a subject's results in the file of this torch."""
    import torch  # noqa: PLC0415 - the table is made without

    torch_version = version("torch").partition("+")[0]
    path = RESULTS / f"{torch_version}.json"
    found = json.loads(path.read_text())["subjects"] if path.exists() else {}
    found[subject] = counts
    result = {
        "torch": torch_version,
        "build": torch.__version__,
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "subjects": {each: found[each] for each in SUBJECTS if each in found},
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def results() -> list[dict[str, Any]]:
    """The stored results, the oldest torch first."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted(found, key=lambda each: [int(part) for part in each["torch"].split(".")])


def table() -> str:
    """The stored results as Markdown."""
    lines = ["| torch | " + " | ".join(SUBJECTS) + " | torch's own suite | run |", "|---" * (len(SUBJECTS) + 3) + "|"]
    for result in results():
        subjects = result["subjects"]
        suite = subjects.get("torch backend", {}).get(OWN_SUITE.strip(), {})
        own = ", ".join(f"{count} with {ranks}" for ranks, count in suite.items())
        cells = [_cell(subjects.get(subject)) for subject in SUBJECTS]
        lines.append(
            f"| {result['build']} | {' | '.join(cells)} | {own} | {result['date']}, Python {result['python']} |"
        )
    return "\n".join(lines)


def _cell(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return "not run"
    return f"{counts['passed']} passed" + (f", {len(counts['failed'])} failed" if counts["failed"] else "")


def page_with_table(page: str) -> str:
    """The page with the table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main() -> int:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"one of {', '.join(SUBJECTS)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.subjects) - SUBJECTS.keys():
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    code = run(arguments.subjects) if arguments.action == "run" else 0
    PAGE.write_text(page_with_table(PAGE.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main())
