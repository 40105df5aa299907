from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from milvus_hubness.demo.run import Pair, Retriever, build, split_pairs
from milvus_hubness.errors import InvalidInput


@pytest.fixture(scope="module")
def sample(pairs: list[Pair]) -> list[Pair]:
    return pairs[:: len(pairs) // 1000]


@pytest.fixture(scope="module")
def small(sample: list[Pair]) -> Retriever:
    return build(sample)


def recall_at_1(scores: np.ndarray) -> float:
    return float(100 * np.mean(scores.argmax(axis=1) == np.arange(len(scores))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read_header", ["read", "header"]),
        ("HTTPServer_bind", ["http", "server", "bind"]),
        ("isWritableDir2", ["is", "writable", "dir"]),
        ("__init__(self, x=0)", ["init", "self", "x"]),
        ("0 != 1", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert Pair.words(text) == expected


def test_nearest_neighbor_normalization_lifts_recall(retriever: Retriever) -> None:
    raw = retriever.queries @ retriever.gallery.T
    to_bank = np.sort(retriever.gallery @ retriever.bank.T, axis=1)
    bias = 0.75 * to_bank[:, -16:].mean(axis=1)
    assert 15 < recall_at_1(raw) < 35
    assert recall_at_1(raw - bias) >= recall_at_1(raw) + 5


def test_every_row_is_a_unit_vector(retriever: Retriever) -> None:
    for vectors in (retriever.queries, retriever.gallery, retriever.bank):
        assert vectors.dtype == np.float32
        assert vectors.shape[1] == 256
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_row_i_answers_query_i(retriever: Retriever, pairs: list[Pair]) -> None:
    docstrings = {pair.name: pair.docstring for pair in pairs}
    assert [docstrings[name] for name in retriever.names] == retriever.docstrings
    assert len(retriever.names) == len(retriever.queries) == len(retriever.gallery)


def test_the_parts_are_disjoint_and_cover_everything() -> None:
    split = split_pairs(1001, seed=0)
    assert [len(part) for part in split] == [400, 300, 301]
    assert not any(np.intersect1d(one, other).size for one, other in combinations(split, 2))


def test_nothing_is_fitted_on_the_test_docstrings(sample: list[Pair], small: Retriever) -> None:
    test = split_pairs(len(sample), seed=0)[2]
    changed = list(sample)
    for i in test[1:]:
        changed[i] = sample[i]._replace(docstring="return the value")
    after = build(changed)
    np.testing.assert_allclose(after.bank, small.bank, atol=1e-6)
    np.testing.assert_allclose(after.gallery, small.gallery, atol=1e-6)
    np.testing.assert_allclose(after.queries[0], small.queries[0], atol=1e-6)


def test_nothing_is_fitted_on_the_bank_bodies(sample: list[Pair], small: Retriever) -> None:
    bank = split_pairs(len(sample), seed=0)[1]
    changed = list(sample)
    for i in bank:
        changed[i] = sample[i]._replace(body="return the value")
    np.testing.assert_allclose(build(changed).bank, small.bank, atol=1e-6)


def test_a_text_without_a_known_word_is_dropped(sample: list[Pair], small: Retriever) -> None:
    i, j = split_pairs(len(sample), seed=0)[2][:2]
    changed = list(sample)
    changed[i] = sample[i]._replace(docstring="0 == 0")
    changed[j] = sample[j]._replace(body="qqxqq = 0")
    retriever = build(changed)
    assert {sample[i].name, sample[j].name}.isdisjoint(retriever.names)
    assert len(retriever.queries) == len(retriever.gallery) == len(small.queries) - 2


def test_the_seed_decides_the_split_and_nothing_else_varies(
    sample: list[Pair], small: Retriever
) -> None:
    again, other = build(sample), build(sample, seed=1)
    assert small.names == again.names != other.names
    np.testing.assert_allclose(again.queries, small.queries, atol=1e-6)
    np.testing.assert_allclose(again.gallery, small.gallery, atol=1e-6)
    np.testing.assert_allclose(again.bank, small.bank, atol=1e-6)


def test_progress_is_told_each_stage(sample: list[Pair]) -> None:
    stages = []
    build(sample, progress=lambda *stage: stages.append(stage))
    assert [(done, total) for _, done, total in stages] == [(1, 3), (2, 3), (3, 3)]
    assert all(name for name, _, _ in stages)


def test_too_few_pairs_are_refused(sample: list[Pair]) -> None:
    with pytest.raises(InvalidInput, match="12 documented functions are too few"):
        build(sample[:12])
