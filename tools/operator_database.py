"""torch's operator database on distributed tensors: each operator with every placement, compared with the plain one.

::

    python tools/operator_database.py --write docs/operators.json      # all of it: some ten minutes on two cores
    python tools/operator_database.py --operators cat linalg.inv       # some; reasons are printed

The operators are checked by child processes (`operator_calls`), so that an operator which crashes its process or does
not end costs no other one its result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Record = dict[str, Any]
"""The outcome of an operator, of each of its forms, and the reason if it is not "by rule"."""

_START_LIMIT = 180.0  # seconds for a child to import torch's database


def check_operators(names: Sequence[str], thoroughness: int) -> None:
    """Check operators, and print a line of JSON for each: what a child process does."""
    import operator_calls  # noqa: PLC0415 - the parent needs neither torch's database nor ferrodist
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    infos = {name_of(info): info for info in op_db}
    sys.stdout.write(json.dumps({"names": list(infos)}) + "\n")
    sys.stdout.flush()
    for name in names:
        started = time.monotonic()
        forms = operator_calls.check_operator(infos[name], thoroughness)
        record = summarize({form: vars(result) | {"outcome": result.outcome.value} for form, result in forms.items()})
        sys.stdout.write(json.dumps({"name": name, "seconds": time.monotonic() - started, "record": record}) + "\n")
        sys.stdout.flush()


def name_of(info: Any) -> str:
    """The name of an entry of the database, with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def summarize(forms: dict[str, Record]) -> Record:
    """The outcome of an operator: that of its function, unless a form that writes is wrong or fails."""
    worst = forms["function"]
    for form in forms.values():
        if form["outcome"] == "wrong" or (form["outcome"] == "error" and worst["outcome"] != "wrong"):
            worst = form
    record: Record = {"outcome": worst["outcome"], "num_calls": sum(form["num_calls"] for form in forms.values())}
    if worst["reason"]:
        record["reason"] = worst["reason"][:300]
    for name, form in forms.items():
        if name != "function" and form["num_calls"]:
            record[name] = form["outcome"]
            if form["outcome"] in ("refused", "wrong", "error"):
                record[f"{name} reason"] = form["reason"][:300]
    return record


class _Child:
    """A child process that checks operators, and its lines."""

    def __init__(self, names: Sequence[str], thoroughness: int = 1) -> None:
        command = [sys.executable, __file__, "--thoroughness", str(thoroughness), "--child", *names]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next(self, seconds: float) -> Record | None:
        """The next line; None at the end. TimeoutError: there is none in time."""
        try:
            while line := self._lines.get(timeout=seconds):
                with contextlib.suppress(json.JSONDecodeError):  # whatever else an operator prints
                    found: Record = json.loads(line)
                    return found
        except queue.Empty:
            raise TimeoutError from None
        return None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def run_children(names: Sequence[str], thoroughness: int, limit: float) -> Iterator[tuple[str, float, Record]]:
    """Check operators in child processes, a new one after each crash; yields name, seconds and record."""
    left = list(names)
    while left:
        child = _Child(left, thoroughness)
        try:
            child.next(_START_LIMIT)
            while left:
                try:
                    found = child.next(limit)
                except TimeoutError:
                    yield left.pop(0), limit, {"outcome": "error", "reason": f"not done in {limit:.0f} seconds"}
                    break
                if found is None:
                    code = child.process.wait()
                    yield left.pop(0), 0.0, {"outcome": "error", "reason": f"the process ended with code {code}"}
                    break
                left.remove(found["name"])
                yield found["name"], found["seconds"], found["record"]
        finally:
            child.stop()


def run_jobs(
    names: Sequence[str], num_jobs: int, thoroughness: int, limit: float
) -> Iterator[tuple[str, float, Record]]:
    """`run_children` for parts of the names at a time."""
    found: queue.SimpleQueue[tuple[str, float, Record] | None] = queue.SimpleQueue()

    def run(part: Sequence[str]) -> None:
        for one in run_children(part, thoroughness, limit):
            found.put(one)
        found.put(None)

    for at in range(num_jobs):
        threading.Thread(target=run, args=(names[at::num_jobs],), daemon=True).start()
    num_left = num_jobs
    while num_left:
        one = found.get()
        if one is None:
            num_left -= 1
        else:
            yield one


def list_names() -> list[str]:
    """The names of all operators of the database."""
    child = _Child([])
    try:
        found = child.next(_START_LIMIT)
        assert found is not None, "a child lists the operators first"
        return list(found["names"])
    finally:
        child.stop()


def count_outcomes(operators: dict[str, Record]) -> dict[str, int]:
    """The number of operators by outcome."""
    counted = collections.Counter(record["outcome"] for record in operators.values())
    return dict(sorted(counted.items()))


def main() -> None:
    """Run, print a line for each operator that is not computed by a rule, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--write", type=Path, metavar="PATH", help="a JSON file; entries of other operators stay")
    parser.add_argument("--thoroughness", type=int, default=1, help="times as many calls as usual")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for an operator; default: 90")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        check_operators(given.child, given.thoroughness)
        return
    names = list_names()
    chosen = given.operators or names
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"torch's operator database has no {', '.join(unknown)}")
    known = json.loads(given.write.read_text())["operators"] if given.write and given.write.exists() else {}
    operators: dict[str, Record] = {name: record for name, record in known.items() if name in names}
    for index, (name, seconds, record) in enumerate(run_jobs(chosen, given.jobs, given.thoroughness, given.limit)):
        operators[name] = record
        if record["outcome"] != "by rule" or given.operators:
            progress = f"{index + 1}/{len(chosen)} {seconds:5.1f} s"
            print(f"{progress}  {name}: {record['outcome']}  {record.get('reason', '')}", flush=True)
            for form in ("out=", "in place"):
                if f"{form} reason" in record:
                    print(f"      {form}: {record[form]}  {record[f'{form} reason']}", flush=True)
        if given.write:
            ordered = {name: operators[name] for name in names if name in operators}
            report = {"torch": torch.__version__.partition("+")[0], "counts": count_outcomes(ordered)}
            given.write.write_text(json.dumps(report | {"operators": ordered}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(count_outcomes({name: operators[name] for name in chosen if name in operators})))


if __name__ == "__main__":
    main()
