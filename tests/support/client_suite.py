"""What every client of a corrected collection must see, beside a plain client of the same rows."""

import numpy as np
import pytest

from tests.support.galleries import vectors
from tests.support.pairs import DIM, ITEMS, assert_same_hits, hits_of, ids

CALLS = [
    {},
    {"limit": 3, "offset": 2},
    {"filter": "group in [1, 3]"},
    {"output_fields": ["group"]},
    {"output_fields": ["vector", "note"]},
    {"output_fields": ["*"]},
    {"output_fields": ["id"]},
]


class CorrectedCollection:
    """A suite. `pair` is a fixture of the module that runs it: see tests.support.pairs."""

    @pytest.mark.parametrize("call", CALLS, ids=str)
    def test_strength_zero_is_the_plain_search(self, pair, call):
        expected = pair.plain.search(pair.name, data=list(pair.queries), **call)
        got = pair.client.search(pair.corrected, data=list(pair.queries), strength=0, **call)
        assert type(got) is type(expected)
        assert_same_hits(hits_of(expected), hits_of(got))
        for a, b in zip(expected[0], got[0], strict=True):
            if "vector" in a["entity"]:
                assert type(b["entity"]["vector"]) is type(a["entity"]["vector"])
                np.testing.assert_allclose(
                    b["entity"]["vector"], a["entity"]["vector"], rtol=2.4e-7
                )
            assert a["entity"].get("note") == b["entity"].get("note")

    @pytest.mark.parametrize("strength", [1.0, 0.5, -0.3])
    def test_scores_and_ranking_are_the_oracles(self, pair, strength):
        wanted = pair.oracle(pair.queries, pair.items, strength)
        found = pair.client.search(
            pair.corrected, data=list(pair.queries), limit=ITEMS, strength=strength
        )
        for scores, hits in zip(wanted, found, strict=True):
            assert sorted(ids(hits)) == list(range(ITEMS))
            np.testing.assert_allclose(
                [hit["distance"] for hit in hits], scores[ids(hits)], atol=2e-5
            )
            ordered = scores[ids(hits)] if pair.metric == "L2" else -scores[ids(hits)]
            assert (np.diff(ordered) >= -2e-5).all()

    def test_strength_of_the_client_and_of_the_collection(self, pair):
        raw = pair.client.search(pair.corrected, data=[pair.queries[0]], strength=0)
        full = pair.client.search(pair.corrected, data=[pair.queries[0]], strength=1)
        assert hits_of(raw) != hits_of(full)
        assert hits_of(pair.client.search(pair.corrected, data=[pair.queries[0]])) == hits_of(full)
        without = pair.backend.hubness_client(strength=0)
        assert hits_of(without.search(pair.corrected, data=[pair.queries[0]])) == hits_of(raw)

    def test_hidden_columns_show_only_when_named(self, pair):
        [row] = pair.client.get(pair.corrected, 3, output_fields=["hubness_bias", "hubness_epoch"])
        mean_bias = pair.client.hubness_state(pair.corrected).profile.mean_bias
        assert row["hubness_bias"] == pytest.approx(
            pair.biases(pair.items[3:4])[0] - mean_bias, abs=1e-5
        )
        assert row["hubness_epoch"] == 1
        [[hit]] = pair.client.search(
            pair.corrected, data=[pair.queries[0]], limit=1, output_fields=["hubness_bias"]
        )
        assert "hubness_bias" in hit["entity"]
        strongest = pair.client.query(
            pair.corrected, filter="hubness_bias > 0", output_fields=["hubness_bias"], limit=5
        )
        assert all(row["hubness_bias"] > 0 for row in strongest)

    def test_new_rows_are_corrected_on_the_way_in(self, pair):
        rng = np.random.default_rng(11)
        fresh = vectors(rng, 30, DIM)
        rows = [
            {"id": 1_000 + i, "vector": v, "group": 9, "note": "new"} for i, v in enumerate(fresh)
        ]
        for client, name in ((pair.plain, pair.name), (pair.client, pair.corrected)):
            done = client.insert(name, rows)
            assert done["insert_count"] == 30
            assert list(done["ids"]) == [row["id"] for row in rows]
        wanted = pair.oracle(pair.queries, fresh, 1.0)
        found = pair.client.search(
            pair.corrected, data=list(pair.queries), filter="group == 9", limit=30
        )
        for scores, hits in zip(wanted, found, strict=True):
            assert len(hits) == 30
            np.testing.assert_allclose(
                [hit["distance"] for hit in hits],
                scores[[hit["id"] - 1_000 for hit in hits]],
                atol=2e-5,
            )

    def test_upsert_moves_the_bias_with_the_vector_and_delete_deletes(self, pair):
        pair.changed = [0, 1, 5, *range(4, ITEMS, 5)]
        replaced = vectors(np.random.default_rng(12), 1, DIM)
        row = {"id": 5, "vector": replaced[0].tolist(), "group": 8, "note": "again"}
        pair.plain.upsert(pair.name, row)
        done = pair.client.upsert(pair.corrected, row)
        assert done["upsert_count"] == 1
        [[hit]] = pair.client.search(pair.corrected, data=[pair.queries[0]], filter="group == 8")
        assert hit["id"] == 5
        assert hit["distance"] == pytest.approx(
            pair.oracle(pair.queries[:1], replaced, 1.0)[0, 0], abs=2e-5
        )
        for client, name in ((pair.plain, pair.name), (pair.client, pair.corrected)):
            client.delete(name, ids=[0, 1])
            client.delete(name, filter="group == 4")
            assert not client.get(name, [0, 1, 4])
            [counted] = client.query(name, output_fields=["count(*)"])
            assert counted["count(*)"] == ITEMS - 2 - ITEMS // 5

    def test_partial_upsert_leaves_vector_and_bias(self, pair):
        if not pair.backend.is_lite:
            pytest.skip("this server has no partial upsert")
        pair.changed = [6]
        [old] = pair.client.get(pair.corrected, 6, output_fields=["vector", "hubness_bias"])
        pair.client.upsert(pair.corrected, {"id": 6, "group": 77}, partial_update=True)
        [new] = pair.client.get(
            pair.corrected, 6, output_fields=["vector", "hubness_bias", "group"]
        )
        assert new.pop("group") == 77
        assert dict(new) == dict(old)

    def test_range_search_is_in_corrected_scores(self, pair):
        scores = np.sort(pair.oracle(pair.queries[:1], pair.items, 1.0)[0])
        bound = (
            float(scores[40] + scores[41]) / 2
            if pair.metric == "L2"
            else float(scores[-40] + scores[-41]) / 2
        )
        hits = pair.client.search(
            pair.corrected,
            data=[pair.queries[0]],
            limit=100,
            search_params={"params": {"radius": bound}},
        )[0]
        inside = scores < bound if pair.metric == "L2" else scores > bound
        assert len(hits) == int(inside.sum())

    def test_an_alias_is_as_good_as_the_name(self, pair):
        alias = pair.backend.name("alias")
        pair.plain.create_alias(pair.corrected, alias)
        by_name = pair.client.search(pair.corrected, data=[pair.queries[0]])
        assert hits_of(pair.client.search(alias, data=[pair.queries[0]])) == hits_of(by_name)
