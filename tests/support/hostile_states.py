"""Hostile values of the records that collections carry, and the calls that read them; nothing here knows pytest.

A user who may alter a collection can write anything into its properties. Each mutation is written into the property of
a real Milvus Lite collection, so that every call reads it as it would from a server.
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from pymilvus import AnnSearchRequest, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    Beside,
    Blend,
    HubnessError,
    InvertedSoftmax,
    MigrationOptions,
    QueryBank,
    Recipe,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
)
from milvus_hubness.correction.state import CollectionState, OtherGeneration
from milvus_hubness.jobs.refresh.refit import samples_for_refresh
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling
from milvus_hubness.jobs.store.records import DualWrite, TuningRecord, Verdicts
from milvus_hubness.reports.biased import read_biased
from milvus_hubness.reports.explain import explain_row
from tests.support.aliases import aliased
from tests.support.galleries import plain_collection, vectors
from tests.support.recipes import as_plan, as_recipe

DIM, ITEMS, BANK = 8, 40, 24
SECONDS = 10
"""Time limit of one call."""
LONGEST_MESSAGE = 1_000
NAMES_ALL = re.compile(r"the collection property 'hubness\S*' of 'hostile_\d+\S*'")
PLACES = (
    "vector",
    "vector of L2",
    "beside",
    "profiles",
    "kinds",
    "refreshing",
    "records",
)

Path = tuple[str | int, ...]
Json = Any


class Mutation(NamedTuple):
    """A hostile text of a property, and what was done to the valid one."""

    name: str
    text: str


class Raw(str):
    """A text that stands in the JSON as it is."""


VALUES: dict[str, Any] = {
    "null": None,
    "a text": "x",
    "an empty text": "",
    "a list": [],
    "a list of lists": [[[]]],
    "an object": {},
    "true": True,
    "NaN": Raw("NaN"),
    "Infinity": Raw("Infinity"),
    "-Infinity": Raw("-Infinity"),
    "-1": -1,
    "0": 0,
    "0.5": 0.5,
    "7": 7,
    "20,000": 20_000,
    "1e-320": Raw("1e-320"),
    "2^31": 2**31,
    "10^9": 10**9,
    "2^63": 2**63,
    "1e40": Raw("1e40"),
    "1e308": Raw("1e308"),
    "10^400": Raw("1" + "0" * 400),
    "2^63 as a text": str(2**63),
    "a huge text": "y" * 300_000,
    "a text of control characters": "a\nb\x1b[31m\u202e\x00",
    "deep": Raw("[" * 150 + "]" * 150),
    "very deep": Raw("[" * 50_000 + "]" * 50_000),
    "deep objects": Raw('{"a":' * 3_000 + "1" + "}" * 3_000),
    "a date of long ago": "0001-01-01T00:00:00Z",
    "the last date": "9999-12-31T23:59:59Z",
    "a date without a zone": "2026-01-02T00:00:00",
}


def dumped(value: Json) -> str:
    """Return JSON with the texts of `Raw` as they are."""
    raw: list[Raw] = []

    def marked(part: Json) -> Json:
        if isinstance(part, Raw):
            raw.append(part)
            return f"@raw{len(raw) - 1}@"
        if isinstance(part, dict):
            return {name: marked(item) for name, item in part.items()}
        return [marked(item) for item in part] if isinstance(part, list) else part

    text = json.dumps(marked(value))
    for number, part in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', part)
    return text


def paths(value: Json, path: Path = ()) -> Iterator[Path]:
    """Yield the places of all values within a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in items:
        yield (*path, name)
        yield from paths(item, (*path, name))


def changed(value: Json, path: Path, other: Json) -> Json:
    result = copy.deepcopy(value)
    parent = result
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = other
    return result


def removed(value: Json, path: Path) -> Json:
    result = copy.deepcopy(value)
    parent = result
    for name in path[:-1]:
        parent = parent[name]
    del parent[path[-1]]
    return result


SLOW_TO_PARSE = ("very deep", "deep objects", "10^400")
"""Values that one place stands for: they fail, or not, before the place matters."""


def mutations(text: str) -> Iterator[Mutation]:
    """Yield hostile variants of a record, in a fixed order."""
    value = json.loads(text)
    for number, path in enumerate(paths(value)):
        place = ".".join(map(str, path))
        yield Mutation(f"{place} removed", dumped(removed(value, path)))
        for name, other in VALUES.items():
            if number % 10 and name in SLOW_TO_PARSE:
                continue
            yield Mutation(f"{place} = {name}", dumped(changed(value, path, other)))
    for path in [(), *(path for path in paths(value) if isinstance(at(value, path), dict))]:
        yield Mutation(f"an unknown key in {path}", dumped(changed(value, (*path, "surprise"), 1)))
        huge = changed(value, (*path, "k" * 5_000 + "\n"), 1)
        yield Mutation(f"a huge key in {path}", dumped(huge))
    for name in value:
        yield Mutation(f"{name} twice", text[:-1] + f',"{name}":null}}')
    for name, whole in VALUES.items():
        yield Mutation(f"the whole = {name}", dumped(whole))
    yield Mutation("no JSON", "{")
    yield Mutation("half", text[: len(text) // 2])
    yield Mutation("2 MB of blanks", text[:-1] + " " * 2_000_000 + "}")
    yield Mutation("a newer version", dumped({**value, "version": 2, "novelty": {"a": 1}}))


def at(value: Json, path: Path) -> Json:
    for name in path:
        value = value[name]
    return value


def crossed(text: str) -> Iterator[Mutation]:
    """Yield states whose parts are valid, but do not fit together."""
    value = json.loads(text)
    name, profile = next(iter(value["profiles"].items()))
    at_profile: Path = ("profiles", name)

    def with_profile(**fields: Any) -> Json:
        return changed(value, at_profile, {**profile, **fields})

    nested = {"name": "NNN", "k": 3}
    for _ in range(60):
        nested = {"name": "Blend", "estimators": [nested], "weights": [1.0]}
    estimators: dict[str, Json] = {
        "unknown": {"name": "Nobody"},
        "without a name": {"k": 3},
        "of a class that is none": {"name": "Estimator"},
        "with an unknown parameter": {"name": "NNN", "surprise": 3},
        "with k = 0": {"name": "NNN", "k": 0},
        "with k = 10^9": {"name": "NNN", "k": 10**9},
        "with alpha = NaN": {"name": "NNN", "alpha": Raw("NaN")},
        "with alpha = 1e308": {"name": "NNN", "alpha": Raw("1e308")},
        "with tau = 1e-320": {"name": "InvertedSoftmax", "tau": Raw("1e-320")},
        "with a billion iterations": {
            "name": "Sinkhorn",
            "tau": 0.1,
            "iterations": 10**9,
            "tol": 0.0,
        },
        "with finds = 10^9": {"name": "RelativeNNN", "finds": 10**9, "discount": Raw("1e308")},
        "of another kind": {"name": "DualInvertedSoftmax"},
        "of no parts": {"name": "Blend", "estimators": [], "weights": []},
        "of itself": nested,
        "of parts that are none": {"name": "Blend", "estimators": [3], "weights": [1.0]},
        "with strength NaN": {"name": "NNN", "strength": Raw("NaN")},
        "with agreement = 1e308": {
            "name": "NNN",
            "strength": "agreement",
            "agreement": Raw("1e308"),
        },
        "with lam = 1e308": {"name": "DistributionNormalization", "lam": Raw("1e308")},
    }
    for which, estimator in estimators.items():
        yield Mutation(f"an estimator {which}", dumped(with_profile(estimator=estimator)))
    yield Mutation("the other slot", dumped(with_profile(slot=1 - profile["slot"])))
    yield Mutation(
        "a slot that is none", dumped(with_profile(slot=value["layout"]["slots"]["count"]))
    )
    yield Mutation("an active profile that is none", dumped({**value, "active": "nobody"}))
    yield Mutation("no profiles", dumped({**value, "profiles": {}}))
    many = {f"p{i}": profile for i in range(2_000)}
    yield Mutation(
        "2,000 profiles of the same slots",
        dumped({**value, "profiles": {**value["profiles"], **many}}),
    )
    yield Mutation("another field", dumped({**value, "field": "group"}))
    yield Mutation("a field that is not there", dumped({**value, "field": "nowhere"}))
    yield Mutation("a suffix of another field", dumped({**value, "suffix": "_other"}))
    for metric in ("IP", "COSINE", "L2"):
        yield Mutation(f"metric {metric}", dumped(changed(value, ("layout", "metric"), metric)))
    for dim in (1, 7, 9, 16, 32_000, 32_768, 10**6):
        yield Mutation(f"dimension {dim}", dumped(changed(value, ("layout", "dim"), dim)))
    for slots in (1, 2, 3, 8, 30_000):
        yield Mutation(
            f"{slots} slots", dumped(changed(value, ("layout", "slots", "count"), slots))
        )
    for base64 in ("AAAA", "é", "====", "A" * 400_000):
        for metric in ("IP", "L2"):
            of_metric = changed(value, ("layout", "metric"), metric)
            mean = changed(of_metric, ("layout", "half_squares"), {"mean": base64})
            yield Mutation(f"a mean of {metric} {base64[:9]}", dumped(mean))
        hints = changed(value, ("layout", "locality_hints"), {"directions": base64, "reach": 1.0})
        yield Mutation(f"hints {base64[:9]}", dumped(hints))
    nans = (
        "AADAfwAAwH8AAMB/AADAfwAAwH8AAMB/AADAfwAAwH8A"  # Eight NaN in float32, and a byte of bits.
    )
    as_l2 = changed(changed(value, ("layout", "metric"), "L2"), ("layout", "graph_hint"), None)
    yield Mutation(
        "a mean of NaN", dumped(changed(as_l2, ("layout", "half_squares"), {"mean": nans}))
    )
    for dtype in ("float16", "bfloat16"):
        yield Mutation(f"dtype {dtype}", dumped({**value, "dtype": dtype}))
    reranked = {
        "side_prefix": None,
        "candidates": 10**9,
        "missed": 0.0,
        "allowed": 0.5,
        "queries": 1,
    }
    yield Mutation("10^9 candidates", dumped({**value, "reranking": reranked}))
    in_payloads = {**reranked, "candidates": 50}
    yield Mutation("biases in payloads", dumped({**value, "reranking": in_payloads}))
    for count in (1, 2, 3, 17, 20_000):
        yield Mutation(
            f"{count} kinds", dumped(changed(value, ("layout", "kinds"), {"count": count}))
        )
        values = list(range(count))
        rule = {"field": "modality", "values": values, "direction": "", "threshold": 0.0}
        yield Mutation(f"a rule of {count} kinds", dumped({**value, "kinds": rule}))
    for means in ("", "AAAA", "é", "A" * 300_000):
        of_profile = {"means": means, "shares": [0.5, 0.5]}
        yield Mutation(f"means of kinds {means[:9]}", dumped(with_profile(kinds=of_profile)))
        rule = {"field": "", "values": [], "direction": means, "threshold": 0.0}
        yield Mutation(f"a direction {means[:9]}", dumped({**value, "kinds": rule}))
    yield Mutation(
        "a bank that is not there",
        dumped(with_profile(bank={**profile["bank"], "collection": "nowhere"})),
    )
    yield Mutation("a bank of 10^9", dumped(with_profile(bank={**profile["bank"], "count": 10**9})))
    yield Mutation(
        "another generation", dumped(with_profile(bank={**profile["bank"], "generation": "00ff"}))
    )
    second = {**profile, "slot": 1 - profile["slot"]}
    others = {
        "in the other slot": second,
        "in the slot that searches read": profile,
        "in a third slot": {**profile, "slot": 99},
        "of an estimator that is none": {**second, "estimator": {"name": "X"}},
        "with a mean bias of NaN": {**second, "mean_bias": Raw("NaN")},
        "of a bank that is not there": {
            **second,
            "bank": {**profile["bank"], "collection": "nowhere"},
        },
    }
    for use in ("filling", "returning", "former", "spare"):
        for which, generation in others.items():
            other = {"use": use, "profile": generation}
            yield Mutation(f"a {use} generation {which}", dumped({**value, "other": other}))
    yield Mutation("a gate of 10^9", dumped(with_profile(gate=10**9)))
    yield Mutation("mean bias 3e38", dumped(with_profile(mean_bias=Raw("3e38"))))
    yield Mutation("strength 1e38", dumped(with_profile(strength=Raw("1e38"))))
    constants = {"scale": 2.0**1000, "offset": 1e300}
    scaled = changed(as_l2, ("layout", "half_squares"), constants)
    yield Mutation("a scale of 2^1000", dumped(scaled))


class World:
    """A collection corrected in one bias location, and the means to put it back.

    properties: the valid texts of the properties that are mutated, by name."""

    def __init__(self, backend: Any, place: str) -> None:
        self.backend, self.place = backend, place
        self.plain: MilvusClient = backend.client()
        self.client = backend.hubness_client(policy={"cut_over_seconds": 0.2})
        self.store = backend.store()
        rng = np.random.default_rng(7)
        # Kinds take 30 rows each.
        count = 64 if place == "kinds" else ITEMS
        self.items, self.bank = vectors(rng, count, DIM), QueryBank(vectors(rng, BANK, DIM))
        self.query = vectors(rng, 1, DIM)
        self.properties: dict[str, str] = {}
        self.name = ""
        self.makings = 0
        self.make()

    def make(self) -> None:
        """Correct a new collection."""
        if self.name:
            self.backend.clean()
        name = self.backend.name("hostile")
        metric = "L2" if self.place == "vector of L2" else "COSINE"
        plain_collection(self.plain, name, self.items + 50.0 * (metric == "L2"), metric)
        if self.place == "kinds":
            rows = enumerate(self.items.tolist())
            self.plain.upsert(
                name,
                [
                    {"id": key, "vector": row, "group": 0, "modality": ("image", "text")[key % 2]}
                    for key, row in rows
                ],
            )
        if self.place in ("beside", "refreshing"):
            plan = plan_correction(
                self.store,
                name,
                Recipe(self.bank, estimator=InvertedSoftmax(), verdict="warn"),
                Beside(),
            )
            enable(self.store, plan, client_ttl=0.0)
        else:
            estimator = Blend() if self.place == "vector" else NNN(4)
            options = {"kind": "modality"} if self.place == "kinds" else {}
            plan = plan_correction(
                self.store,
                name,
                **as_plan(self.bank, estimator=estimator, verdict="warn", **options),
            )
            name = migrate(self.store, plan, no_writers=True).target
        self.name = name
        self._complete()
        texts = self.plain.describe_collection(self.name)["properties"]
        self.properties = {key: text for key, text in texts.items() if key.startswith("hubness")}
        self.makings += 1

    def _refresh(self, **options: Any) -> None:
        alias = aliased(self.store, self.name)
        self.name = refresh(self.store, alias, force=True, **as_recipe(**options)).collection
        self.store.drop_alias(alias)

    def _complete(self) -> None:
        """Add what the place asks for beyond a first correction."""
        if self.place == "profiles":
            self._refresh(bank=self.bank, profile="text", estimator=InvertedSoftmax())
        if self.place == "refreshing":
            refresh(self.store, self.name, Recipe(estimator=NNN(5)), force=True)
            state = self.state
            other = OtherGeneration(use="filling", profile=state.other.profile)
            moving = state.model_copy(update={"other": other})
            self.store.write_property(self.name, "hubness", moving)
        if self.place == "records":
            start_sampling(self.store, self.name, rate=0.5)
            tuning = TuningRecord(
                field=self.state.field,
                verdict="apply",
                choice={"name": "NNN", "k": 5},
                strength=0.5,
                reason="tried",
                labelled=False,
                bank_fingerprint=self.bank.fingerprint,
                tuned_at=self.state.profile.refreshed_at,
            )
            self.store.write_property(
                self.name, Verdicts.property_name, Verdicts(records=(tuning,))
            )

    @property
    def state(self) -> CollectionState:
        return next(iter(self.store.info(self.name).states.values()))

    def mutations(self) -> Iterator[tuple[str, Mutation]]:
        """Yield (property, mutation) of all that is mutated here."""
        if self.place != "records":
            for mutation in (
                *mutations(self.properties["hubness"]),
                *crossed(self.properties["hubness"]),
            ):
                yield "hubness", mutation
            return
        # No collection of these names exists: whether a property may name another one is not tested here.
        others = {
            DualWrite.property_name: DualWrite(collection="nowhere").model_dump_json(),
        }
        for name, text in {**self.properties, **others}.items():
            if name != "hubness":
                for mutation in mutations(text):
                    yield name, mutation
        yield "hubness.vector", Mutation("the same field twice", self.properties["hubness"])
        yield "hubness.other", Mutation("the property of another field", self.properties["hubness"])

    def write(self, name: str, text: str | None) -> None:
        if text is None:
            self.plain.drop_collection_properties(self.name, [name])
        else:
            self.plain.alter_collection_properties(self.name, {name: text})

    def put_back(self, name: str) -> None:
        """Put the property back; make the collection again if a call changed more than that."""
        if not self.plain.has_collection(self.name) or "hubness" not in self.properties:
            self.make()
            return
        self.write(name, self.properties.get(name))
        texts = self.plain.describe_collection(self.name)["properties"]
        is_same = {
            key: text for key, text in texts.items() if key.startswith("hubness")
        } == self.properties
        if not is_same or not self.plain.has_collection(self.state.profile.bank.collection):
            self.make()

    def non_finite(self) -> list[Any]:
        """Return keys of rows with a number that is not finite, in the collection and its side collection."""
        found: list[Any] = []
        for name in (self.name, f"{self.name}__bias_a", f"{self.name}__bias_b"):
            if self.plain.has_collection(name):
                rows = self.plain.query(
                    name, filter="id >= 0", output_fields=["*", "biases", "vector"]
                )
                found += [row["id"] for row in rows if not _are_finite(row)]
        return found

    # -- calls ------------------------------------------------------------------------------------------

    def row(self, key: int = 1_000) -> dict[str, Any]:
        return {"id": key, "vector": self.items[3], "group": 1}

    @property
    def calls(self) -> dict[str, Callable[[], Any]]:
        c, n, s = self.client, self.name, self.store
        return {
            "search": lambda: c.search(n, data=self.query, limit=5, output_fields=["vector"]),
            "insert": lambda: c.insert(n, [self.row()]),
            "refresh plan": lambda: refresh(s, n, self.bank, plan=True, client_ttl=0.0),
            "query": lambda: c.query(n, filter="id < 5", output_fields=["*"]),
            "status": lambda: status(s, n),
            "search with raw scores": lambda: c.search(
                n, data=self.query, limit=5, with_raw_score=True
            ),
            "upsert": lambda: c.upsert(n, [self.row(3)]),
            "explain": lambda: explain_row(read_biased(s, n), 3),
            "get": lambda: c.get(n, [1, 2]),
            "refresh": lambda: refresh(s, n, self.bank, force=True, client_ttl=0.0),
            "describe": lambda: c.describe_collection(n),
            "delete": lambda: c.delete(n, ids=[5]),
            "enable plan": lambda: plan_correction(
                s, n, Recipe(self.bank, estimator=NNN(4), verdict="warn"), Beside()
            ),
            "hybrid search": lambda: c.hybrid_search(
                n, [AnnSearchRequest(self.query, "vector", {}, limit=4)] * 2, RRFRanker(), limit=4
            ),
            "migrate plan": lambda: plan_correction(
                s, n, Recipe(self.bank, estimator=NNN(4), verdict="warn")
            ),
            "hubness_state": lambda: c.hubness_state(n),
            "samplings": lambda: list_samplings(s, n),
            "refresh pending": lambda: refresh(s, n, client_ttl=0.0),
            "upsert of a part": lambda: c.upsert(n, [{"id": 4, "group": 3}], partial_update=True),
            "describe index": lambda: c.describe_index(n, "vector"),
            "rollback": lambda: rollback(s, n, options=MigrationOptions(client_ttl=0.0)),
            "search of a profile": lambda: c.search(n, data=self.query, limit=5, profile="default"),
            "disable": lambda: disable(s, n),
            "search iterator": lambda: c.search_iterator(n, data=self.query, batch_size=4).next(),
            "list indexes": lambda: c.list_indexes(n),
            "refresh with samples": lambda: refresh(
                s, n, samples_for_refresh(s, n), client_ttl=0.0
            ),
            "drop": lambda: c.drop_collection(n),
        }


WRITES = {
    "insert",
    "upsert",
    "upsert of a part",
    "refresh",
    "refresh pending",
    "refresh with samples",
}


def _are_finite(row: dict[str, Any]) -> bool:
    numbers = [value for value in row.values() if isinstance(value, float)]
    vectors_of_row = [value for value in row.values() if isinstance(value, list)]
    return all(
        np.isfinite(np.array(values, np.float64)).all() for values in (numbers, *vectors_of_row)
    )


class TooLong(BaseException):
    """A call took longer than SECONDS."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block, in the main thread, after this time."""

    def ring(number: int, frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Outcomes:
    """The number of calls by outcome, and each that was none of those allowed."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    calls: int = 0
    slowest: float = 0.0

    def take(self, where: str, call: Callable[[], Any]) -> bool:
        """Make a call, and return whether it succeeded."""
        self.calls += 1
        succeeded = False
        began = time.perf_counter()
        try:
            with within(SECONDS):
                call()
            self.counts["succeeded"] += 1
            succeeded = True
        except (HubnessError, MilvusException) as error:
            message = str(getattr(error, "message", error))
            kind, lines = type(error).__name__, len(message.splitlines())
            self.counts[kind] += 1
            if isinstance(error, HubnessError) and (lines != 1 or len(message) > LONGEST_MESSAGE):
                self.fault(where, f"{kind} of {lines} lines and {len(message):,} characters")
            elif " is broken" in message and not NAMES_ALL.search(message):
                self.fault(where, f"does not name the property and the collection: {message[:200]}")
        except TooLong:
            self.fault(where, f"no answer in {SECONDS} s")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.fault(where, f"{type(error).__name__}: {str(error)[:200]}")
        self.slowest = max(self.slowest, time.perf_counter() - began)
        return succeeded

    def fault(self, where: str, problem: str) -> None:
        self.counts["FAULT " + problem.split(" of ")[0].split(":")[0]] += 1
        self.faults.append(f"{where}: {problem}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        return f"{self.calls:,} calls, {len(self.faults)} faults, the slowest {self.slowest:.1f} s: {counts}"


def run(world: World, share: float = 1.0, seed: int = 0, per_mutation: int = 1) -> Outcomes:
    """Write mutations into the property and make calls on each; share: of the mutations, drawn at random."""
    outcomes, draw = Outcomes(), random.Random(seed)
    number = draw.randrange(1_000)
    making, texts = world.makings, list(world.mutations())
    for place in range(len(texts)):
        if draw.random() >= share:
            continue
        if making != world.makings:  # The texts name the bank of a collection that is gone.
            making, texts = world.makings, list(world.mutations())
        name, mutation = texts[place]
        try:
            world.write(name, mutation.text)
        except MilvusException:  # The database takes no such text.
            outcomes.counts["not written"] += 1
            continue
        for _ in range(per_mutation):
            calls = world.calls
            call = list(calls)[number % len(calls)]
            number += 1
            where = f"{world.place}, {call}, {mutation.name}"
            if (
                outcomes.take(where, calls[call])
                and call in WRITES
                and (keys := world.non_finite())
            ):
                outcomes.fault(where, f"stored NaN: in rows {keys[:5]}")
            world.client.close()
            world.client = world.backend.hubness_client(policy={"cut_over_seconds": 0.2})
        world.put_back(name)
    return outcomes
