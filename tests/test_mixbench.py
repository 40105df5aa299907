"""The loader of MixBench reads a folder of the data set's shape."""

import json

import numpy as np
import pytest

from benchmarks.mixbench import mixbench

N_QUERIES, N_ITEMS, DIM = 12, 30, 4
PARTS = ({"image": "a.jpg", "text": ""}, {"image": None, "text": "a"}, {"image": "a", "text": "a"})
KINDS = ("image", "text", "image and text")


def right_item(query):
    return 2 * query


@pytest.fixture
def folder(tmp_path):
    """A subset whose query q looks for the item 2q; the items after those are nobody's."""
    rng = np.random.default_rng(0)
    queries = [{"query_id": f"q{number}", "text": "a", "image": ""} for number in range(N_QUERIES)]
    items = [{"corpus_id": f"c{number}", **PARTS[number % 3]} for number in range(N_ITEMS)]
    for name, lines in (("queries", queries), ("mixed_corpus", items)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    vectors = rng.standard_normal((N_ITEMS, DIM)).astype(np.float32)
    np.save(tmp_path / "mixed_corpus.npy", vectors)
    # A query is its right item, so that a test sees which one the loader takes for right.
    np.save(tmp_path / "queries.npy", 3 * vectors[[right_item(q) for q in range(N_QUERIES)]])

    judgements = ["query_id\tcorpus_id\tscore"]
    # Backwards, as the order of judgements says nothing.
    for query in reversed(range(N_QUERIES)):
        judgements.append(f"q{query}\tc{right_item(query)}\t1")
        judgements.append(f"q{query}\tc{N_ITEMS - 1}\t0")
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "qrels.tsv").write_text("\n".join(judgements) + "\n")
    return tmp_path


def test_half_of_the_queries_find_their_items_and_the_others_are_the_bank(folder):
    [mixed] = mixbench(folder)

    assert len(mixed.query) == len(mixed.bank) == N_QUERIES // 2
    assert [len(right) for right in mixed.positives] == [1] * len(mixed.query)
    for query, right in zip(mixed.query, mixed.positives, strict=True):
        np.testing.assert_allclose(query, mixed.gallery[right[0]], atol=1e-6)
    assert set(mixed.query_kinds) == {"text"}


def test_items_that_queries_of_the_bank_look_for_are_left_out(folder):
    [mixed] = mixbench(folder)

    # Bank queries equal their items, so that an item left in would have a product of 1.
    assert (mixed.bank @ mixed.gallery.T).max() < 1 - 1e-6
    assert len(mixed.gallery) == N_ITEMS - len(mixed.bank)


def test_the_kind_of_an_item_is_what_it_has(folder):
    [mixed] = mixbench(folder)

    every = np.load(folder / "mixed_corpus.npy")
    every /= np.linalg.norm(every, axis=1, keepdims=True)
    numbers = (mixed.gallery @ every.T).argmax(axis=1)
    assert list(mixed.kinds) == [KINDS[number % 3] for number in numbers]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("queries.jsonl", "missing"),
        ("mixed_corpus.npy", "embed the lines of mixed_corpus.jsonl"),
        ("qrels/qrels.tsv", "query_id, corpus_id and score"),
    ],
)
def test_a_missing_file_ends_it_in_one_line(folder, name, message):
    (folder / name).unlink()

    with pytest.raises(SystemExit, match=message) as raised:
        list(mixbench(folder))
    assert "\n" not in str(raised.value)


def test_vectors_of_another_number_than_lines_are_refused(folder):
    np.save(folder / "queries.npy", np.ones((N_QUERIES - 1, DIM), np.float32))

    with pytest.raises(SystemExit, match=r"shape.*12 lines"):
        list(mixbench(folder))


def test_vectors_of_two_models_are_refused(folder):
    np.save(folder / "queries.npy", np.ones((N_QUERIES, DIM + 1), np.float32))

    with pytest.raises(SystemExit, match="5 dimensions and items 4"):
        list(mixbench(folder))
