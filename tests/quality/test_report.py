"""The figures of a diagnosis against brute force over the whole matrix of scores."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.quality.bank_checks import bank_coverage
from milvus_hubness.quality.measures import hubness_summary, skewness
from milvus_hubness.reports.report import EXAMPLES, HUBS, QUERIES_PER_HUB
from tests.support.diagnoses import diagnose

N_QUERIES, N_ITEMS, DIM, K = 120, 150, 12, 5
rng = np.random.default_rng(3)
GALLERY = rng.normal(size=(N_ITEMS, DIM)).astype(np.float32)
GALLERY[7] = 3 * np.ones(DIM)
POSITIVES = rng.integers(N_ITEMS, size=N_QUERIES)
QUERIES = (GALLERY[POSITIVES] + rng.normal(size=(N_QUERIES, DIM)) + 0.5).astype(np.float32)
BANK = (rng.normal(size=(40, DIM)) + 0.5).astype(np.float32)
BIAS = np.sort(BANK @ GALLERY.T, axis=0)[-4:].mean(0)
KEYS = [f"item-{n}" for n in range(N_ITEMS)]


def brute(strength, queries=QUERIES, k=K):
    """The first k of every query, all scores, and N_k."""
    scores = queries.astype(np.float64) @ GALLERY.T.astype(np.float64) - strength * BIAS
    found = np.argsort(-scores, axis=1)[:, :k]
    return found, scores, np.bincount(found.ravel(), minlength=N_ITEMS)


def rank(scores, query):
    return int(1 + (scores[query] > scores[query, POSITIVES[query]]).sum())


@pytest.fixture(scope="module")
def diagnosis():
    return diagnose(
        QUERIES,
        GALLERY,
        BIAS,
        bank=BANK,
        positives=POSITIVES,
        keys=KEYS,
        strength=0.6,
        k=K,
        title="t",
    )


def test_measures_before_and_after(diagnosis):
    before, after = brute(0)[2], brute(0.6)[2]
    assert diagnosis.before == hubness_summary(before, K)
    assert diagnosis.after == hubness_summary(after, K)
    assert (diagnosis.n_queries, diagnosis.n_items, diagnosis.k) == (N_QUERIES, N_ITEMS, K)


def test_histogram_counts_every_item_once(diagnosis):
    before, after = brute(0)[2], brute(0.6)[2]
    edges = [(one.low, one.high) for one in diagnosis.histogram]
    assert edges[:5] == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]
    for one in diagnosis.histogram:
        assert one.before == ((before >= one.low) & (before <= one.high)).sum()
        assert one.after == ((after >= one.low) & (after <= one.high)).sum()
    assert sum(one.before for one in diagnosis.histogram) == N_ITEMS
    assert sum(one.after for one in diagnosis.histogram) == N_ITEMS


def test_worst_hubs_and_the_queries_they_stand_in_front_of(diagnosis):
    (found, raw, before), (_, corrected, after) = brute(0), brute(0.6)
    assert len(diagnosis.hubs) == HUBS
    assert [hub.item.before for hub in diagnosis.hubs] == np.sort(before)[::-1][:HUBS].tolist()
    for hub in diagnosis.hubs:
        number = KEYS.index(hub.item.key)
        assert (hub.item.before, hub.item.after) == (before[number], after[number])
        places = {
            q: list(found[q]).index(number) + 1 for q in range(N_QUERIES) if number in found[q]
        }
        swallowed = {q: place for q, place in places.items() if rank(raw, q) > place}
        assert [one.rank for one in hub.swallows] == sorted(swallowed.values())[:QUERIES_PER_HUB]
        for one in hub.swallows:
            assert swallowed[one.query] == one.rank
            assert one.right_before == rank(raw, one.query)
            assert one.right_after == rank(corrected, one.query)


def test_antihubs(diagnosis):
    before, after = brute(0)[2], brute(0.6)[2]
    seen = diagnosis.antihubs
    rescued = np.flatnonzero((before == 0) & (after > 0))
    assert (seen.before, seen.after, seen.rescued) == (
        (before == 0).sum(),
        (after == 0).sum(),
        len(rescued),
    )
    assert seen.by_chance == pytest.approx(N_ITEMS * (1 - K / N_ITEMS) ** N_QUERIES)
    assert [one.after for one in seen.examples] == np.sort(after[rescued])[::-1][:EXAMPLES].tolist()
    assert all(one.before == one.after == 0 for one in seen.never)
    assert len(seen.never) == min(EXAMPLES, ((before == 0) & (after == 0)).sum())


def test_strengths_hold_zero_and_the_one_in_use(diagnosis):
    assert [one.strength for one in diagnosis.strengths] == [0, 0.25, 0.5, 0.6, 0.75, 1, 1.25, 1.5]
    for one in diagnosis.strengths:
        _, scores, counts = brute(one.strength)
        recall = np.mean([rank(scores, query) == 1 for query in range(N_QUERIES)])
        assert one.hubness.skewness == pytest.approx(skewness(counts))
        assert one.value.estimate == pytest.approx(recall)
        assert one.value.low <= recall <= one.value.high
    by_strength = {one.strength: one for one in diagnosis.strengths}
    gain = by_strength[0.6].value.estimate - by_strength[0].value.estimate
    assert diagnosis.gain.estimate == pytest.approx(gain)
    assert diagnosis.retrieval_after["R@1"] == by_strength[0.6].value.estimate


def test_bank_reach(diagnosis):
    found, _, counts = brute(0, BANK)
    similarity = (BANK @ GALLERY.T).max(0)
    seen = diagnosis.coverage
    assert (seen.bank_size, seen.reached) == (len(BANK), (counts > 0).sum())
    assert seen.by_chance == pytest.approx(N_ITEMS * (1 - (1 - K / N_ITEMS) ** len(BANK)))
    assert seen.blind_answers == pytest.approx((counts == 0)[brute(0)[0]].mean())
    assert sum(one.items for one in seen.regions) == N_ITEMS
    assert sum(one.reached for one in seen.regions) == len(np.unique(found))
    assert {one.central for one in seen.regions} <= set(KEYS)
    farthest = np.argsort(similarity)[:EXAMPLES]
    assert [item.key for item, _ in seen.farthest] == [KEYS[n] for n in farthest]
    assert [value for _, value in seen.farthest] == pytest.approx(similarity[farthest].tolist())


def test_a_region_that_no_bank_query_reaches():
    near, far = np.eye(DIM)[0] * 5, np.eye(DIM)[1] * 5
    noise = 0.1 * np.random.default_rng(0).normal(size=(200, DIM))
    gallery = np.vstack([near + noise[:100], far + noise[100:]])
    seen = bank_coverage(near + noise[:30], gallery, k=5)
    for region in range(len(seen.central)):
        members = seen.region == region
        assert members[seen.central[region]]
        assert members[:100].all() or not members[:100].any() or not members[100:].any()
    assert seen.counts[100:].sum() == 0
    assert seen.counts[:100].sum() == 30 * 5


def test_equal_items_make_one_region():
    seen = bank_coverage(np.ones((3, 4)), np.ones((90, 4)), k=2)
    assert seen.region.tolist() == [0] * 90
    assert len(seen.central) == 1


def test_without_anything_optional():
    bare = diagnose(QUERIES, GALLERY, BIAS)
    assert bare.gain is bare.verdict is bare.retrieval_before is None
    assert all(one.value is None for one in bare.strengths)
    assert bare.hubs[0].item.fields == {}
    assert bare.hubs[0].swallows[0].right_before is None
    assert bare.hubs[0].item.key == int(brute(0, k=10)[2].argmax())


def test_several_positives_a_query():
    several = [{int(item), int(item + 1) % N_ITEMS} for item in POSITIVES]
    found = diagnose(QUERIES, GALLERY, BIAS, positives=several, strengths=[], k=K)
    scores = brute(0)[1]
    best = [max(scores[query][list(items)]) for query, items in enumerate(several)]
    assert found.strengths[0].value.estimate == pytest.approx(np.mean(best == scores.max(1)))
    assert [one.strength for one in found.strengths] == [0, 1]
    for hub in found.hubs:
        assert not any(hub.item.key in several[one.query] for one in hub.swallows if one.rank == 1)


def test_to_dict_is_json_whatever_the_fields_hold():
    odd = {
        "when": datetime.date(2024, 5, 1),
        "n": np.int64(3),
        "bad": float("nan"),
        "raw": b"\x00",
        "l": (1,),
    }
    texts = [f"q{n}" for n in range(N_QUERIES)]
    found = diagnose(
        QUERIES, GALLERY, BIAS, bank=BANK, positives=POSITIVES, keys=np.arange(N_ITEMS) + 10,
        fields=[odd] * N_ITEMS, query_texts=texts, verdict={"verdict": "apply", "reason": np.arange(3.0)},
    )  # fmt: skip
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again == found.to_dict()
    hub = again["hubs"][0]
    assert hub["item"]["fields"] == {
        "when": "2024-05-01",
        "n": 3,
        "bad": "nan",
        "raw": "b'\\x00'",
        "l": [1],
    }
    assert hub["swallows"][0]["text"] == texts[hub["swallows"][0]["query"]]
    assert again["verdict"] == {"verdict": "apply", "reason": [0, 1, 2]}
    assert again["before"]["skewness"] == found.before.skewness
    assert again["reciprocity"] == found.reciprocity._asdict()


def test_lazy_fields_are_read_only_where_shown():
    class Fields(list):
        read = 0

        def __getitem__(self, number):
            Fields.read += 1
            return super().__getitem__(number)

    diagnose(QUERIES, GALLERY, BIAS, bank=BANK, fields=Fields([{}] * N_ITEMS), strengths=[])
    assert 0 < Fields.read <= HUBS + 3 * EXAMPLES


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query_texts": []}, DimensionMismatch, "texts has 0 entries where 120 are needed"),
        ({"bias": BIAS[:3]}, DimensionMismatch, "biases must have shape"),
        ({"bank": BANK[:, :4]}, DimensionMismatch, "dimension"),
        ({"strength": -1}, InvalidParameter, "at least 0"),
        ({"strengths": [float("nan")]}, InvalidParameter, "finite"),
        ({"k": N_ITEMS + 1}, InvalidParameter, "gallery has 150 items"),
        (
            {"queries": QUERIES[:1], "positives": POSITIVES[:1]},
            InvalidInput,
            "at least two queries",
        ),
    ],
)
def test_bad_input(wrong, error, message):
    given = {"queries": QUERIES, "gallery": GALLERY, "bias": BIAS, **wrong}
    with pytest.raises(error, match=message):
        diagnose(given.pop("queries"), given.pop("gallery"), given.pop("bias"), **given)
