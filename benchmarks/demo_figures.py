"""What the demo measures on each Python, whose own library it searches; and whether the pages say so.

    python -m benchmarks.demo_figures PYTHON [PYTHON …] [--save]

For each Python, of which a name in the search path or a path is given, an environment is made with the light install,
Milvus Lite and scikit-learn, and `milvus-hubness demo --json` runs there. The table of docs/benchmarks/quality.md has a
row for each version; a row whose figures differ by more than one query in a thousand is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, environment, save, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "quality.md"
MEASURES = ("r1", "r5", "r10", "skewness")
MOST_OFF = {"r1": 0.15, "r5": 0.15, "r10": 0.15, "skewness": 0.02}
"""Functions with equal vectors come in any order, and a printed figure is rounded."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--save", action="store_true", help="add to results/demo_figures.json")
    chosen = parser.parse_args()

    started = time.monotonic()
    measured = {}
    for python in chosen.pythons:
        with tempfile.TemporaryDirectory(prefix="demo-figures-") as folder:
            version, result = figures(Path(folder), python)
        measured[version] = result
        print(row_of(version, result), flush=True)

    if chosen.save:
        # Other versions, which were measured before, stay.
        path = RESULTS / "demo_figures.json"
        before = json.loads(path.read_text())["pythons"] if path.exists() else {}
        every = {**before, **measured}
        by_version = sorted(every, key=lambda version: [int(part) for part in version.split(".")])
        rows = [row_of(version, every[version]) for version in by_version]
        results = {
            "pythons": {version: every[version] for version in by_version},
            "environment": environment(started),
        }
        save("demo_figures", results, table(HEAD, rows))

    sys.exit("\n".join(differences(measured, PAGE.read_text())) or 0)


HEAD = ["Python", "queries", "R@1", "R@5", "R@10", "skewness of N₁₀"]


def figures(folder: Path, python: str) -> tuple[str, dict[str, Any]]:
    """The version of a Python, and what the demo measures there."""
    home = folder / "environment"
    # Nothing of this environment may be found there.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output_of(*command: str | Path) -> str:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
        return done.stdout

    output_of(python, "-m", "venv", home)
    package = f"milvus-hubness[check,lite] @ {ROOT.as_uri()}"
    output_of(home / "bin" / "pip", "install", "--quiet", package, "scikit-learn")
    printed = output_of(
        home / "bin" / "python", "-c", "import platform as p; print(p.python_version())"
    )
    result = json.loads(output_of(home / "bin" / "milvus-hubness", "demo", "--json"))
    kept = {name: result[name] for name in ("raw", "corrected", "queries", "gallery", "bank")}
    return printed.strip(), kept


def row_of(version: str, result: dict[str, Any]) -> list[str]:
    """Cells with the figures as they were and as corrected."""
    cells = [f"{result['queries']:,}"]
    for name in MEASURES:
        digits = 2 if name == "skewness" else 1
        cells.append(f"{result['raw'][name]:.{digits}f} → {result['corrected'][name]:.{digits}f}")
    return [version, *cells]


def differences(measured: dict[str, Any], page: str) -> list[str]:
    """A line for each version that the page lacks, or has other figures of."""
    lines = []
    for version, result in measured.items():
        shown = re.search(rf"^\| {re.escape(version)} \|(.*)\|$", page, re.MULTILINE)
        if shown is None:
            lines.append(f"{PAGE.name} has no row for Python {version}")
            continue
        _, *cells = shown[1].split("|")
        for name, cell in zip(MEASURES, cells, strict=True):
            before, after = map(float, cell.split("→"))
            pairs = ((before, result["raw"][name]), (after, result["corrected"][name]))
            if any(abs(one - other) > MOST_OFF[name] for one, other in pairs):
                lines.append(
                    f"Python {version}: {name} is {pairs[0][1]} → {pairs[1][1]}, not {cell}"
                )
    return lines


if __name__ == "__main__":
    main()
