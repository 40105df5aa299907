"""Collections under IP whose rows vary in length: each writer of a row fills its graph hint column by its length."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Copy,
    CorrectionConfig,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store.schema import takes_length_pull
from tests.support.aliases import aliased
from tests.support.galleries import nnn, plain_collection, similarity, vectors
from tests.support.recipes import as_plan

DIM, ITEMS, BANK, K = 20, 120, 60, 6


class Varied:
    """A corrected copy, and all rows that were written to it, by key."""

    def __init__(self, database):
        rng = np.random.default_rng(23)
        self.database, self.store = database, database.store()
        items, self.bank, self.other = (vectors(rng, count, DIM) for count in (ITEMS, BANK, BANK))
        self.rows = dict(enumerate(items))
        self.new = vectors(rng, 4, DIM)
        # Far longer, and far shorter, than all that the layout was measured on.
        self.new[0] *= 300
        self.new[1] *= 1e-4
        self.queries = vectors(rng, 3, DIM)
        self.source = database.fill(items, "IP")
        plan = plan_correction(
            self.store, self.source, Recipe(QueryBank(self.bank), estimator=NNN(K))
        )
        self.name = migrate(self.store, plan, client_ttl=0.0).target
        database.made.append(self.name)
        self.client = database.application()

    def lines(self, keys):
        self.rows |= dict(zip(keys, self.new, strict=True))
        return [
            {"id": key, "vector": row.tolist(), "group": 0, "note": "new"}
            for key, row in zip(keys, self.new, strict=True)
        ]

    def assert_sound(self, bank):
        """All rows are found by their scores, read back bit for bit, and placed by their lengths."""
        keys = sorted(self.rows)
        items = np.array([self.rows[key] for key in keys])
        biases = nnn(bank, items, "IP", K, 0.75)
        corrected = similarity(self.queries, items, "IP") - biases
        state = self.store.info(self.name).state
        for query, wanted in zip(self.queries, corrected, strict=True):
            found = self.database.scores(self.name, query, len(keys))
            np.testing.assert_allclose(
                [found[key] for key in keys], wanted + state.profile.mean_bias, rtol=1e-5, atol=3e-5
            )
        batch = self.store.get(self.name, keys, self.database.field)
        stored = batch.vectors[np.argsort(batch.keys)]
        np.testing.assert_array_equal(stored[:, :DIM], items)

        layout = state.layout
        hint = layout.graph_hint
        assert hint.length_pull > 0
        in_slots = layout.biases(stored, slice(None)).mean(axis=1, dtype=float)
        half_squares = 0.5 * (items.astype(float) ** 2).sum(axis=1)
        by_length = np.minimum(hint.length_pull * half_squares, hint.anchor)
        wanted = hint.anchor - hint.pull * in_slots - by_length
        np.testing.assert_allclose(stored[:, -1], wanted, rtol=1e-6, atol=1e-6 * hint.anchor)


def test_copies_clients_dual_writes_and_refreshes_place_rows_by_their_lengths(database):
    here = Varied(database)
    here.assert_sound(here.bank)
    here.client.insert(here.source, here.lines(range(ITEMS, ITEMS + 4)))
    here.client.upsert(here.source, here.lines([1, 2, 3, 4]))
    here.client.insert(here.name, here.lines(range(ITEMS + 4, ITEMS + 8)))
    here.client.upsert(here.name, here.lines([5, 6, 7, 8]))
    here.assert_sound(here.bank)
    here.name = aliased(here.store, here.name)
    refresh(here.store, here.name, QueryBank(here.other), force=True)
    here.assert_sound(here.other)


def assert_scores(client, name, items, bank):
    """All but a constant, the mean bias."""
    queries = bank[:3]
    wanted = similarity(queries, items, "IP") - nnn(bank, items, "IP", K, 0.75)
    search_params = {"params": {"ef": 2 * len(items)}}
    for hits, scores in zip(
        client.search(name, data=list(queries), limit=len(items), search_params=search_params),
        wanted,
        strict=True,
    ):
        found = np.array([hit["distance"] for hit in sorted(hits, key=lambda hit: hit["id"])])
        differences = found - scores
        np.testing.assert_allclose(differences, differences[0], atol=1e-5 * np.abs(scores).max())


@pytest.mark.lite_only
def test_a_plan_remarks_on_lengths_that_vary(database):
    rng = np.random.default_rng(31)
    items, bank = vectors(rng, ITEMS, DIM), QueryBank(vectors(rng, BANK, DIM))
    directions = items / np.linalg.norm(items, axis=1, keepdims=True)
    # A collection on Milvus Lite has no graph here, so that nothing is lost, but its copy may.
    graph = {"index_type": "HNSW"} if database.kind == "lite" else {}

    def remarks(rows, metric, **options):
        source = database.fill(rows, metric)
        options = {"estimator": NNN(K), **graph, **options}
        plan = plan_correction(database.store(), source, **as_plan(bank, **options))
        return [remark for remark in plan.remarks if "lengths of the vectors vary" in remark]

    [remark] = remarks(items, "IP")
    assert "--measure" in remark
    # It says itself what the index finds.
    assert remarks(items, "IP", measure=True) == []
    assert remarks(directions, "IP") == remarks(items, "COSINE") == []
    if database.kind == "lite":
        assert remarks(items, "IP", index_type="FLAT") == []


@pytest.mark.lite_only
def test_a_refresh_measures_the_lengths_again(backend):
    rng = np.random.default_rng(29)
    items, bank, other = (vectors(rng, count, DIM) for count in (ITEMS, BANK, BANK))
    store, source, alias = backend.store(), backend.name("lengths"), backend.name("live")
    plain_collection(
        backend.client(),
        source,
        items,
        "IP",
        index_type="HNSW",
        params={"M": 16, "efConstruction": 100},
    )
    plan = plan_correction(
        store, source, Recipe(QueryBank(bank), estimator=NNN(K)), Copy(alias=alias)
    )
    copy = migrate(store, plan, no_writers=True).target
    before = store.info(copy).state.layout
    client = backend.hubness_client()
    lines = [{"id": i, "vector": 4 * row, "group": 0, "note": ""} for i, row in enumerate(items)]
    client.upsert(alias, lines)
    refresh(store, alias, QueryBank(4 * other), force=True)
    after = store.info(alias).state.layout
    anchor, length_pull = before.graph_hint.anchor, before.graph_hint.length_pull
    assert after.graph_hint.anchor == 4 * anchor
    assert after.graph_hint.length_pull == length_pull / 4
    assert after.slots.scale == before.slots.scale / 4
    assert_scores(client, alias, 4 * items, 4 * other)
    found = client.query(alias, filter="id >= 0", limit=ITEMS)
    np.testing.assert_array_equal(
        [row["vector"] for row in sorted(found, key=lambda row: row["id"])], 4 * items
    )


def test_cells_and_half_precision_do_without():
    def takes(index_type, dtype="float32", **params):
        return takes_length_pull(VectorField("vector", 8, "IP", index_type, params, dtype))

    assert all(takes(kind) for kind in ("HNSW", "HNSW_SQ", "AUTOINDEX", "FLAT", ""))
    assert not any(
        takes(kind) for kind in ("IVF_FLAT", "IVF_SQ8", "GPU_IVF_PQ", "SCANN", "IVF_RABITQ")
    )
    assert not takes("HNSW", "float16")
    assert not takes("HNSW_SQ", sq_type="SQ4U")


@pytest.mark.lite_only
def test_a_collection_born_corrected_takes_the_lengths_of_its_target_bank(backend):
    rng = np.random.default_rng(37)
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, BANK, DIM)
    client, name = backend.hubness_client(), backend.name("born")
    client.create_collection(
        name,
        dimension=DIM,
        metric_type="IP",
        hubness=CorrectionConfig(Recipe(bank, target_bank=items, estimator=NNN(K))),
    )
    assert backend.store().info(name).state.layout.graph_hint.length_pull > 0
