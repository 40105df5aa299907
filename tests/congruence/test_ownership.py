"""Properties that name collections of somebody else: nothing there is read, written, deleted, truncated or dropped.

A stranger may change the properties of `public`. Each of its properties that names a collection names `private` or one
of the helper collections of `private` in turn, and then each call is made that would obey it.
"""

import json
import logging

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, MilvusException, RRFRanker

from milvus_hubness import (
    NNN,
    Beside,
    HubnessError,
    NotCorrected,
    QueryBank,
    Recipe,
    StateError,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.common.adopt import adopt
from milvus_hubness.jobs.refresh.sampling import start_sampling, stop_sampling
from milvus_hubness.jobs.refresh.status import status
from milvus_hubness.jobs.store.ownership import (
    QUERY_SAMPLES_PROPERTY,
    SIDE_PROPERTY,
    CollectionId,
)
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    SAMPLINGS_PROPERTY,
    DualWrite,
    Samplings,
)
from milvus_hubness.serve.config_file import ConfigFile
from milvus_hubness.serve.service import Service
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, K = 8, 30, 4

ON_SERVERS = {
    "named": [
        "a required copy",
        "biases, a helper",
        "forged biases",
        "samples, a helper",
        "a bank, a helper",
    ],
    "call": [
        "delete by filter",
        "upsert",
        "search",
        "drop",
        "disable",
        "bank --off",
        "refresh with a bank",
    ],
}
"""On servers collections have numbers, by which a helper points back."""


def bank_of(seed):
    return QueryBank(vectors(np.random.default_rng(seed), 20, DIM))


class Enabled:
    """A collection whose biases are in a side collection and whose queries are sampled."""

    def __init__(self, backend, stem, seed):
        # A state names side collections by what comes before these endings.
        self.backend, self.name = backend, f"{backend.name(stem)}_a"
        backend.made.append(self.name)
        self.store, self.plain = backend.store(), backend.client()
        plain_collection(
            self.plain, self.name, vectors(np.random.default_rng(seed), ITEMS, DIM), "IP"
        )
        enable(
            self.store,
            plan_correction(
                self.store, self.name, Recipe(bank_of(seed), estimator=NNN(K)), Beside()
            ),
        )
        start_sampling(self.store, self.name, rate=1.0)
        self.properties = dict(self.plain.describe_collection(self.name)["properties"])
        self.bank, self.side = f"{self.name}__bank", f"{self.name}__bias_a"
        self.samples = f"{self.name}__query_samples_vector"

    def described(self, **changes):
        """The state with other values."""
        return json.dumps({**json.loads(self.properties["hubness"]), **changes})


class World:
    """`private`, with everything that belongs to it, and `public`, whose properties a stranger has written."""

    def __init__(self, backend, folder):
        self.backend, self.folder = backend, folder
        self.private = Enabled(backend, "private", 1)
        self.plain = backend.client()
        # Each of these could take what public's clients write: of the stranger's making, pointing back to public.
        self.forged = [f"{backend.name('forged')}_a" for _ in range(2)]
        backend.made += self.forged
        self.make_public()
        self.watched = [
            self.private.name,
            self.private.bank,
            self.private.side,
            self.private.samples,
        ]
        self.watched += self.forged
        self.before = self.held()

    def make_public(self):
        self.public = Enabled(self.backend, "public", 2)
        self.rows = vectors(np.random.default_rng(5), 3, DIM)
        owner = self.public.store.info(self.public.name).collection_id.model_dump_json()
        markers = dict.fromkeys((SIDE_PROPERTY, QUERY_SAMPLES_PROPERTY), owner)
        for name in self.forged:
            if not self.plain.has_collection(name):
                plain_collection(
                    self.plain, name, vectors(np.random.default_rng(7), ITEMS, DIM), "IP"
                )
            self.plain.alter_collection_properties(
                name, {**markers, "hubness": self.public.properties["hubness"]}
            )

    def arm(self, properties):
        """Give public these properties, however the last call left it."""
        whole = [self.public.name, self.public.bank, self.public.side, self.public.samples]
        if not all(map(self.plain.has_collection, whole)):
            if self.plain.has_collection(self.public.name):
                self.plain.drop_collection(self.public.name)
            self.make_public()
        cleared = dict.fromkeys(self.plain.describe_collection(self.public.name)["properties"], "")
        ours = {name: text for name, text in cleared.items() if name.startswith("hubness")}
        self.plain.alter_collection_properties(
            self.public.name, {**ours, **self.public.properties, **properties(self)}
        )

    def held(self):
        held = {}
        for name in self.watched:
            described = self.plain.describe_collection(name)
            self.plain.load_collection(name)
            key = next(field["name"] for field in described["fields"] if field.get("is_primary"))
            rows = self.plain.query(
                name, filter="", output_fields=["*"], limit=1_000, consistency_level="Strong"
            )
            shown = {
                field: value
                for field, value in described["properties"].items()
                if name not in self.forged
            }
            held[name] = shown, sorted((repr(row[key]), repr(sorted(row.items()))) for row in rows)
        return held


@pytest.fixture(scope="module")
def world(shared_backend, tmp_path_factory):
    return World(shared_backend, tmp_path_factory.mktemp("ownership"))


def dual_write(name, **options):
    return {DUAL_WRITE_PROPERTY: DualWrite(collection=name, **options).model_dump_json()}


def side(world, name):
    base = name.removesuffix("_a")
    assert base != name
    reranking = json.loads(world.public.properties["hubness"])["reranking"]
    return {"hubness": world.public.described(reranking={**reranking, "side_prefix": base})}


def samples(world, name):
    own = Samplings.model_validate_json(world.public.properties[SAMPLINGS_PROPERTY])
    [sampling] = own.fields
    stolen = sampling.model_copy(update={"samples_collection": name})
    return {SAMPLINGS_PROPERTY: Samplings(fields=(stolen,)).model_dump_json()}


def banked(world, name):
    profiles = json.loads(world.public.properties["hubness"])["profiles"]
    for profile in profiles.values():
        profile["bank"]["collection"] = name
    return {"hubness": world.public.described(profiles=profiles)}


PROPERTIES = {
    "a copy": lambda w: dual_write(w.private.name),
    "a required copy": lambda w: dual_write(w.private.name, required=True),
    "a copy, a helper": lambda w: dual_write(w.private.side, required=True),
    "a forged copy": lambda w: dual_write(w.forged[0], required=True),
    "biases": lambda w: side(w, w.private.name),
    "biases, a helper": lambda w: side(w, w.private.side),
    "forged biases": lambda w: side(w, w.forged[0]),
    "samples": lambda w: samples(w, w.private.name),
    "samples, a helper": lambda w: samples(w, w.private.samples),
    "forged samples": lambda w: samples(w, w.forged[0]),
    "a bank": lambda w: banked(w, w.private.name),
    "a bank, a helper": lambda w: banked(w, w.private.bank),
    "a forged bank": lambda w: banked(w, w.forged[0]),
}


def rows_of(world):
    return [{"id": i, "vector": row, "group": 1} for i, row in enumerate(world.rows)]


def with_client(call):
    def run(world):
        client = world.backend.hubness_client()
        try:
            call(client, world.public.name, world)
        finally:
            client.close()  # writes the samples that wait

    return run


def with_store(call):
    return lambda world: call(world.backend.store(), world.public.name)


def hybrid(client, name, world):
    requests = [AnnSearchRequest([row], "vector", {}, 3) for row in world.rows[:2]]
    client.hybrid_search(name, requests, RRFRanker(), limit=3)


def serve_once(world):
    text = f'[server]\nuri = "http://127.0.0.1:9"\n[[collection]]\nname = "{world.public.name}"\n'
    path = world.folder / "hubness.toml"
    path.write_text(text)
    Service(ConfigFile(path), "lite", world.backend.store, []).once()


def migrated(store, name):
    migrate(
        store, plan_correction(store, name, Recipe(bank_of(3), estimator=NNN(K))), no_writers=True
    )


CALLS = {
    "insert": with_client(
        lambda c, n, w: c.insert(n, [{**row, "id": row["id"] + 500} for row in rows_of(w)])
    ),
    "upsert": with_client(lambda c, n, w: c.upsert(n, rows_of(w))),
    "delete by ids": with_client(lambda c, n, w: c.delete(n, ids=[1, 2])),
    "delete by filter": with_client(lambda c, n, w: c.delete(n, filter="id >= 3 and id < 9")),
    "search": with_client(lambda c, n, w: c.search(n, data=list(w.rows), limit=3)),
    "hybrid search": with_client(hybrid),
    "truncate": with_client(lambda c, n, w: c.truncate_collection(n)),
    "rename": with_client(lambda c, n, w: c.rename_collection(n, f"{n}_renamed")),
    "drop": with_client(lambda c, n, w: c.drop_collection(n)),
    "refresh": with_store(lambda s, n: refresh(s, n)),
    "refresh with a bank": with_store(lambda s, n: refresh(s, n, bank_of(6), force=True)),
    "disable": with_store(lambda s, n: disable(s, n)),
    "bank --off": with_store(lambda s, n: stop_sampling(s, n)),
    "migrate": with_store(migrated),
    "adopt": with_store(lambda s, n: adopt(s, n, renamed_from="private")),
}


def cases():
    """Each property × each call; most of them take their time in make test-long."""
    for i, named in enumerate(PROPERTIES):
        for j, call in enumerate(CALLS):
            marks = [] if (i + j) % 4 == 0 else [pytest.mark.long]
            yield pytest.param(named, call, marks=marks)


@pytest.mark.parametrize(("named", "call"), cases())
def test_a_property_that_names_another_collection_harms_nothing(world, named, call, caplog):
    world.arm(PROPERTIES[named])
    refused = ""
    with caplog.at_level(logging.WARNING, "milvus_hubness"):
        try:
            CALLS[call](world)
        except (HubnessError, MilvusException) as error:
            refused = str(error)
    assert "\n" not in refused
    assert world.held() == world.before


REFUSED = [
    ("a copy", "delete by filter", "'hubness_dual_write' of {public} names {private}"),
    ("a required copy", "insert", "'hubness_dual_write' of {public} names {private}"),
    ("biases", "upsert", "'hubness' of {public} names {private}"),
    ("biases", "search", "'hubness' of {public} names {private}"),
    ("samples", "search", "'hubness_samplings' of {public} names {private}"),
    ("biases", "refresh", "'hubness' of {public} names {private}"),
    ("a bank", "refresh with a bank", "'hubness' of {public} names the bank {private}"),
    ("a bank", "insert", "'hubness' of {public} names the bank {private}"),
    ("a bank", "migrate", "'hubness' of {public} names the bank {private}"),
    ("a bank, a helper", "upsert", "'hubness' of {public} names the bank {bank}"),
]


@pytest.mark.parametrize(("named", "call", "line"), REFUSED)
def test_what_is_not_obeyed_is_said_in_one_line_that_names_the_property(
    world, named, call, line, caplog
):
    world.arm(PROPERTIES[named])
    said = []
    with caplog.at_level(logging.WARNING, "milvus_hubness"):
        try:
            CALLS[call](world)
        except (HubnessError, MilvusException) as error:
            said.append(str(error))
    said += [record.getMessage() for record in caplog.records]
    wanted = line.format(
        public=repr(world.public.name),
        private=repr(world.private.name),
        bank=repr(world.private.bank),
    )
    assert any(wanted in message and "\n" not in message for message in said), said


# -- renames --------------------------------------------------------------------------------------------------


def first_ten(client, name, queries):
    hits = client.search(name, data=list(queries), limit=10)
    return [[(hit["id"], round(hit["distance"], 4)) for hit in answer] for answer in hits]


@pytest.fixture(params=["HubnessClient", "a plain client"])
def renamed(request, backend, caplog):
    """A collection with a side collection under another name, and its answers under the former one."""
    enabled = Enabled(backend, "renamed", 11)
    queries = vectors(np.random.default_rng(12), 4, DIM)
    client = backend.hubness_client()
    before = first_ten(client, enabled.name, queries)
    former, now = enabled.name, backend.name("now")
    if request.param == "HubnessClient":
        client.rename_collection(former, now)
        client.load_collection(now)
    else:
        enabled.plain.rename_collection(former, now)
        enabled.plain.load_collection(now)
        with pytest.raises(StateError, match=f"milvus-hubness adopt {now} --renamed-from"):
            client.search(now, data=list(queries), limit=10)
        adopted = adopt(enabled.store, now, renamed_from=former)
        assert adopted == sorted(
            [enabled.bank, enabled.side, f"{enabled.name}__bias_b", enabled.samples]
        )
        [line] = [each for each in caplog.messages if "Z adopted " in each]
        assert f"adopted {now!r} renamed_from={former!r} helpers={adopted!r} user=" in line
    return enabled, client, former, now, queries, before


def test_a_renamed_collection_keeps_its_biases_and_its_bank(renamed):
    enabled, client, _, now, queries, before = renamed
    assert first_ten(client, now, queries) == before
    client.upsert(now, [{"id": 500, "vector": queries[0] * 2, "group": 1}])
    assert 500 in [row["id"] for row in enabled.plain.query(enabled.side, filter="id == 500")]
    assert refresh(enabled.store, now, bank_of(13), force=True).action == "full"
    assert stop_sampling(enabled.store, now) is not None
    assert not enabled.store.exists(enabled.samples)
    client.drop_collection(now)
    assert not enabled.store.exists(enabled.side)
    assert not enabled.store.exists(enabled.bank)
    assert not enabled.store.listed_helpers(CollectionId(name=now))


def test_a_collection_that_takes_a_former_name_shares_nothing(renamed):
    """The pattern of a new edition: the old one is renamed away, and its name goes to a new one."""
    enabled, client, former, now, queries, before = renamed
    store, plain = enabled.store, enabled.plain
    plain_collection(plain, former, vectors(np.random.default_rng(14), ITEMS, DIM), "IP")
    plan = plan_correction(store, former, Recipe(bank_of(15), estimator=NNN(K)), Beside())
    enabled.backend.made += plan.body.sides
    assert not {*plan.body.sides} & {enabled.side, enabled.samples}
    enable(store, plan)
    of_the_new = first_ten(client, former, queries)
    assert first_ten(client, now, queries) == before
    client.upsert(former, [{"id": 0, "vector": queries[1] * 3, "group": 1}])
    assert first_ten(client, now, queries) == before
    assert status(store, now).pending == 0
    disable(store, former)
    assert first_ten(client, now, queries) == before
    client.drop_collection(former)
    assert first_ten(client, now, queries) == before
    assert of_the_new != before


def test_nobody_adopts_what_belongs_to_another(world):
    world.arm(PROPERTIES["biases, a helper"])
    store, name = world.backend.store(), world.public.name
    with pytest.raises(StateError, match="is no helper collection of"):
        adopt(store, name, renamed_from=world.private.name)
    with pytest.raises(NotCorrected, match="it has no helper collections to adopt"):
        adopt(store, world.private.bank, renamed_from="x")
    assert world.held() == world.before


@pytest.mark.parametrize("dropped", ["samples", "side"])
def test_a_collection_that_gets_the_name_of_a_helper_meanwhile_is_not_dropped(
    lite, monkeypatch, dropped
):
    """A job checks what it drops under a name that nobody else knows."""
    owner, rows = Enabled(lite, "owner", 1), vectors(np.random.default_rng(6), ITEMS, DIM)
    stranger = lite.name("stranger")
    plain_collection(owner.plain, stranger, rows, "IP")
    helper = getattr(owner, dropped)
    write_property = type(owner.store).write_property

    def renaming(self, collection, name, value):
        written = write_property(self, collection, name, value)
        if value is None and collection == owner.name:
            owner.plain.rename_collection(helper, f"{helper}_away")
            owner.plain.rename_collection(stranger, helper)
        return written

    monkeypatch.setattr(type(owner.store), "write_property", renaming)
    with pytest.raises(StateError, match=f"names {helper!r}, which is no helper collection"):
        (stop_sampling if dropped == "samples" else disable)(owner.store, owner.name)
    lite.made += [helper, f"{helper}_away"]
    owner.plain.load_collection(helper)
    assert len(owner.plain.query(helper, filter="id >= 0", limit=ITEMS + 1)) == ITEMS
