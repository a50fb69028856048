"""Compare the speed of two checkouts: `ferrodist bench` of both, alternating, and the ratios of their medians.

Each checkout has its own environment in `.venv`. On a machine that is shared with others only runs side by side can be
compared, so the checkouts take turns, and each case is judged by the median of its rounds::

    python tools/compare_versions.py ../before . --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Case = tuple[str, int, int]  # operation, number of ranks, size in bytes


def measure(checkout: Path, options: Sequence[str]) -> dict[Case, float]:
    """Run the benchmark of a checkout once; returns the median of each case in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(checkout / ".venv/bin/ferrodist"), "bench", "--peers", "native", *options, "--output", folder]
        subprocess.run(command, cwd=checkout, check=True, capture_output=True)
        (report,) = Path(folder).glob("*.json")
        cases = json.loads(report.read_text())["cases"]
    return {
        (case["operation"], case["num_ranks"], case["size_bytes"]): case["measurements"][0]["median"]
        for case in cases
        if case["measurements"]
    }


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="8,16K,1M,64M")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--seconds", default="1", help="of a case in a round")
    given = parser.parse_args()
    options = ["--sizes", given.sizes, "--ranks", given.ranks, "--seconds", given.seconds]
    rounds: list[tuple[dict[Case, float], dict[Case, float]]] = []
    for number in range(given.rounds):
        pair = (given.before, given.after) if number % 2 == 0 else (given.after, given.before)
        found = {checkout: measure(checkout.resolve(), options) for checkout in pair}
        rounds.append((found[given.before], found[given.after]))
        print(f"round {number + 1} of {given.rounds}", flush=True)
    print(f"{'operation':16} {'ranks':>5} {'bytes':>10} {'before us':>12} {'after us':>12} {'ratio':>6}  of the rounds")
    for case in rounds[0][0]:
        before = statistics.median(old[case] for old, _ in rounds)
        after = statistics.median(new[case] for _, new in rounds)
        ratios = sorted(new[case] / old[case] for old, new in rounds)
        operation, num_ranks, size = case
        print(
            f"{operation:16} {num_ranks:5} {size:10} {before * 1e6:12.2f} {after * 1e6:12.2f}"
            f" {statistics.median(ratios):6.2f}  {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
