"""Kinds of items in Milvus: copies, writes, refreshes and their reversal, with a float64 oracle."""

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, RRFRanker, WeightedRanker

from milvus_hubness import (
    NNN,
    CannotMigrate,
    Copy,
    InvalidInput,
    InvalidParameter,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
)
from tests.support.aliases import aliased
from tests.support.galleries import plain_collection, single_queries, vectors
from tests.support.recipes import as_plan, as_recipe

ON_SERVERS = {"lasting": ["COSINE"]}

DIM, ITEMS, QUERIES, K, ALPHA = 10, 150, 6, 8, 0.75
NAMES = ["image", "text"]


def unit(rows):
    rows = rows.astype(float)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Mixed:
    """A gallery of images and texts, which lie apart, some rows of neither; queries lie near the texts."""

    def __init__(self, backend, metric, dim=DIM):
        rng = np.random.default_rng(12)
        self.backend, self.metric = backend, metric
        gap = 1.5 * rng.normal(size=dim) / np.sqrt(dim)
        numbers = rng.permutation(np.r_[np.zeros(70, int), np.ones(70, int), np.full(10, -1)])
        items = vectors(rng, ITEMS, dim) + np.outer(numbers == 1, gap).astype(np.float32)
        self.items = dict(enumerate(items))
        self.kinds = {i: [*NAMES, None][number] for i, number in enumerate(numbers)}
        self.queries = vectors(rng, QUERIES, dim) + np.float32(gap)
        self.bank, self.other_bank = (vectors(rng, n, dim) + np.float32(gap) for n in (90, 110))
        self.source = self.name = backend.name("mixed")
        self.plain = backend.client()
        plain_collection(self.plain, self.source, items, metric)
        self.plain.upsert(self.source, [self.row(i) for i in self.items])
        self.store = backend.store()
        self.client = backend.hubness_client()

    def row(self, key):
        row = {"id": key, "vector": self.items[key], "group": key % 3}
        return row if self.kinds[key] is None else {**row, "modality": self.kinds[key]}

    def correct(self, **options):
        options = {"estimator": NNN(K, ALPHA), "kind": "modality", **options}
        plan = plan_correction(
            self.store, self.source, **as_plan(single_queries(self.bank), **options)
        )
        target = migrate(self.store, plan).target
        self.name = plan.body.request.alias or aliased(self.store, target)
        return plan

    @property
    def state(self):
        return self.store.info(self.name).state

    def scores(self, bank=None, *, strength=1.0, kinds=1.0, profile=None):
        """{key: (m,) scores} in float64: relative to the means of the state, less the biases of that similarity."""
        state = self.state
        means = state.kinds_of(state.profile_of(profile))
        q, r = self.queries, np.array(list(self.items.values()))
        b = self.bank if bank is None else bank
        if self.metric == "COSINE":
            q, r, b = unit(q), unit(r), unit(b)
        numbers = [NAMES.index(kind) if kind else -1 for kind in self.kinds.values()]
        of_rows = np.vstack([means.of_kinds, means.overall]).astype(float)[numbers]
        mean_query, overall = means.mean_query.astype(float), means.overall.astype(float)

        similar = (b.astype(float) - mean_query) @ (r.astype(float) - of_rows).T
        biases = ALPHA * np.sort(similar, axis=0)[-K:].mean(axis=0)
        biases -= state.profile_of(profile).mean_bias
        asked = q.astype(float) - kinds * mean_query
        scores = asked @ r.T - kinds * asked @ (of_rows - overall).T + kinds * mean_query @ overall
        return dict(zip(self.items, (scores - strength * biases).T, strict=True))

    def assert_found(self, bank=None, **options):
        wanted = self.scores(bank, **options)
        options.setdefault("profile", None)
        answers = self.client.search(
            self.name, list(self.queries), limit=25, with_raw_score=True, **options
        )
        keys = list(self.items)
        similar = self.scores(bank, strength=0, kinds=0)
        for number, hits in enumerate(answers):
            scores = {key: wanted[key][number] for key in keys}
            best = sorted(keys, key=lambda key: -scores[key])[:25]
            np.testing.assert_allclose(hits.distances, [scores[key] for key in best], atol=4e-5)
            for hit in hits:
                assert hit["distance"] == pytest.approx(scores[hit["id"]], abs=4e-5)
                assert hit["raw_score"] == pytest.approx(similar[hit["id"]][number], abs=4e-5)


@pytest.fixture(scope="module", params=["COSINE", "IP"])
def lasting(shared_backend, request):
    """(collection, plan of its correction) for the tests that write no row of it."""
    mixed = Mixed(shared_backend, request.param)
    return mixed, mixed.correct()


under_cosine = pytest.mark.parametrize("lasting", ["COSINE"], indirect=True)


@pytest.mark.parametrize(
    "options", [{}, {"strength": 0.0}, {"kinds": 0}, {"strength": 0.4}, {"kinds": 0.5}]
)
def test_a_copy_finds_by_the_scores_relative_to_the_means(lasting, options):
    mixed, plan = lasting
    assert plan.to_dict()["kinds"]["counts"] == {"image": 70, "text": 70}
    assert any("10 rows have no kind" in remark for remark in plan.remarks)
    assert status(mixed.store, mixed.name).kinds["shares"] == {"image": 0.5, "text": 0.5}
    mixed.assert_found(**options)


def test_without_strength_and_kinds_the_ranking_is_the_raw_one(lasting):
    mixed, _ = lasting
    raw = mixed.plain.search(mixed.source, list(mixed.queries), limit=40)
    ours = mixed.client.search(mixed.name, list(mixed.queries), limit=40, strength=0, kinds=0)
    assert [hits.ids for hits in ours] == [hits.ids for hits in raw]
    for hits, others in zip(ours, raw, strict=True):
        np.testing.assert_allclose(hits.distances, others.distances, atol=2e-6)


@pytest.mark.lite_only
@under_cosine
def test_both_kinds_are_found_where_queries_prefer_one(lasting):
    mixed, _ = lasting

    def images(**options):
        hits = mixed.client.search(mixed.name, list(mixed.queries), limit=10, **options)
        return np.mean([mixed.kinds[hit["id"]] == "image" for found in hits for hit in found])

    assert images(strength=0, kinds=0) < 0.15
    assert 0.3 < images() < 0.7


@pytest.mark.lite_only
def test_written_rows_get_their_kind(backend):
    mixed = Mixed(backend, "IP")
    mixed.correct()
    mixed.assert_found()
    rng = np.random.default_rng(3)
    for key, kind in {3: "text", 7: None, 200: "image", 201: "audio", 202: None}.items():
        mixed.items[key] = vectors(rng, 1, DIM)[0]
        mixed.kinds[key] = kind
    written = [mixed.row(key) for key in (3, 7, 200, 202)]
    mixed.client.upsert(mixed.name, [*written, {**mixed.row(202), "id": 201, "modality": "audio"}])
    mixed.items[201] = mixed.items[202]
    mixed.kinds[201] = None
    mixed.assert_found()

    # The values that a partial update leaves out are those of the row.
    mixed.items[200] = vectors(rng, 1, DIM)[0]
    mixed.client.upsert(mixed.name, [{"id": 200, "vector": mixed.items[200]}], partial_update=True)
    mixed.assert_found()


@pytest.mark.lite_only
def test_rows_that_wait_for_biases_and_strangers_rows_are_filled(backend):
    mixed = Mixed(backend, "COSINE")
    mixed.correct()
    mixed.items[300] = mixed.items[0] + 0.1
    mixed.kinds[300] = "image"
    mixed.client.upsert(mixed.name, [mixed.row(300)], bias="pending")
    assert refresh(mixed.store, mixed.name, client_ttl=0, force=True).action == "full"
    mixed.assert_found()

    # Its owner changes the kind of a row, and nothing else, by another client.
    mixed.kinds[5] = "image" if mixed.kinds[5] != "image" else "text"
    mixed.plain.upsert(mixed.name, [{"id": 5, "modality": mixed.kinds[5]}], partial_update=True)
    assert refresh(mixed.store, mixed.name, client_ttl=0, force=True).action == "full"
    mixed.assert_found()


@pytest.mark.lite_only
def test_a_refresh_renews_the_means_and_is_taken_back(backend):
    mixed = Mixed(backend, "COSINE")
    mixed.correct()
    former = mixed.state.profile.kinds
    shifted = mixed.other_bank + np.float32(1)
    result = refresh(mixed.store, mixed.name, single_queries(shifted), client_ttl=0, force=True)
    assert result.action == "full"
    assert mixed.state.profile.kinds != former
    mixed.assert_found(shifted)

    rollback(mixed.store, mixed.name)
    assert mixed.state.profile.kinds == former
    mixed.assert_found()


def read_by(client, name, keys):
    """The user's vectors, {key: (d,)} of each way to read them; no hidden field is shown."""
    where = f"id in {sorted(keys)}"
    answers = {
        "query": client.query(name, where, output_fields=["vector"]),
        "all fields": client.query(name, where, output_fields=["*"]),
        "get": client.get(name, ids=sorted(keys)),
    }
    data = [np.ones(DIM, np.float32)]
    for fields in (["vector"], ["*"], ["modality", "vector"]):
        options = {"limit": len(keys), "filter": where, "output_fields": fields}
        [hits] = client.search(name, data, **options)
        answers[f"search for {fields}"] = [{"id": hit["id"], **hit["entity"]} for hit in hits]
    iterator = client.query_iterator(name, 40, filter=where, output_fields=["vector"])
    answers["iterator"] = [row for page in iter(iterator.next, []) for row in page]
    for rows in answers.values():
        assert not {field for row in rows for field in row if field.startswith("hubness")}
    return {
        way: {row["id"]: np.array(row["vector"], np.float32) for row in rows}
        for way, rows in answers.items()
    }


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_rows_of_all_kinds_are_read_back_to_the_last_place(backend, metric):
    """Numbers far smaller than those of the offset are rounded in the stored vector."""
    mixed = Mixed(backend, metric)
    rng = np.random.default_rng(9)
    for key, item in mixed.items.items():
        item *= (10.0 ** rng.integers(-12, 1, DIM)).astype(np.float32)
        item[key % DIM] = 1.0
        if metric == "COSINE":
            mixed.items[key] = unit(item[None])[0].astype(np.float32)
    mixed.plain.upsert(mixed.source, [mixed.row(key) for key in mixed.items])
    mixed.correct()
    state = mixed.state
    assert state.layout.kinds.offsets
    batch = mixed.store.get(mixed.name, list(mixed.items), "vector")
    still = [
        key
        for key, stored in zip(batch.keys, batch.vectors, strict=True)
        if np.array_equal(stored[:DIM], mixed.items[key])
    ]
    assert 30 < len(still) < len(mixed.items) - 30

    def assert_read(units=1, exact=()):
        offsets = np.abs(state.layout.kinds.offsets_in(state.dim)).max(axis=0)
        sizes = {key: np.abs(item) + offsets for key, item in mixed.items.items()}
        for way, read in read_by(mixed.client, mixed.name, mixed.items).items():
            assert read.keys() == mixed.items.keys(), way
            for key, item in mixed.items.items():
                allowed = 0.0 if key in exact else units * 2.0**-23 * sizes[key]
                assert (np.abs(read[key] - item) <= allowed).all(), (way, key)

    # Nothing is subtracted from rows of the kind that stays where it is.
    assert_read(exact=still)
    # A write of another kind, of another vector, of a new row, and of a kind alone by a stranger.
    mixed.kinds |= {1: "image", 2: "text", 3: None, 160: "text"}
    mixed.items |= {key: mixed.items[key + 20].copy() for key in (2, 3)}
    mixed.items[160] = mixed.items[17].copy()
    mixed.client.upsert(mixed.name, [mixed.row(key) for key in (1, 2, 3, 160)])
    assert_read()
    mixed.assert_found()

    if backend.is_lite:
        for key in (5, 6, 7, 8):
            mixed.kinds[key] = "image" if mixed.kinds[key] != "image" else "text"
            changed = [{"id": key, "modality": mixed.kinds[key]}]
            mixed.plain.upsert(mixed.name, changed, partial_update=True)
        assert_read()
    else:
        mixed.kinds[5] = None
        mixed.client.upsert(mixed.name, [mixed.row(5)])
    shifted = mixed.other_bank + np.float32(1)
    options = {"bank": single_queries(shifted), "client_ttl": 0, "force": True}
    assert refresh(mixed.store, mixed.name, **as_recipe(**options)).action == "full"
    # Rows that a stranger gave another kind are rounded once more.
    assert_read(units=2)
    mixed.assert_found(shifted)


@pytest.mark.lite_only
@under_cosine
def test_an_index_has_the_kinds_at_one_place(lasting):
    """The mean of the kind with the longer one lies where that of the other does."""
    mixed, _ = lasting
    batch = mixed.store.get(mixed.name, list(mixed.items), "vector")
    kinds = np.array([mixed.kinds[key] for key in batch.keys], object)
    of_users = unit(np.array([mixed.items[key] for key in batch.keys]))
    apart, stored = (
        np.linalg.norm(np.subtract(*(rows[kinds == name].mean(axis=0) for name in NAMES)))
        for rows in (of_users, batch.vectors[:, :DIM])
    )
    assert apart > 0.5
    assert stored < 0.03


@pytest.mark.lite_only
def test_a_copy_that_a_refresh_makes_is_read_back_as_before(backend):
    mixed = Mixed(backend, "IP")
    for item in mixed.items.values():
        item[:4] *= np.float32(1e-9)
    mixed.plain.upsert(mixed.source, [mixed.row(key) for key in mixed.items])
    mixed.correct(alias=backend.name("live"))
    mixed.kinds[5] = "image" if mixed.kinds[5] != "image" else "text"
    mixed.client.upsert(mixed.name, [mixed.row(5)])
    before = read_by(mixed.client, mixed.name, mixed.items)["get"]
    result = refresh(mixed.store, mixed.name, client_ttl=0, force=True)
    assert result.action == "full"
    # Rows that keep their kind and their layout are copied with every bit.
    for read in read_by(mixed.client, mixed.name, mixed.items).values():
        for key, vector in read.items():
            np.testing.assert_array_equal(vector, before[key])
    mixed.assert_found()


@pytest.mark.lite_only
def test_a_copy_has_the_kinds_and_a_rollback_the_former_ones(backend):
    mixed = Mixed(backend, "IP")
    mixed.correct(alias=backend.name("live"))
    result = refresh(
        mixed.store, mixed.name, single_queries(mixed.other_bank), client_ttl=0, force=True
    )
    assert result.action == "full"
    mixed.assert_found(mixed.other_bank)
    rollback(mixed.store, mixed.name)
    mixed.assert_found()


@pytest.mark.lite_only
def test_a_rolled_back_copy_leaves_the_source_as_it_was(backend):
    mixed = Mixed(backend, "COSINE")
    before = mixed.plain.query(mixed.source, "id >= 0", output_fields=["*"])
    alias = backend.name("live")
    mixed.plain.create_alias(mixed.source, alias)
    mixed.correct(alias=alias)
    mixed.client.upsert(alias, [{**mixed.row(1), "modality": "text"}])
    rollback(mixed.store, alias)
    after = mixed.plain.query(alias, "id >= 0", output_fields=["*"])
    by_key = {row["id"]: row for row in after}
    assert by_key[1].pop("modality") == "text"
    for row in before:
        if row["id"] == 1:
            row.pop("modality", None)
        assert by_key[row["id"]] == row


@pytest.mark.lite_only
def test_a_second_profile_has_means_of_its_own_bank(backend):
    mixed = Mixed(backend, "COSINE")
    mixed.correct()
    shifted = single_queries(mixed.other_bank - np.float32(1))
    refresh(
        mixed.store,
        mixed.name,
        Recipe(shifted, estimator=NNN(K, ALPHA), verdict="skip"),
        profile="other",
        client_ttl=0,
    )
    mixed.assert_found()
    mixed.assert_found(shifted.vectors, profile="other")


@pytest.mark.lite_only
def test_a_profile_for_whose_means_there_is_no_room_is_refused(backend):
    """A later refresh records the means of all profiles twice, and would not fit the ledger."""
    mixed = Mixed(backend, "COSINE", dim=2_600)
    mixed.correct()
    other = Recipe(single_queries(mixed.other_bank), estimator=NNN(K, ALPHA), verdict="skip")
    with pytest.raises(InvalidInput, match="have 15,600 numbers in the means of 2 profiles"):
        refresh(mixed.store, mixed.name, other, profile="other", client_ttl=0)
    assert refresh(mixed.store, mixed.name, other, client_ttl=0).action == "full"


@pytest.mark.lite_only
@under_cosine
def test_ranges_pages_iterators_and_hybrids_have_the_same_scores(lasting):
    mixed, _ = lasting
    query = mixed.queries[:1]
    wanted = {key: scores[0] for key, scores in mixed.scores().items()}
    best = sorted(wanted, key=lambda key: -wanted[key])
    limit = (wanted[best[9]] + wanted[best[10]]) / 2
    params = {"params": {"radius": limit}}
    [hits] = mixed.client.search(mixed.name, list(query), limit=50, search_params=params)
    assert [hit["id"] for hit in hits] == best[:10]
    [page] = mixed.client.search(mixed.name, list(query), limit=5, offset=5)
    assert [hit["id"] for hit in page] == best[5:10]

    iterator = mixed.client.search_iterator(mixed.name, list(query), batch_size=7, limit=21)
    found = []
    while batch := iterator.next():
        found += [hit["id"] for hit in batch]
    assert found == best[:21]

    request = AnnSearchRequest(list(query), "vector", {}, limit=8)
    [merged] = mixed.client.hybrid_search(mixed.name, [request], RRFRanker(), limit=8)
    assert [hit["id"] for hit in merged] == best[:8]
    [weighed] = mixed.client.hybrid_search(
        mixed.name, [request], WeightedRanker(1.0, norm_score=False), limit=8
    )
    np.testing.assert_allclose(weighed.distances, [wanted[key] for key in best[:8]], atol=4e-5)
    raw = mixed.plain.search(mixed.source, list(query), limit=8)
    [plainly] = mixed.client.hybrid_search(
        mixed.name, [request], RRFRanker(), limit=8, strength=0, kinds=0
    )
    assert [hit["id"] for hit in plainly] == raw[0].ids


@pytest.mark.lite_only
def test_a_gate_corrects_hubs_and_leaves_the_kinds(backend):
    """A gate opens by the nearest row of a search without biases, but relative to the means."""
    mixed = Mixed(backend, "COSINE")
    mixed.correct(gate=1)
    answers = mixed.client.search(mixed.name, list(mixed.queries), limit=10)
    full, none = mixed.scores(), mixed.scores(strength=0)
    state = mixed.state
    means = state.kinds_of(state.profile)
    rows = np.array(list(mixed.items.values()))
    numbers = [NAMES.index(kind) if kind else -1 for kind in mixed.kinds.values()]
    of_rows = np.vstack([means.of_kinds, means.overall])[numbers]
    opens = set(((unit(mixed.bank) - means.mean_query) @ (unit(rows) - of_rows).T).argmax(1))
    for number, hits in enumerate(answers):
        first = max(none, key=lambda key: none[key][number])
        scores = full if first in opens else none
        best = sorted(scores, key=lambda key: -scores[key][number])[:10]
        assert [hit["id"] for hit in hits] == best


@pytest.mark.lite_only
def test_kinds_that_the_vectors_show_need_no_field(backend):
    rng = np.random.default_rng(4)
    gap = 4 * rng.normal(size=DIM) / np.sqrt(DIM)
    is_text = np.arange(400) % 4 == 0
    items = vectors(rng, 400, DIM) + np.outer(2 * is_text - 1, gap).astype(np.float32)
    name, client = backend.name(), backend.client()
    plain_collection(client, name, items, "COSINE")
    store = backend.store()
    bank = QueryBank(vectors(rng, 200, DIM) + np.float32(gap))
    plan = plan_correction(store, name, Recipe(bank, kind="auto"))
    assert sorted(plan.chosen.kinds.counts.values()) == [100, 300]
    target = migrate(store, plan).target
    rule = store.info(target).state.kinds
    sides = rule.numbers_of(items, None)
    assert len(set(sides[is_text])) == len(set(sides[~is_text])) == 1
    assert sides[0] != sides[1]

    # Queries for either cluster: a matter of topics, not of kinds.
    side = np.arange(200) % 2 * 2 - 1
    of_both = vectors(rng, 200, DIM) + np.outer(side, gap).astype(np.float32)
    none = plan_correction(
        store, name, Recipe(QueryBank(of_both), kind="auto"), Copy(target=f"{name}_other")
    )
    assert none.chosen.kinds.rule is None
    assert any("no kinds were found: queries prefer" in remark for remark in none.remarks)


@pytest.mark.lite_only
def test_what_cannot_have_kinds_is_refused_in_one_line(backend):
    mixed = Mixed(backend, "IP")
    bank = QueryBank(mixed.bank)

    def plan(**options):
        return plan_correction(mixed.store, mixed.source, **as_plan(bank, **options))

    rows = [{**mixed.row(key), "long": str(key % 2) * 300} for key in mixed.items]
    mixed.plain.upsert(mixed.source, rows)
    far = backend.name()
    plain_collection(mixed.plain, far, np.array(list(mixed.items.values())), "L2")
    for error, message, call in [
        (InvalidInput, "does not have two kinds of at least 30 rows", lambda: plan(kind="nothing")),
        (InvalidInput, "field 'vector' of .* is a vector", lambda: plan(kind="vector")),
        (InvalidInput, "has more than 16 values", lambda: plan(kind="id")),
        (InvalidInput, "only rows without a value", lambda: plan(kind="long")),
        (InvalidInput, "kind is the name of a field", lambda: plan(kind="")),
        (InvalidInput, "kind is the name of a field", lambda: plan(kind=["modality"])),
        (InvalidInput, "a target bank has no kinds", lambda: plan(kind="auto", target_bank=bank)),
        (
            CannotMigrate,
            "compared by L2",
            lambda: plan_correction(mixed.store, far, Recipe(bank, kind="auto")),
        ),
    ]:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.lite_only
@under_cosine
def test_a_factor_that_is_none_is_refused(lasting):
    mixed, _ = lasting
    for factor in (-1, "1", float("nan")):
        with pytest.raises(InvalidParameter, match="kinds is a number from 0 up"):
            mixed.client.search(mixed.name, list(mixed.queries), kinds=factor)


@pytest.mark.lite_only
def test_a_field_of_floats_is_no_field_of_kinds(backend):
    name, client = backend.name(), backend.client()
    schema = client.create_schema(enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("price", DataType.DOUBLE)
    schema.add_field("is_photo", DataType.BOOL)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="IP")
    client.create_collection(name, schema=schema, index_params=index)
    rows = vectors(np.random.default_rng(0), 100, DIM)
    client.insert(
        name,
        [
            {"id": i, "vector": row, "price": float(i), "is_photo": i % 2 == 0}
            for i, row in enumerate(rows)
        ],
    )
    store, bank = backend.store(), QueryBank(vectors(np.random.default_rng(1), 90, DIM))
    for kind, message in {
        "price": r"is DOUBLE, not a text, .*choose a field of .* \(id, is_photo\)",
        "missing": r"has no field 'missing': choose a field of texts",
    }.items():
        with pytest.raises(InvalidInput, match=message):
            plan_correction(store, name, Recipe(bank, kind=kind))
    plan = plan_correction(store, name, Recipe(bank, kind="is_photo"))
    target = migrate(store, plan).target
    assert store.info(target).state.kinds.values == (False, True)
