"""What sparse Sinkhorn and `tune` cost as a gallery grows: time, memory, and where they go; by calculation up to 10^8.

    python -m benchmarks.scale [--items N …] [--before FOLDER] [--save]

Sinkhorn(neighbors=64) is fitted on galleries of 10^4 to 10^5 items with a bank of 20,000 queries: random vectors of 512
dimensions with hubs, and caption_translation, of 256, tiled with noise. `tune` runs on the largest random gallery, and
on caption_translation whole, with labels and without; --before times it there with the package of an earlier checkout
too, in turns. Each run is a process of its own on one thread. Times are CPU seconds, of `tune` on caption_translation
the less of two runs. Exponents are least-squares fits of log cost on log items. --save keeps the results; without
--before it keeps the earlier times of the saved results. Exits with 1 if
`tune` takes more than half of the earlier time, or a fit of Sinkhorn grows faster than items^1.1.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import data_folder
from benchmarks.environment import RESULTS, environment, one_thread, save, table
from milvus_hubness.quality.labelled import LabelledQueries

ITEMS, BANK, DIM, NEIGHBORS = (10_000, 30_000, 100_000), 20_000, 512, 64
NOISE = 0.05
MIB = 2**20
ROOT = Path(__file__).parents[1]
MOST_OF_BEFORE, MOST_EXPONENT = 0.5, 1.1
PARTS = {
    "top-k": {("primitives.py", "topk")},
    "pairs": {("steps.py", "nearest"), ("steps.py", "_grouped")},
    "passes": {("steps.py", "_pass"), ("steps.py", "_pass_by_column")},
    "biases": {("base.py", "_evaluated")},
}
"""The parts of a fit and of its biases, by the functions in which they are spent."""
CALCULATED = (10**6, 10**7, 10**8)


def unit(rows: Any) -> Any:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def with_hubs(items: int) -> tuple[Any, Any]:
    """A bank and a gallery: all queries are near one direction too, and so are some items by chance."""
    rng = np.random.default_rng(0)
    common, gallery = (
        rng.standard_normal(DIM, np.float32),
        rng.standard_normal((items, DIM), np.float32),
    )
    bank = (
        gallery[rng.integers(items, size=BANK)]
        + rng.standard_normal((BANK, DIM), np.float32)
        + common
    )
    return unit(bank), unit(gallery + np.float32(0.3) * rng.random((items, 1), np.float32) * common)


def tiled(items: int) -> tuple[Any, Any]:
    """caption_translation, its bank and its gallery repeated with noise of a length of 0.8."""
    from tests.support.real_data import load_task

    task, rng = load_task("caption_translation"), np.random.default_rng(0)

    def repeated(rows: Any, count: int) -> Any:
        tiles = rows[np.arange(count) % len(rows)]
        return unit(tiles + np.float32(NOISE) * rng.standard_normal(tiles.shape, np.float32))

    return repeated(task.bank, BANK), repeated(task.gallery, items)


def measured(run: Callable[[], Any]) -> dict[str, Any]:
    """CPU and wall seconds of a run, and MiB that it needs beyond what the process has."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts again from here.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "seconds": seconds[0],
        "wall_seconds": seconds[1],
        "extra_mib": int(status["VmHWM"].split()[0]) / 1024 - resident,
    }


def sinkhorn(data: str, items: int) -> dict[str, Any]:
    """The cost of a sparse fit and its biases, and the seconds of its parts."""
    from milvus_hubness import QueryBank, Sinkhorn
    from milvus_hubness.quality.measures import k_occurrence, nearest, skewness

    bank, gallery = {"hubs": with_hubs, "captions": tiled}[data](items)
    skew = skewness(k_occurrence(nearest(bank[:2000], gallery, 10), items))  # It imports torch too.
    profile, estimator = cProfile.Profile(time.process_time), Sinkhorn(neighbors=NEIGHBORS)
    whole = measured(
        lambda: profile.runcall(
            lambda: estimator.fit(QueryBank(bank), gallery=gallery).bias(gallery)
        )
    )
    rows = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    spent = {
        part: sum(row[3] for (file, _, name), row in rows if (Path(file).name, name) in functions)
        for part, functions in PARTS.items()
    }
    return {
        **whole,
        "parts": spent,
        "inputs_mib": (bank.nbytes + gallery.nbytes) / MIB,
        "skewness": skew,
    }


def tune_captions(labels: bool) -> dict[str, Any]:
    """The cost of `tune` on caption_translation whole, and what it chooses."""
    from milvus_hubness.quality.tuning import tune
    from tests.support.real_data import load_task

    task, results = load_task("caption_translation"), []
    queries = LabelledQueries.of(task.query, task.positives) if labels else None
    cost = measured(
        lambda: results.append(
            tune(task.bank, task.gallery, target_bank=task.target_bank, queries=queries)
        )
    )
    return {**cost, "verdict": results[0].verdict, "choice": repr(results[0].choice)}


def tune_hubs(items: int) -> dict[str, Any]:
    """The cost of `tune` without labels on a random gallery, of which it takes 20,000 items and the whole bank."""
    from milvus_hubness.quality.tuning import tune

    bank, gallery = with_hubs(items)
    tune(bank[:100], gallery[:100])  # It imports torch.
    return {
        **measured(lambda: tune(bank, gallery)),
        "inputs_mib": (bank.nbytes + gallery.nbytes) / MIB,
    }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "sinkhorn": sinkhorn,
    "tune_captions": tune_captions,
    "tune_hubs": tune_hubs,
}


def apart(job: str, *arguments: Any, package: Path = ROOT) -> dict[str, Any]:
    """The result of a job in a process of its own, with the package of a checkout."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = {
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
        "MILVUS_HUBNESS_DATA": str(data_folder()),
    }
    run_file = (
        "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        run_file,
        str(Path(__file__).resolve()),
        "--job",
        json.dumps([job, *arguments]),
    ]
    environ = {**os.environ, **threads, **paths}
    done = subprocess.run(
        command, cwd=RESULTS, env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(package.name, job, *arguments, result, flush=True)
    return result


def tune_in_turns(before: Path | None) -> dict[str, dict[str, Any]]:
    """{form: {"now": the cheaper of two runs, "before": likewise}}, with labels and without."""
    packages = {"now": ROOT, **({"before": before.resolve()} if before else {})}
    cells: dict[str, dict[str, Any]] = {}
    for form in ("labels", "no labels"):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in packages}
        for name in 2 * tuple(packages):
            runs[name].append(apart("tune_captions", form == "labels", package=packages[name]))
        cells[form] = {
            name: min(done, key=lambda run: run["seconds"]) for name, done in runs.items()
        }
        if before:
            git = ["git", "-C", str(before), "rev-parse", "--short", "HEAD"]
            cells[form]["before"]["commit"] = subprocess.check_output(git, text=True).strip()
    return cells


def exponent(items: list[int], costs: list[float]) -> float:
    return float(np.polyfit(np.log(items), np.log(costs), 1)[0])


def fits(rows: list[dict[str, Any]]) -> dict[str, float]:
    sizes = [row["items"] for row in rows]
    return {name: exponent(sizes, [row[name] for row in rows]) for name in ("seconds", "extra_mib")}


def calculated(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Core hours and GiB of larger galleries: times in proportion to those of the last, memory by a straight line."""
    last, rows = cells[-1], []
    mib = [cell["inputs_mib"] + cell["extra_mib"] for cell in cells]
    line = np.polyfit([cell["items"] for cell in cells], mib, 1)
    for items in CALCULATED:
        hours = items / last["items"] / 3600
        gib = float(np.polyval(line, items)) / 1024
        rows.append(
            {
                "items": items,
                "core_hours": hours * last["seconds"],
                "gib": gib,
            }
        )
    return rows


def power(items: int) -> str:
    exponent_of_ten = len(str(items)) - 1
    return f"{items // 10**exponent_of_ten} · 10^{exponent_of_ten}".removeprefix("1 · ")


def markdown(results: dict[str, Any]) -> str:
    head = ["vectors", "items", "skewness", "CPU s", *PARTS, "inputs, MiB", "beyond them, MiB"]
    lines = [
        [name, power(row["items"]), f"{row['skewness']:.1f}", f"{row['seconds']:.1f}"]
        + [f"{row['parts'][part]:.1f}" for part in PARTS]
        + [f"{row['inputs_mib']:.0f}", f"{row['extra_mib']:.0f}"]
        for name, rows in results["sinkhorn"].items()
        for row in rows
    ]
    grown = "; ".join(
        f"{name}: time items^{cells['seconds']:.2f}, memory beyond the inputs items^{cells['extra_mib']:.2f}"
        for name, cells in results["exponents"].items()
    )
    tuned = [
        [form, cells["before"]["commit"], f"{cells['before']['seconds']:.1f}", f"{cells['now']['seconds']:.1f}",
         f"{cells['now']['seconds'] / cells['before']['seconds']:.2f}", f"{cells['now']['extra_mib']:.0f}"]
        for form, cells in results["tune"].items()
    ]  # fmt: skip
    sampled = "; ".join(
        f"{power(row['items'])} items: {row['seconds']:.0f} s, {row['extra_mib']:.0f} MiB"
        for row in results["tune_hubs"]
    )
    larger = [
        [power(row["items"]), f"{row['core_hours']:.2f}", f"{row['gib']:.0f}"]
        for row in results["calculated"]
    ]
    return f"""Sparse Sinkhorn with a bank of {BANK:,} queries, one thread; `captions` is caption_translation, tiled:

{table(head, lines)}

Fitted growth: {grown}.

`tune` on caption_translation whole (14,085 items, a bank of 9,000), one thread:

{table(["", "earlier commit", "its CPU s", "CPU s", "ratio", "MiB beyond the inputs"], tuned)}

`tune` without labels samples 20,000 items, so that its cost stays. On random vectors with hubs: {sampled}.

By calculation from the random vectors, for {DIM} dimensions and {BANK:,} queries:

{table(["items", "core hours", "memory, GiB"], larger)}
"""


def faults(results: dict[str, Any]) -> list[str]:
    """The bounds that do not hold."""
    found = []
    for form, cells in results["tune"].items():
        ratio = cells["now"]["seconds"] / cells["before"]["seconds"]
        if ratio > MOST_OF_BEFORE:
            found.append(
                f"tune with {form} takes {ratio:.2f} of the time of {cells['before']['commit']}"
            )
    for name, cells in results["exponents"].items():
        if cells["seconds"] > MOST_EXPONENT:
            found.append(f"Sinkhorn on {name} grows as items^{cells['seconds']:.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=ITEMS)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, for tune")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    one_thread()
    if options.job:
        job, *arguments = json.loads(options.job)
        print(json.dumps(JOBS[job](*arguments)))
        return 0
    started = time.monotonic()
    tuned = tune_in_turns(options.before)
    if not options.before:
        kept = json.loads((RESULTS / "scale.json").read_text())["tune"]
        tuned = {form: {**cells, "before": kept[form]["before"]} for form, cells in tuned.items()}
    rows = {
        data: [{"items": items, **apart("sinkhorn", data, items)} for items in options.items]
        for data in ("hubs", "captions")
    }
    results = {
        "bank": BANK,
        "neighbors": NEIGHBORS,
        "sinkhorn": rows,
        "exponents": {data: fits(cells) for data, cells in rows.items()},
        "tune": tuned,
        "tune_hubs": [{"items": items, **apart("tune_hubs", items)} for items in options.items[1:]],
        "calculated": calculated(rows["hubs"]),
    }
    text = markdown(results)
    print(text)
    broken = faults(results)
    print("\n".join(broken) or "all bounds hold")
    if options.save:
        save("scale", {"environment": environment(started), **results}, text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
