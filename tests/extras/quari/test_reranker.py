"""The re-ranker in numpy's terms, and its judgement, against T written out."""

import numpy as np
import pytest
import torch

from milvus_hubness.correction.rerank import Adaptive
from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter
from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.reranker import Labelled, QuariReranker, _wrong_before
from milvus_hubness.quality.right_items import RightItems
from tests.extras.quari import explicit
from tests.extras.quari.conftest import DIM, small


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_it_is_what_the_clients_ask_for(disturbed):
    assert isinstance(QuariReranker(disturbed()), Adaptive)


@pytest.mark.parametrize("count", [1, 20])
def test_each_query_ranks_its_own_items(disturbed, count):
    network = disturbed()
    queries, rng = normal(count, DIM), np.random.default_rng(1)
    items = [normal(int(rng.integers(0, 9)), DIM, seed=i) for i in range(count)]
    adaptation = network(torch.from_numpy(queries))
    found = QuariReranker(network).scores(queries, items)
    assert len(found) == count
    for which, own in enumerate(items):
        wanted = explicit.cosines(adaptation, own.astype(float))[which]
        np.testing.assert_allclose(found[which], wanted, atol=5e-6)


def test_a_direct_query_ranks_as_the_inner_product_with_t_r(disturbed):
    network, queries, items = disturbed(), 3 * normal(18, DIM), normal(10, DIM, seed=1)
    adaptation = network(torch.from_numpy(queries))
    found = QuariReranker(network, direct=True).direct_queries(queries)
    np.testing.assert_allclose(
        np.linalg.norm(found, axis=1), np.linalg.norm(queries, axis=1), rtol=1e-5
    )
    for which, direct_query in enumerate(found):
        wanted = (
            items
            @ explicit.transformation(adaptation, which).T
            @ adaptation.query[which].detach().numpy()
        )
        given = items @ direct_query
        np.testing.assert_allclose(
            given / np.abs(given).max(), wanted / np.abs(wanted).max(), atol=1e-4
        )


def test_vectors_of_another_dimension_are_refused(disturbed):
    reranker = QuariReranker(disturbed())
    for call in (
        lambda: reranker.scores(normal(2, DIM), [normal(3, DIM), normal(3, DIM + 1)]),
        lambda: reranker.scores(normal(2, DIM + 1), [normal(3, DIM)] * 2),
        lambda: reranker.direct_queries(normal(2, DIM + 1)),
        lambda: reranker.expect_dim(DIM + 1),
    ):
        with pytest.raises(DimensionMismatch, match=f"dimension {DIM}"):
            call()
    for wrong in ({"candidates": 0}, {"correction": float("inf")}, {"device": "abacus"}):
        with pytest.raises(InvalidParameter):
            QuariReranker(disturbed(), **wrong)


def places(scores, answers):
    right_scores = scores[np.arange(len(scores)), answers]
    return (scores >= right_scores[:, None] - 1e-6).sum(1)


@pytest.mark.parametrize("candidates", [6, 500])
@pytest.mark.parametrize("correction", [0.0, 0.7])
def test_an_evaluation_is_that_of_a_search_by_hand(disturbed, candidates, correction):
    network = disturbed()
    queries, gallery, answers = normal(40, DIM), normal(30, DIM, seed=1), np.arange(40) % 30
    bias = np.random.default_rng(2).uniform(0, 0.5, 30).astype(np.float32)
    reranker = QuariReranker(network, candidates=candidates, correction=correction)
    labelled = Labelled(queries, gallery, RightItems.of(answers), biases=bias)
    raw, plain, reranked = (ranks.best for ranks in labelled.rankings(reranker)[0].values())
    cosine = (queries @ gallery.T) / np.outer(
        np.linalg.norm(queries, axis=1), np.linalg.norm(gallery, axis=1)
    )
    corrected = cosine - bias
    adapted = (
        explicit.cosines(network(torch.from_numpy(queries)), gallery.astype(float))
        - correction * bias
    )
    order = np.argsort(-corrected, axis=1)
    chosen = np.argsort(order, axis=1) < candidates
    np.testing.assert_array_equal(raw, places(cosine, answers))
    np.testing.assert_array_equal(plain, places(corrected, answers))
    among = chosen[np.arange(40), answers]
    assert among.any()
    adapted = np.where(chosen, adapted, -np.inf)
    np.testing.assert_array_equal(reranked[among], places(adapted, answers)[among])
    np.testing.assert_array_equal(reranked[~among], plain[~among])
    result = labelled.evaluate(reranker)
    assert result["reranked"]["R@1"] == pytest.approx((reranked == 1).mean())
    gain = result["gain"]["raw"]
    assert gain["estimate"] == pytest.approx((reranked == 1).mean() - (raw == 1).mean())
    assert gain["low"] <= gain["estimate"] <= gain["high"]


@pytest.mark.parametrize("candidates", [6, 500])
def test_a_query_with_several_answers_is_judged_by_all_of_them(disturbed, candidates):
    network, rng = disturbed(), np.random.default_rng(3)
    queries, gallery = normal(40, DIM), normal(30, DIM, seed=1)
    answers = [rng.choice(30, 1 + number % 4, replace=False) for number in range(40)]
    reranker = QuariReranker(network, candidates=candidates)
    raw, reranked = (
        Labelled(queries, gallery, RightItems.of(answers)).rankings(reranker)[0].values()
    )

    unit = gallery / np.linalg.norm(gallery, axis=1, keepdims=True)
    order = np.argsort(-(queries @ unit.T), axis=1)
    adapted = explicit.cosines(network(torch.from_numpy(queries)), gallery.astype(float))
    for number, right in enumerate(answers):
        first, rest = np.split(order[number], [candidates])
        ordered = np.concatenate([first[np.argsort(-adapted[number, first])], rest])
        of_query = slice(*reranked.right.starts[number : number + 2])
        np.testing.assert_array_equal(
            reranked.ranks[of_query], 1 + np.flatnonzero(np.isin(ordered, right))
        )
        np.testing.assert_array_equal(
            raw.ranks[of_query], 1 + np.flatnonzero(np.isin(order[number], right))
        )


def test_answers_that_tie_do_not_push_each_other_back():
    scores, chosen = np.zeros((1, 4), np.float32), np.array([[7, 2, 5, 9]])
    before = _wrong_before(scores, chosen, np.array([2, 5, 8]), np.array([0, 3]))
    assert before.tolist() == [2, 2, -1], "the wrong ones are before both"


def test_untrained_maps_change_nothing():
    queries, gallery = normal(40, DIM), normal(40, DIM, seed=1)
    rankings, _ = Labelled(queries, gallery, RightItems.of(np.arange(40))).rankings(
        QuariReranker(Quari(small(form="linear")))
    )
    assert list(rankings) == ["raw", "reranked"]
    np.testing.assert_array_equal(rankings["reranked"].best, rankings["raw"].best)
    with pytest.raises(InvalidInput, match="two pairs"):
        Labelled(queries[:1], gallery, RightItems.of(np.arange(1))).evaluate(
            QuariReranker(Quari(small()))
        )
