"""R@1 through Milvus Lite in galleries of several kinds of items: the default, a field of kinds, and "auto".

    python -m benchmarks.mixed [gallery …] [--mixbench FOLDER …]

`benchmarks.mixed_galleries` makes the galleries. Each is inserted into Milvus Lite under a FLAT index, whose answers
are exact, and migrated three times: as by default, with `kind="kind"`, a field of the rows, and with `kind="auto"`.
HubnessClient searches each copy at strength 1, and as a user who follows the verdict on the bank does: at its
strength, or raw where it says "leave it alone".

R@1 is the mean of that where the right item is of the query's own kind and that where it is of another one. Intervals
are bootstraps over what queries look for, paired with the default. The plain galleries of one kind come last: "auto"
finds no kinds there. The threshold of "auto", LEAST_PREFERENCE, was chosen on clip_products.

--mixbench: a folder as `benchmarks.mixbench` describes it; such galleries are not saved.

Exits with 1 unless kinds of a field are above the default on nine of the eleven galleries of MIXED, neither they nor
"auto" are more than 0.3 below it on any, and "auto" finds no kinds in plain galleries.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient

from benchmarks.environment import RESULTS, environment, one_thread, save, table
from benchmarks.mixbench import mixbench
from benchmarks.mixed_galleries import BANK, GALLERIES, MIXED, Draws, Mixed
from milvus_hubness import HubnessClient, MilvusStore, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.correction.codec.arrays import unit_directions
from milvus_hubness.jobs.common.kinds import preferred, two_means
from milvus_hubness.jobs.common.plan import Plan
from tests.support.lite import spare_work
from tests.support.real_data import EMBEDDING_TASKS, load_task
from tests.support.servers import lite_uri

WAYS: dict[str, str | None] = {"default": None, "kind": "kind", "auto": "auto"}
"""What `kind` is for each way."""
NAMES = {"kind": "Kinds of a field", "auto": '"auto"'}
"""What a summary calls each way."""
PLAIN = {f"{name}, one kind": name for name in EMBEDDING_TASKS}
"""The galleries of one kind, and their tasks."""
SOURCE = "items"
BATCH = 1_000
AT_ONCE = 500
RESAMPLES = 1_000
CHUNK = 50
LEAST_BETTER, MOST_LOSS = 9, 0.3
CHOSEN_ON = "clip_products"
"""Galleries whose names begin so chose LEAST_PREFERENCE."""

Right = npt.NDArray[np.bool_]


class Searched(NamedTuple):
    """The answers of one migrated copy."""

    first: npt.NDArray[np.int64]
    """(n_queries,) the first item at strength 1."""
    followed: npt.NDArray[np.int64]
    """(n_queries,) the first item for a user who follows the verdict."""
    raw: npt.NDArray[np.int64]
    """(n_queries,) the first item without a correction."""
    facts: dict[str, Any]
    """The verdict, its strength, the agreement ρ and the kinds of the plan."""


def inserted(client: Any, mixed: Mixed, rows: npt.NDArray[np.int64], name: str) -> None:
    """Insert rows of a gallery."""
    for start in range(0, len(rows), BATCH):
        some = rows[start : start + BATCH]
        client.insert(
            name,
            [
                {"id": int(row), "vector": mixed.gallery[row], "kind": str(mixed.kinds[row])}
                for row in some
            ],
        )


def filled(client: MilvusClient, mixed: Mixed) -> None:
    """Make the collection SOURCE of the rows that are there before the migration."""
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=mixed.gallery.shape[1])
    schema.add_field("kind", DataType.VARCHAR, max_length=20)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(SOURCE, schema=schema, index_params=index)
    inserted(client, mixed, np.flatnonzero(~mixed.is_late), SOURCE)
    client.flush(SOURCE)
    client.load_collection(SOURCE)


def first_items(
    client: HubnessClient, name: str, mixed: Mixed, **options: Any
) -> npt.NDArray[np.int64]:
    """Return the first item of each query that is not the query itself, (n_queries,)."""
    items = []
    for start in range(0, len(mixed.query), AT_ONCE):
        some = mixed.query[start : start + AT_ONCE]
        for query, hits in enumerate(client.search(name, data=some, limit=2, **options), start):
            keys = [hit["id"] for hit in hits if hit["id"] != mixed.itself[query]]
            items.append(keys[0])
    return np.array(items, np.int64)


def searched(mixed: Mixed, kind: str | None) -> Searched:
    """Migrate a gallery with kinds of this name, and search the copy."""
    with tempfile.TemporaryDirectory() as folder:
        uri = lite_uri(Path(folder))
        plain = MilvusClient(uri)
        filled(plain, mixed)
        store = MilvusStore(plain)
        # The verdict changes neither the bank nor the method of the copy, only its strength.
        plan = plan_correction(
            store, SOURCE, Recipe(QueryBank(mixed.bank), kind=kind, verdict="warn")
        )
        name = migrate(store, plan, client_ttl=0.0).target

        client = HubnessClient(uri)
        inserted(client, mixed, np.flatnonzero(mixed.is_late), name)
        first = first_items(client, name, mixed, strength=1.0)
        raw = first_items(client, name, mixed, strength=0.0, kinds=0.0)
        followed = first
        if _is_against(plan):
            followed = raw
        elif plan.chosen.strength != 1:
            followed = first_items(client, name, mixed)

        state = store.info(name).state
        assert state is not None
        facts = {
            "verdict": plan.chosen.verdict.verdict if plan.chosen.verdict else None,
            "strength": plan.chosen.strength,
            "agreement": _agreement(state.profile.estimator),
            "kinds": plan.chosen.kinds.facts,
            "remarks": list(plan.chosen.kinds.remarks),
        }
        client.close()
        plain.close()
    return Searched(first, followed, raw, facts)


def _is_against(plan: Plan[Any]) -> bool:
    return plan.chosen.verdict is not None and plan.chosen.verdict.verdict == "leave it alone"


def _agreement(estimator: Any) -> float | None:
    """Return the ρ by which a stored estimator was weakened; None for one in full."""
    if isinstance(estimator, dict):
        if estimator.get("agreement") is not None:
            return float(estimator["agreement"])
        estimator = list(estimator.values())
    if isinstance(estimator, list | tuple):
        values = [_agreement(value) for value in estimator]
        return next((value for value in values if value is not None), None)
    return None


class Sums:
    """Right answers of ways, by whether the right item is of the query's own kind and by what is looked for."""

    def __init__(self) -> None:
        self.rows: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], dict[str, Right]]] = []
        self.shares: dict[str, list[float]] = {}
        self.facts: list[dict[str, Any]] = []

    def add(self, mixed: Mixed, ways: dict[str, Searched]) -> None:
        """Take in the answers of a draw."""
        answers = {"raw": ways["default"].raw}
        for way, found in ways.items():
            answers[way] = found.first
            answers[f"{way}, followed"] = found.followed

        # A query with right rows of both kinds counts as one of its own kind.
        own = np.array(
            [
                (mixed.kinds[right] == kind).any()
                for right, kind in zip(mixed.positives, mixed.query_kinds, strict=True)
            ]
        )
        rights = {}
        for way, items in answers.items():
            rights[way] = np.array(
                [item in right for item, right in zip(items, mixed.positives, strict=True)]
            )
            of_own_kind = mixed.kinds[items] == mixed.query_kinds
            self.shares.setdefault(way, []).append(100 * float(of_own_kind.mean()))
        self.rows.append((mixed.things, own, rights))
        facts = {way: found.facts for way, found in ways.items()}
        self.facts.append({"preference": preference(mixed), **facts})

    def cells(self) -> dict[str, Any]:
        """Return the figures of each way."""
        things = np.concatenate([row[0] for row in self.rows])
        own = np.concatenate([row[1] for row in self.rows])
        sizes = np.zeros((2, things.max() + 1))
        np.add.at(sizes, (own.astype(int), things), 1)

        sums = {}
        for way in self.rows[0][2]:
            values = np.concatenate([row[2][way] for row in self.rows])
            sums[way] = np.zeros_like(sizes)
            np.add.at(sums[way], (own.astype(int), things), 100.0 * values)

        cells: dict[str, Any] = {}
        for way, of_way in sums.items():
            with np.errstate(invalid="ignore"):
                other, same = of_way.sum(axis=1) / sizes.sum(axis=1)
            base = "default, followed" if way.endswith("followed") else "default"
            cells[way] = {
                "own": _number(same),
                "other": _number(other),
                "mean": interval(of_way, sizes),
                "over_default": interval(of_way - sums[base], sizes),
                "first_of_own_kind": float(np.mean(self.shares[way])),
            }
        return {
            "ways": cells,
            "draws": self.facts,
            "right_of_own_kind": 100 * float(own.mean()),
        }


def _number(value: float) -> float | None:
    """Return a number, and None for that of no queries."""
    return float(value) if np.isfinite(value) else None


def interval(sums: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the mean over kinds of sums per query, with its 95% bootstrap interval.

    sums, sizes: (2, n_things), of the queries by kind of their right item. Things are drawn.
    """
    present = sizes.sum(axis=1) > 0
    sums, sizes = sums[present], sizes[present]
    n = sums.shape[1]
    rng = np.random.default_rng(0)
    means = []
    for _ in range(0, RESAMPLES, CHUNK):
        counts = np.stack([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(CHUNK)])
        means.append(((counts @ sums.T) / (counts @ sizes.T)).mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    estimate = (sums.sum(axis=1) / sizes.sum(axis=1)).mean()
    return {"estimate": float(estimate), "low": float(low), "high": float(high)}


def preference(mixed: Mixed) -> float:
    """Return what "auto" looks at: how much queries prefer one of two clusters, in standard deviations."""
    items = unit_directions(mixed.gallery[~mixed.is_late])
    centres, _ = two_means(items[items.any(axis=1)])
    return preferred(centres, unit_directions(QueryBank(mixed.bank).condensed.vectors))


def run(name: str, draws: Iterator[Mixed]) -> dict[str, Any]:
    """Return the figures of a gallery over its draws."""
    sums = Sums()
    for mixed in draws:
        sums.add(mixed, {way: searched(mixed, kind) for way, kind in WAYS.items()})
    result = sums.cells()
    shown = {way: _signed(cell["over_default"]) for way, cell in result["ways"].items()}
    print(name, shown, [draw["auto"]["remarks"] for draw in sums.facts][:1], flush=True)
    return result


def plain(name: str) -> dict[str, Any]:
    """Return what "auto" finds in a gallery of one kind."""
    task = load_task(name)
    n_items = len(task.gallery)
    mixed = Mixed.of(
        task.query,
        task.gallery,
        task.bank[:BANK],
        np.full(n_items, "item"),
        task.positives,
        task.positives,
    )
    with tempfile.TemporaryDirectory() as folder:
        client = MilvusClient(lite_uri(Path(folder)))
        filled(client, mixed)
        store = MilvusStore(client)
        plan = plan_correction(
            store, SOURCE, Recipe(QueryBank(mixed.bank), kind="auto", verdict="skip")
        )
        client.close()
    print(name, plan.chosen.kinds.remarks, flush=True)
    return {
        "kinds": plan.chosen.kinds.facts,
        "remarks": list(plan.chosen.kinds.remarks),
        "preference": preference(mixed),
    }


def _signed(cell: dict[str, float]) -> str:
    return f"{cell['estimate']:+.1f} ({cell['low']:+.1f} … {cell['high']:+.1f})"


def _parts(cell: dict[str, Any]) -> str:
    shown = ["–" if cell[kind] is None else f"{cell[kind]:.1f}" for kind in ("own", "other")]
    return f"{' / '.join(shown)}; {cell['first_of_own_kind']:.0f}%"


def markdown(results: dict[str, Any], of_plain: dict[str, Any]) -> str:
    """Return the tables of all galleries."""
    rows = []
    followed = []
    found = []
    for name, result in results.items():
        ways = result["ways"]
        rows.append(
            [
                name,
                *(_parts(ways[way]) for way in ("raw", "default", "kind", "auto")),
                *(_signed(ways[way]["over_default"]) for way in ("kind", "auto")),
                f"{result['right_of_own_kind']:.0f}%",
            ]
        )
        followed.append(
            [
                name,
                *(
                    f"{ways[f'{way}, followed']['mean']['estimate']:.1f}; {_verdicts(result, way)}"
                    for way in WAYS
                ),
                *(_signed(ways[f"{way}, followed"]["over_default"]) for way in ("kind", "auto")),
            ]
        )
        draws = result["draws"]
        agreements = [draw["default"]["agreement"] for draw in draws]
        found.append(
            [
                name,
                ", ".join(f"{draw['preference']:.1f}" for draw in draws),
                f"{sum(draw['auto']['kinds'] is not None for draw in draws)} of {len(draws)}",
                ", ".join("–" if value is None else f"{value:.2f}" for value in agreements),
            ]
        )
    of_one_kind = [
        [name, f"{cell['preference']:.1f}", "none" if cell["kinds"] is None else "kinds"]
        for name, cell in of_plain.items()
    ]
    ways_head = ["raw", "default", "kinds of a field", "auto"]
    over = ["field over default", "auto over default"]
    return "\n\n".join(
        [
            "R@1 (%) at strength 1 where a right item is of the query's own kind / of another kind; the share of "
            "first answers of the own kind, to compare with the share of queries that have a right item of it. The "
            "mean of both less that of the default, with its 95% interval.",
            table(["gallery", *ways_head, *over, "right of own kind"], rows),
            *(_summary(results, way) for way in ("kind", "auto")),
            "The mean R@1 (%) of who follows the verdict; the verdicts, with the strength of searches.",
            table(["gallery", *ways_head[1:], *over], followed),
            'What "auto" looks at in each draw: how much queries prefer one of two clusters, in standard deviations. '
            "The agreement ρ by which the default is weakened.",
            table(["gallery", "preference", "draws with kinds", "ρ of the default"], found),
            'Galleries of one kind, under "auto".',
            table(["gallery", "preference", "found"], of_one_kind),
        ]
    )


def _summary(results: dict[str, Any], way: str) -> str:
    """Return what a way gains over the default on the galleries of MIXED, in one sentence."""
    over = [results[name]["ways"][way]["over_default"] for name in MIXED if name in results]
    if not over:
        return f"{NAMES[way]}: none of the galleries of one text in two forms was measured."
    gains = [cell["estimate"] for cell in over]
    beyond_chance = sum(cell["low"] > 0 for cell in over)
    return (
        f"{NAMES[way]} over the default, on the {len(over)} galleries of one text in two forms: "
        f"{min(gains):+.1f} to {max(gains):+.1f}, {np.mean(gains):+.1f} in the mean, "
        f"{beyond_chance} beyond chance."
    )


def _verdicts(result: dict[str, Any], way: str) -> str:
    verdicts = sorted(
        {f"{draw[way]['verdict']} {draw[way]['strength']:.2g}" for draw in result["draws"]}
    )
    return ", ".join(verdicts)


def holds(results: dict[str, Any], of_plain: dict[str, Any]) -> bool:
    """Whether the bounds of this benchmark hold for the galleries that were measured."""
    over = {
        way: [
            result["ways"][way]["over_default"]["estimate"]
            for name, result in results.items()
            if name in MIXED
        ]
        for way in ("kind", "auto")
    }
    better = sum(value > 0 for value in over["kind"])
    is_enough = better >= LEAST_BETTER - (len(MIXED) - len(over["kind"]))
    is_near = min(over["kind"] + over["auto"], default=0) >= -MOST_LOSS
    return is_enough and is_near and all(cell["kinds"] is None for cell in of_plain.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "galleries", nargs="*", metavar="gallery", help=", ".join([*GALLERIES, *PLAIN])
    )
    parser.add_argument("--mixbench", nargs="+", type=Path, default=[], metavar="FOLDER")
    options = parser.parse_args()
    one_thread()
    spare_work()
    started = time.monotonic()
    if options.mixbench:
        of_folders: dict[str, Draws] = {
            folder.name: lambda folder=folder: mixbench(folder)  # type: ignore[misc]
            for folder in options.mixbench
        }
        print(markdown({name: run(name, draws()) for name, draws in of_folders.items()}, {}))
        return 0

    every: dict[str, Any] = {}
    every_plain: dict[str, Any] = {}
    text = ""
    for name in options.galleries or [*GALLERIES, *PLAIN]:
        result = run(name, GALLERIES[name]()) if name in GALLERIES else plain(PLAIN[name])
        # Read again: another process may measure other galleries.
        path = RESULTS / "mixed.json"
        former = json.loads(path.read_text()) if path.exists() else {"galleries": {}, "plain": {}}
        every, every_plain = former["galleries"], former["plain"]
        (every if name in GALLERIES else every_plain)[name] = result

        # What was measured before stays, in the order of the galleries.
        every = {name: every[name] for name in GALLERIES if name in every}
        every_plain = {name: every_plain[name] for name in PLAIN if name in every_plain}
        text = markdown(every, every_plain)
        results = {"environment": environment(started), "galleries": every, "plain": every_plain}
        save("mixed", results, text)
    print(text)
    return 0 if holds(every, every_plain) else 1


if __name__ == "__main__":
    sys.exit(main())
