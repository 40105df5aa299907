"""Judgements of every form become the same queries with the same right rows; bad ones are one line."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness import Judgements
from milvus_hubness.errors import HubnessError, InvalidInput
from milvus_hubness.jobs.common.judgements import read_clicks

VECTORS = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
KEYS = [[11, 12], [21], [31, 32, 33]]
GRADES = [[1, 2], [3], [1, 1, 2]]
IDS = ["q1", "q2", "q3"]
FLAT = [
    (query, key, grade)
    for query in range(3)
    for key, grade in zip(KEYS[query], GRADES[query], strict=True)
]


def qrels_lines(separator=" ", first="0"):
    return "".join(
        separator.join((IDS[query], first, str(key), str(grade))) + "\n"
        for query, key, grade in FLAT
    )


def beir_lines():
    lines = [f"{IDS[query]}\t{key}\t{grade}\n" for query, key, grade in FLAT]
    return "query-id\tcorpus-id\tscore\n" + "".join(lines)


def beir_folder(folder: Path, split="test"):
    (folder / "qrels").mkdir(parents=True)
    (folder / "qrels" / f"{split}.tsv").write_text(beir_lines())
    lines = [json.dumps({"_id": name, "text": f"the text of {name}"}) for name in IDS]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def long_table(**more):
    columns = {
        "query": [VECTORS[query].tolist() for query, _, _ in FLAT],
        "key": [key for _, key, _ in FLAT],
        "grade": [grade for _, _, grade in FLAT],
    }
    return {**columns, **more}


def wide_table():
    return {"query": VECTORS.tolist(), "key": KEYS, "grade": GRADES}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def in_rows(table):
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=False)]


def npz(folder, **arrays):
    np.savez(folder / "judged.npz", **arrays)
    return Judgements.load(folder / "judged.npz")


def parquet(folder, table):
    pq.write_table(pa.table(table), folder / "judged.parquet")
    return Judgements.load(folder / "judged.parquet")


def arrow(folder, table):
    table = pa.table(table)
    with (
        pa.OSFile(str(folder / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as to,
    ):
        to.write_table(table)
    return Judgements.load(folder / "a.arrow")


def vectors_file(folder, name="queries.npz", ids=IDS):
    path = folder / name
    if path.suffix == ".npz":
        np.savez(path, query_id=np.array(ids), query=VECTORS)
    elif path.suffix == ".npy":
        np.save(path, VECTORS)
    elif path.suffix == ".jsonl":
        write_lines(path, in_rows({"query_id": ids, "query": VECTORS.tolist()}))
    else:
        pq.write_table(pa.table({"query_id": ids, "query": VECTORS.tolist()}), path)
    return path


def qrels(folder, name, text, vectors="queries.npz"):
    (folder / name).write_text(text)
    return Judgements.load(folder / name, vectors_file(folder, vectors))


def from_folder(folder, vectors):
    beir_folder(folder / "beir")
    vectors_file(folder / "beir", vectors)
    return Judgements.load(folder / "beir")


class OnlyArrow:
    """A frame of a library that shares nothing with others but the interface of Arrow, as Polars."""

    def __init__(self, table):
        self._table = pa.table(table)

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def beir_table(folder):
    """As data sets of BEIR and MTEB have their qrels on the hub."""
    table = {
        "query-id": [IDS[query] for query, _, _ in FLAT],
        "corpus-id": [str(key) for _, key, _ in FLAT],
        "score": [grade for _, _, grade in FLAT],
    }
    pq.write_table(pa.table(table), folder / "qrels.parquet")
    return Judgements.load(folder / "qrels.parquet", vectors_file(folder))


DICTIONARY = {
    name: {str(key): grade for key, grade in zip(KEYS[n], GRADES[n], strict=True)}
    for n, name in enumerate(IDS)
}
PADDED = {
    "key": np.array([[11, 12, 0], [21, 0, 0], [31, 32, 33]]),
    "grade": np.array([[1, 2, 0], [3, 0, 0], [1, 1, 2]]),
}
NUMBERED = {
    "key": np.array([33, 11, 12, 21, 31, 32]),
    "query_number": np.array([2, 0, 0, 1, 2, 2]),
    "grade": np.array([2, 1, 2, 3, 1, 1.0]),
}
FORMS = {
    "a row of each key, .npz": lambda f: npz(
        f, **{k: np.array(v) for k, v in long_table().items()}
    ),
    "several keys in a row, .npz": lambda f: npz(f, query=VECTORS, **PADDED),
    "numbers of queries, .npz": lambda f: npz(f, query=VECTORS, **NUMBERED),
    "a row of each key, .parquet": lambda f: parquet(f, long_table()),
    "lists, .parquet": lambda f: parquet(f, wide_table()),
    "lists, .arrow": lambda f: arrow(f, wide_table()),
    "ids, .parquet": lambda f: parquet(
        f, long_table(query_id=[IDS[query] for query, _, _ in FLAT])
    ),
    "a row of each key, .jsonl": lambda f: Judgements.load(
        write_lines(f / "judged.jsonl", in_rows(long_table()))
    ),
    "lists, .jsonl": lambda f: Judgements.load(write_lines(f / "j.jsonl", in_rows(wide_table()))),
    "qrels": lambda f: qrels(f, "qrels.robust.1-3", qrels_lines()),
    "qrels with tabs": lambda f: qrels(f, "dev.tsv", qrels_lines("\t"), "queries.parquet"),
    "qrels of Windows": lambda f: qrels(
        f, "judged.txt", "\ufeff" + qrels_lines("   ").replace("\n", "\r\n"), "vectors.jsonl"
    ),
    "qrels of ranx": lambda f: qrels(f, "qrels.json", json.dumps(DICTIONARY, indent=1)),
    "qrels of BEIR": lambda f: qrels(f, "test.tsv", beir_lines()),
    "qrels of BEIR, .parquet": beir_table,
    "a folder of BEIR, .npz": lambda f: from_folder(f, "queries.npz"),
    "a folder of BEIR, .parquet": lambda f: from_folder(f, "queries.parquet"),
    "a folder of BEIR, in order": lambda f: from_folder(f, "queries.npy"),
    "pandas": lambda f: Judgements.from_frame(pd.DataFrame(long_table())),
    "pandas with lists": lambda f: Judgements.from_frame(pd.DataFrame(wide_table())),
    "pandas with arrays": lambda f: Judgements.from_frame(
        pd.DataFrame({**wide_table(), "query": list(VECTORS), "key": list(map(np.array, KEYS))})
    ),
    "another frame": lambda f: Judgements.from_frame(OnlyArrow(wide_table())),
    "a dictionary": lambda f: Judgements.from_dict(
        {name: dict(zip(KEYS[n], GRADES[n], strict=True)) for n, name in enumerate(IDS)},
        dict(zip(IDS, VECTORS, strict=True)),
    ),
    "values in memory": lambda f: Judgements.of(VECTORS, KEYS, GRADES),
    "arrays in memory": lambda f: Judgements.of(
        np.array(long_table()["query"]),
        *(np.array(long_table()[name]) for name in ("key", "grade")),
    ),
}


def as_numbers(judgements):
    """The keys of all queries as whole numbers, with their grades."""
    return [
        {int(key): grade for key, grade in zip(keys, grades, strict=True)}
        for keys, grades in zip(judgements.keys, judgements.grades, strict=True)
    ]


JUDGED = [dict(zip(KEYS[query], GRADES[query], strict=True)) for query in range(3)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_judgements(tmp_path, form):
    judged = FORMS[form](tmp_path)
    assert as_numbers(judged) == JUDGED
    np.testing.assert_array_equal(judged.queries.vectors, VECTORS)
    assert judged.weights is None, "each query counts once, however many right rows it has"
    assert judged.left_out == ()
    assert judged.ids in (None, IDS)

    # As text or as number, a key is that of the collection.
    rows = [12, 11, 21, 31, 32, 33, 99]
    there = judged.within(rows, "products")
    assert there.left_out == ()
    assert [sorted(rows[at] for at in positions) for positions in there.positions(rows)] == KEYS
    texts = list(map(str, rows))
    assert judged.within(texts, "products").positions(texts)[1].tolist() == [2]


def test_without_grades_every_key_is_right(tmp_path):
    del (table := wide_table())["grade"]
    judged = parquet(tmp_path, table)
    assert [sorted(keys) for keys in judged.keys] == KEYS
    assert [set(grades) for grades in judged.grades] == [{1.0}] * 3
    assert Judgements.of(VECTORS, [1, 2, 3]).keys == [(1,), (2,), (3,)]
    assert set(Judgements.of(VECTORS, [{1, 4}, {2}, {3}]).keys[0]) == {1, 4}


def test_a_row_that_was_judged_as_not_relevant_is_no_right_row(caplog):
    grades = [[1, 0], [-1], [2, 1, -2]]
    judged = Judgements.of(VECTORS, KEYS, grades)
    assert as_numbers(judged) == [{11: 1}, {31: 2, 32: 1}]
    np.testing.assert_array_equal(judged.queries.vectors, VECTORS[[0, 2]])
    assert judged.left_out == (
        "1 of 3 queries of the list of judgements have no right row: number 1",
    )
    assert caplog.messages == list(judged.left_out)
    with pytest.raises(InvalidInput, match=r"^no right row in the list of judgements: all its"):
        Judgements.of(VECTORS, [1, 2, 3], [0, 0, -1])


def test_queries_that_users_repeat_weigh_more_and_queries_with_more_right_rows_do_not():
    one, two = VECTORS[:2]
    # Two right rows against one: equally often, as trec_eval counts.
    judged = Judgements.of([one, one, two], [11, 12, 21])
    assert judged.keys == [(11, 12), (21,)]
    assert judged.weights is None
    # Two rows say the same: the query was sent again.
    log = Judgements.of([one, one, one, two], [11, 12, 11, 21])
    assert log.keys == [(11, 12), (21,)]
    assert log.weights is None
    assert log.counts.tolist() == [2, 1]
    sent = log.labelled([11, 12, 21]).as_sent()
    np.testing.assert_array_equal(sent.queries, VECTORS[[0, 0, 1]])
    assert sent.right.items.tolist() == [0, 1, 0, 1, 2]
    assert sent.right.starts.tolist() == [0, 2, 4, 5]
    assert sent.sendings == (None, None)
    assert log.clicks == [(2, 1), (1,)]
    # Grades are of judges, of whom two may say the same.
    graded = Judgements.of([one, one, two], [11, 11, 21], [1, 2, 1])
    assert (graded.weights, graded.counts) == (None, None)
    # With weights, the log says how often.
    weighted = Judgements.of([one, one, two], [11, 12, 21], weights=[3, 2, 4])
    assert weighted.weights.tolist() == [5, 4]
    assert weighted.counts is None
    labelled = weighted.labelled([11, 12, 21])
    assert labelled.as_sent() is labelled
    assert weighted.clicks == [(3, 2), (4,)]
    shared = Judgements.of(VECTORS[:1], [[11, 12]], [[1, 3]], weights=[8])
    assert (shared.weights.tolist(), shared.clicks) == ([8], [(2, 6)])


def test_the_ids_of_queries_decide_where_there_are_some():
    same = np.ones((3, 2), np.float32)
    judged = Judgements.of(same, [1, 2, 3], ids=["a", "b", "a"])
    assert (judged.ids, judged.keys) == (["a", "b"], [(1, 3), (2,)])
    assert Judgements.of(same, [1, 2, 3]).keys == [(1, 2, 3)]
    assert Judgements.of(np.array([[0.0, 1], [-0.0, 1]]), [1, 2]).keys == [(1, 2)]
    with pytest.raises(InvalidInput, match="several vectors of the query ids a: keep one of each"):
        Judgements.of(VECTORS, [1, 2, 3], ids=["a", "b", "a"])


def test_of_two_grades_of_a_key_the_higher_one_counts(tmp_path):
    judged = qrels(tmp_path, "qrels.txt", qrels_lines() + "q1 0 11 3\nq1 0 11 2\n")
    assert as_numbers(judged)[0] == {11: 3, 12: 2}
    assert judged.weights is None, "qrels say nothing of how often users send a query"


def test_keys_of_no_row_are_counted_and_named(caplog):
    judged = Judgements.of(VECTORS, [["11", "d12"], ["d21"], ["31", "32", "033"]])
    there = judged.within([11, 31, 33, 40], "products")
    assert there.keys == [(11,), (31, 33)]
    assert there.left_out == (
        "3 of 6 judged keys are those of no usable row of 'products': d12, d21, 32 "
        "('d12' is no whole number, as the keys of the collection are, such as 11)",
        "1 of 3 queries have no right row in 'products': number 1",
    )
    assert caplog.messages == list(there.left_out)
    with pytest.raises(InvalidInput, match=r"^none of the 6 judged keys .*'shop'.*d12.*no whole"):
        judged.within([1, 2], "shop")
    named = Judgements.of(VECTORS, [1, 2, 3], ids=["a", "b", "c"]).within(["1"], "shop")
    assert named.left_out[1] == "2 of 3 queries have no right row in 'shop': b, c"
    assert named.keys == [("1",)]


def test_hostile_keys_and_ids_are_shown_short_and_without_control_characters():
    key = "\x1b[2J\n" + "k" * 100_000
    judged = Judgements.of(VECTORS, [1, key, 3], ids=["a", key.replace("k", "q"), "c"])
    there = judged.within([1, 3], "products")
    assert len(there.left_out) == 2
    assert all(len(line) < 400 and line.isprintable() for line in there.left_out)
    with pytest.raises(InvalidInput) as refused:
        judged.within([7], "products")
    assert str(refused.value).isprintable()
    with pytest.raises(InvalidInput) as refused:
        Judgements.of(VECTORS[:2], [1, 2], ids=[key, key])
    assert str(refused.value).isprintable()


def test_ids_without_vectors_and_vectors_without_judgements_are_counted(tmp_path, caplog):
    text = qrels_lines() + "q8 0 1 1\nq9 0 1 1\n"
    (tmp_path / "qrels.txt").write_text("\n".join(text.splitlines()[2:]))
    judged = Judgements.load(tmp_path / "qrels.txt", vectors_file(tmp_path))
    assert judged.ids == ["q2", "q3"]
    assert judged.left_out == (
        "2 of 4 query ids of qrels.txt have no vector in queries.npz: q8, q9",
        "1 of 3 queries of queries.npz have no judgement in qrels.txt: q1",
    )
    assert caplog.messages == list(judged.left_out)


def test_of_several_splits_the_one_for_tests_is_read_or_the_one_that_is_named(tmp_path):
    folder = beir_folder(tmp_path / "beir", "dev")
    vectors_file(folder)
    assert len(Judgements.load(folder)) == 3
    (folder / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\nq2\t9\t1\n")
    with pytest.raises(
        InvalidInput, match=r"no qrels/test.tsv: name one of .*dev.tsv, .*train.tsv"
    ):
        Judgements.load(folder)
    assert Judgements.load(folder / "qrels" / "train.tsv").keys == [("9",)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq3\t8\t1\n")
    assert Judgements.load(folder).keys == [("8",)]


def test_texts_are_those_of_the_merged_queries(tmp_path):
    folder = beir_folder(tmp_path / "beir")
    vectors_file(folder)
    texts = Judgements.load(folder, text_column="text").texts
    assert texts == ["the text of q1", "the text of q2", "the text of q3"]
    table = long_table(said=[f"query {query}" for query, _, _ in FLAT])
    pq.write_table(pa.table(table), tmp_path / "judged.parquet")
    judged = Judgements.load(tmp_path / "judged.parquet", text_column="said")
    assert judged.texts == ["query 0", "query 1", "query 2"]
    assert judged.within([31], "products").texts == ["query 2"]
    for path, vectors in ((folder, None), (tmp_path / "judged.parquet", None)):
        with pytest.raises(InvalidInput, match="has no column 'title'"):
            Judgements.load(path, vectors, text_column="title")


def test_clicks_need_no_vectors(tmp_path):
    (tmp_path / "qrels.txt").write_text(qrels_lines() + "q2 0 11 1\n")
    assert read_clicks(tmp_path / "qrels.txt") == {
        "11": 2,
        "12": 1,
        "21": 1,
        "31": 1,
        "32": 1,
        "33": 1,
    }
    rows = [
        {"query_id": "a", "key": [1, 2], "grade": [1, 3], "weight": 8},
        {"query_id": "b", "key": 1, "grade": 1, "weight": 1},
    ]
    assert read_clicks(write_lines(tmp_path / "log.jsonl", rows)) == {1: 3, 2: 6}


# -- bad input ------------------------------------------------------------------------------------


def bad_npz(path, **arrays):
    np.savez(path, **{"query": VECTORS, **arrays})


def bad_table(path, **columns):
    columns = {"query": VECTORS.tolist(), "key": [1, 2, 3], **columns}
    pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), path)


def bad_lines(path, *rows):
    write_lines(path, [{"query": [1.0, 0.0], "key": 1}, *rows])


BAD = {
    "no lines": ("a.txt", lambda p: p.write_text(" \n\n"), "has no judgements"),
    "a header alone": ("a.tsv", lambda p: p.write_text(beir_lines().splitlines()[0]), "no judge"),
    "an empty file": ("a.qrels", lambda p: p.write_text(""), "it is empty"),
    "three columns": (
        "qrels",
        lambda p: p.write_text("q1 0 11 1\n\nq1 11 1\n"),
        "line 3 has 3 columns where 4 belong: query id, iteration, key, grade",
    ),
    "four columns of BEIR": (
        "a.tsv",
        lambda p: p.write_text(beir_lines() + "q1\t0\t1\t1\n"),
        "line 8 has 4 columns where 3 belong: query-id, corpus-id, score",
    ),
    "a grade in words": (
        "a.txt",
        lambda p: p.write_text("q1 0 11 high\n"),
        "line 1 has the grade 'high', which is no number",
    ),
    "a grade that is NaN": ("a.txt", lambda p: p.write_text("q1 0 11 nan\n"), "line 1 .*'nan'"),
    "all not relevant": ("a.txt", lambda p: p.write_text("q1 0 11 0\n"), "^no right row in a.txt"),
    "binary": ("a.txt", lambda p: p.write_bytes(b"\xff\xfe\x00q1"), "cannot be read as .txt"),
    "ids of nobody": ("a.txt", lambda p: p.write_text("z 0 1 1\n"), "none of the 1 query ids"),
    "NaN in a column": (
        "a.parquet",
        lambda p: bad_table(p, grade=[1.0, np.nan, 1.0]),
        r"'grade' of a.parquet must hold numbers, not nan \(row 1\)",
    ),
    "grades in words, in a column": (
        "a.parquet",
        lambda p: bad_table(p, grade=["1", "2", "3"]),
        r"must hold numbers, not '1' \(row 0\)",
    ),
    "an empty grade": ("a.parquet", lambda p: bad_table(p, grade=[1, None, 1]), "not None .row 1"),
    "more grades than keys": (
        "a.parquet",
        lambda p: bad_table(p, key=[[1, 2], [3], [4]], grade=[[1, 1], [1, 2], [1]]),
        "2 grades for 1 keys in row 1",
    ),
    "one grade for two keys": (
        "a.parquet",
        lambda p: bad_table(p, key=[[1], [2], [3, 4]], grade=[1, 1, 1]),
        "1 grades for 2 keys in row 2",
    ),
    "keys that are no keys": ("a.parquet", lambda p: bad_table(p, key=[1.5, 2.0, 3.0]), "not 1.5"),
    "keys of keys": ("a.parquet", lambda p: bad_table(p, key=[[[1]], [[2]], [[3]]]), r"not \[1\]"),
    "lists without a key": (
        "a.parquet",
        lambda p: bad_table(p, key=pa.array([[], [], []], pa.list_(pa.int64()))),
        "^no right row in a.parquet: no row has a key",
    ),
    "no keys": ("a.parquet", lambda p: bad_table(p, key=None), "has no column 'key'"),
    "texts for vectors": ("a.parquet", lambda p: bad_table(p, query=["a", "b", "c"]), "not string"),
    "neither vectors nor ids": ("a.parquet", lambda p: bad_table(p, query=None), "column 'query'"),
    "null ids": (
        "a.parquet",
        lambda p: bad_table(p, query_id=["a", None, "c"]),
        r"must be texts or whole numbers, not None \(row 1\)",
    ),
    "numbers beyond the queries": (
        "a.npz",
        lambda p: bad_npz(p, key=[1, 2], query_number=[0, 3]),
        "row numbers of 'query', from 0 to 2, not 3",
    ),
    "fewer numbers than keys": (
        "a.npz",
        lambda p: bad_npz(p, key=[1, 2], query_number=[0]),
        "'key' of a.npz has 2 values for 1 of 'query_number'",
    ),
    "numbers without queries": (
        "a.npz",
        lambda p: np.savez(p, key=[1], query_number=[0], query_id=[1]),
        "row numbers of 'query'",
    ),
    "fewer keys than queries": ("a.npz", lambda p: bad_npz(p, key=[1, 2]), "2 keys for 3 queries"),
    "fewer grades than keys": (
        "a.npz",
        lambda p: bad_npz(p, key=[1, 2, 3], grade=[1]),
        "'grade' for 1 rows and 'key' for 3",
    ),
    "no JSON": ("a.jsonl", lambda p: p.write_text("{}\n{'a': 1}\n"), "line 2 is no JSON"),
    "JSON of something else": ("a.jsonl", lambda p: p.write_text("[1]\n"), "line 1 is no JSON obj"),
    "deep JSON": ("a.jsonl", lambda p: p.write_text("[" * 100_000), "line 1 .*(nested|Expecting)"),
    "a key in some lines": (
        "a.jsonl",
        lambda p: bad_lines(p, {"query": [1.0, 1.0]}),
        "a.jsonl has no 'key' in line 2",
    ),
    "a text for a vector": (
        "a.jsonl",
        lambda p: bad_lines(p, {"query": "red shoes", "key": 1}),
        r"lists of numbers, not 'red shoes' \(line 2\)",
    ),
    "vectors of unequal length": (
        "a.jsonl",
        lambda p: bad_lines(p, {"query": [1.0], "key": 1}),
        "1 numbers in row 1 and 2 in row 0",
    ),
    "a boolean grade": (
        "a.jsonl",
        lambda p: write_lines(p, [{"query": [1], "key": 1, "grade": True}]),
        r"not True \(line 1\)",
    ),
    "a grade beyond all numbers": (
        "a.jsonl",
        lambda p: write_lines(p, [{"query": [1], "key": 1, "grade": 10**400}]),
        r"must hold numbers, not 1000",
    ),
    "no file": ("a", lambda p: None, "a: no such file; check the path"),
    "JSON without queries": ("a.json", lambda p: p.write_text("[1]"), "has no judgements: they"),
    "JSON of no queries": ("a.json", lambda p: p.write_text("{}"), "has no judgements: they are"),
    "JSON of lists": ("a.json", lambda p: p.write_text('{"q1": [7]}'), r"of query q1, not \[7\]"),
    "JSON of words": ("a.json", lambda p: p.write_text('{"q1": {"7": "a"}}'), "numbers, not 'a'"),
    "JSON cut off": ("a.json", lambda p: p.write_text('{"q1": {"7"'), "is no JSON .*create it"),
    "a bank": ("a.npy", lambda p: np.save(p, VECTORS), "a.npy: has vectors alone, .*did you swap"),
    "a folder": ("beir", lambda p: p.mkdir(), "is a folder: name a file, or a BEIR folder"),
    "a folder without vectors": (
        "beir",
        beir_folder,
        "has no vectors of its queries: save 'query_id' and 'query' as queries.npz",
    ),
}
NEEDS_VECTORS = {".txt", ".tsv", ".qrels", ""}


@pytest.mark.parametrize("case", BAD)
def test_bad_judgements_are_one_line(tmp_path, case):
    name, write, message = BAD[case]
    path = tmp_path / name
    write(path)
    vectors = None
    if path.suffix in NEEDS_VECTORS and path.is_file():
        vectors = vectors_file(tmp_path)
    with pytest.raises(HubnessError, match=message) as refused:
        Judgements.load(path, vectors)
    assert len(str(refused.value).splitlines()) == 1
    assert path.name in str(refused.value)


BAD_VECTORS = {
    "an id twice": (
        "a.npz",
        lambda p: np.savez(p, query_id=["q1", "q2", "q1"], query=VECTORS),
        "a.npz has several vectors of the query ids q1: keep one of each",
    ),
    "the same id as number and text": (
        "a.jsonl",
        lambda p: write_lines(p, [{"query_id": 1, "query": [1]}, {"query_id": "1", "query": [2]}]),
        "several vectors of the query ids 1",
    ),
    "fewer ids than vectors": (
        "a.npz",
        lambda p: np.savez(p, query_id=["q1"], query=VECTORS),
        "3 vectors for 1 query ids",
    ),
    "no ids": ("a.npz", lambda p: np.savez(p, query=VECTORS), "has no column 'query_id'"),
    "an array": ("a.npy", lambda p: np.save(p, VECTORS), "has no 'query_id': save both in an .npz"),
    "no vectors": ("a.npz", lambda p: np.savez(p, query_id=["q1"]), "has no column 'query'"),
    "nothing": ("a.npz", lambda p: None, "no such file"),
}


@pytest.mark.parametrize("case", BAD_VECTORS)
def test_bad_vectors_of_queries_are_one_line(tmp_path, case):
    name, write, message = BAD_VECTORS[case]
    (tmp_path / "qrels.txt").write_text(qrels_lines())
    write(tmp_path / name)
    with pytest.raises(HubnessError, match=message):
        Judgements.load(tmp_path / "qrels.txt", tmp_path / name)


def test_vectors_go_with_ids_and_not_with_other_vectors(tmp_path):
    (tmp_path / "qrels.txt").write_text(qrels_lines())
    with pytest.raises(InvalidInput, match=r"no vectors: name a file that has both with --pairs-q"):
        Judgements.load(tmp_path / "qrels.txt")
    bad_table(tmp_path / "judged.parquet")
    with pytest.raises(InvalidInput, match=r"has vectors of its own: leave out .*queries.npz"):
        Judgements.load(tmp_path / "judged.parquet", vectors_file(tmp_path))
    folder = beir_folder(tmp_path / "beir")
    np.save(folder / "queries.npy", VECTORS[:2])
    with pytest.raises(InvalidInput, match="2 vectors for 3 query ids"):
        Judgements.load(folder)


def test_bad_values_in_memory_are_one_line():
    with pytest.raises(InvalidInput, match="2 keys for 3 queries"):
        Judgements.of(VECTORS, [1, 2])
    with pytest.raises(InvalidInput, match="weights of 3 pairs must be 3 numbers"):
        Judgements.of(VECTORS, [1, 2, 3], weights=[1])
    with pytest.raises(InvalidInput, match=r"must hold numbers, not 'high' \(row 0\)"):
        Judgements.from_dict({"a": {1: "high"}}, {"a": [1.0]})
    with pytest.raises(InvalidInput, match=r"none of the 1 query ids .* has a vector"):
        Judgements.from_dict({"a": {1: 1}}, {"b": [1.0]})
    for vectors in ({}, VECTORS):
        with pytest.raises(InvalidInput, match="must be a dictionary with that of each query id"):
            Judgements.from_dict({"a": {1: 1}}, vectors)
    with pytest.raises(InvalidInput, match="several vectors of the query ids 1: keep one of each"):
        Judgements.from_dict({1: {1: 1}}, {1: [1.0], "1": [2.0]})
    with pytest.raises(InvalidInput, match=r"{key: grade} of query a, not \[1\]"):
        Judgements.from_dict({"a": [1]}, {"a": [1.0]})
    with pytest.raises(InvalidInput, match="must be a frame of pandas, Polars or Arrow"):
        Judgements.from_frame(7)
    with pytest.raises(InvalidInput, match="the frame has no column 'query'"):
        Judgements.from_frame(pd.DataFrame({"query_id": [1], "key": [1]}))


# -- round trips ----------------------------------------------------------------------------------

IDENTIFIERS = st.text("abcäß0123456789-_", min_size=1, max_size=6)
DICTIONARIES = st.dictionaries(
    IDENTIFIERS,
    st.dictionaries(IDENTIFIERS, st.integers(1, 4), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


@given(judged=DICTIONARIES)
def test_a_dictionary_survives_qrels_json_lines_and_parquet(tmp_path_factory, judged):
    folder = tmp_path_factory.mktemp("judged")
    vectors = {name: [float(number), 1.0] for number, name in enumerate(judged)}
    np.savez(folder / "vectors.npz", query_id=list(judged), query=list(vectors.values()))
    lines = [f"{q} 0 {key} {grade}" for q, keys in judged.items() for key, grade in keys.items()]
    (folder / "qrels.txt").write_text("\n".join(lines), "utf-8")
    rows = [
        {"query_id": q, "query": vectors[q], "key": list(keys), "grade": list(keys.values())}
        for q, keys in judged.items()
    ]
    write_lines(folder / "judged.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "judged.parquet")

    for read in (
        Judgements.load(folder / "qrels.txt", folder / "vectors.npz"),
        Judgements.load(folder / "judged.jsonl"),
        Judgements.load(folder / "judged.parquet"),
        Judgements.from_dict(judged, vectors),
    ):
        assert judged == {
            name: dict(zip(keys, grades, strict=True))
            for name, keys, grades in zip(read.ids, read.keys, read.grades, strict=True)
        }
        assert read.queries.vectors.tolist() == list(vectors.values())
        assert read.weights is None
