"""Every format gives the same vectors, keys and counts, under any of the usual names, also of untidy files."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from milvus_hubness import InvalidInput, Judgements, QueryBank
from milvus_hubness.basics.requirements import install_line
from milvus_hubness.errors import DimensionMismatch, EmptyBank, NonFiniteVectors, UnreadableFile
from milvus_hubness.jobs.common.gallery import Gallery, key_column_of

ROWS = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
KEYS = ["SKU-1", "SKU-2", "SKU-3", "SKU-4", "SKU-5"]


def texts(rows):
    return [json.dumps([float(number) for number in row]) for row in rows]


def write(path, columns):
    """Write {name: values}, of which arrays of two dimensions are vectors, in the format of the suffix."""
    lists = {
        name: [row.tolist() for row in values] if isinstance(values, np.ndarray) else list(values)
        for name, values in columns.items()
    }
    suffix = "".join(path.suffixes)
    if suffix == ".npz":
        np.savez(path, **columns)
    elif suffix == ".parquet":
        pq.write_table(pa.table(lists), path)
    elif suffix in (".arrow", ".feather"):
        pa.feather.write_feather(pa.table(lists), path, compression="uncompressed")
    elif suffix.startswith(".csv"):
        frame = pd.DataFrame(
            {name: texts(v) if isinstance(v, np.ndarray) else v for name, v in columns.items()}
        )
        frame.to_csv(path, index=False)
    else:
        lines = [
            json.dumps(dict(zip(lists, row, strict=True)))
            for row in zip(*map(list, lists.values()), strict=True)
        ]
        content = "\n\n".join(lines).encode()
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    return path


FORMATS = [
    *(".npz", ".parquet", ".arrow", ".feather", ".csv", ".csv.gz", ".jsonl", ".ndjson"),
    ".jsonl.gz",
]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "name", ["query", "queries", "vector", "Embedding", "query_embeddings", "mine"]
)
def test_a_bank_in_every_format_and_under_every_name(tmp_path, suffix, name):
    path = write(tmp_path / f"past{suffix}", {"text": list("abcde"), name: ROWS})
    bank = QueryBank.load(path)
    np.testing.assert_array_equal(bank.vectors, ROWS)
    assert bank.counts is None


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", ["count", "Counts"])
def test_counts_of_a_bank(tmp_path, suffix, name):
    path = write(tmp_path / f"past{suffix}", {"query": ROWS, name: [1, 2, 3, 4, 5]})
    assert QueryBank.load(path).counts.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        *(("query", "key"), ("queries", "keys"), ("embedding", "label"), ("vectors", "ids")),
        *(("Vector", "ID"), ("query_embedding", "doc_id"), ("query", "product"), ("query", "sku")),
        *(("query", "item"), ("query", "Image_ID")),
    ],
)
def test_pairs_in_every_format_and_under_every_name(tmp_path, suffix, queries, keys):
    path = write(tmp_path / f"pairs{suffix}", {queries: ROWS, keys: KEYS})
    judged = Judgements.load(path)
    np.testing.assert_array_equal(judged.queries.vectors, ROWS)
    assert [list(of_query) for of_query in judged.keys] == [[key] for key in KEYS]


@pytest.mark.parametrize("suffix", FORMATS)
def test_texts_of_queries_may_have_the_name_query(tmp_path, suffix):
    """As people save them: query for what users typed, embedding for its vector."""
    columns = {"query": list("abcde"), "embedding": ROWS, "label": KEYS}
    path = write(tmp_path / f"pairs{suffix}", columns)
    np.testing.assert_array_equal(QueryBank.load(path).vectors, ROWS)
    np.testing.assert_array_equal(Judgements.load(path).queries.vectors, ROWS)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_several_right_rows_of_a_query(tmp_path, suffix):
    """As lists, and as repeated queries."""
    right = [["a", "b"], ["c"], ["a"], ["d", "e", "f"], ["g"]]
    as_text = [json.dumps(keys) for keys in right]
    columns = {"query": ROWS, "key": as_text if suffix == ".csv" else right}
    judged = Judgements.load(write(tmp_path / f"lists{suffix}", columns))
    assert [list(keys) for keys in judged.keys] == right

    number = [i for i, keys in enumerate(right) for _ in keys]
    columns = {"query": ROWS[number], "key": [key for keys in right for key in keys]}
    judged = Judgements.load(write(tmp_path / f"repeated{suffix}", columns))
    assert [list(keys) for keys in judged.keys] == right


def test_keys_of_a_csv_stay_texts_and_weights_and_grades_are_numbers(tmp_path):
    columns = {"query": ROWS, "id": ["007", "8", "9", "10", "x"]}
    columns |= {"grade": [1, 0.5, 2, 1, 1], "weight": [1, 2, 3, 4, 5.5]}
    judged = Judgements.load(write(tmp_path / "pairs.csv", columns))
    assert [keys[0] for keys in judged.keys] == ["007", "8", "9", "10", "x"]
    assert [grades[0] for grades in judged.grades] == [1, 0.5, 2, 1, 1]
    assert judged.weights.tolist() == [1, 2, 3, 4, 5.5]


def test_csv_as_frames_and_numpy_write_it(tmp_path):
    path = tmp_path / "past.csv"
    np.savetxt(path, ROWS, delimiter=",")
    np.testing.assert_allclose(QueryBank.load(path).vectors, ROWS, rtol=1e-6)
    for index in (True, False):
        pd.DataFrame(ROWS).to_csv(path, index=index)
        np.testing.assert_allclose(QueryBank.load(path).vectors, ROWS, rtol=1e-6)
    # The texts of arrays, with a semicolon between columns, as Excel has it, and empty lines.
    lines = [f'{key};"{row}"' for key, row in zip(KEYS, ROWS, strict=True)]
    path.write_text("\ufeffkey;vector\n\n" + "\n\n".join(lines) + "\n\n", "utf-8")
    judged = Judgements.load(path)
    np.testing.assert_allclose(judged.queries.vectors, ROWS, rtol=1e-6)
    assert [keys[0] for keys in judged.keys] == KEYS


def test_a_vector_of_several_thousand_numbers_in_a_cell(tmp_path):
    rows = np.random.default_rng(1).standard_normal((40, 6000)).astype(np.float32)
    path = write(tmp_path / "past.csv", {"embedding": rows})
    assert path.stat().st_size > 3_000_000
    np.testing.assert_array_equal(QueryBank.load(path).vectors, rows)


def bad_csv(path, cell):
    path.write_text(f'key,query\n1,"[0.1, 0.2]"\n2,"{cell}"\n')


BAD = {
    "words in a cell": (
        "b.csv",
        lambda p: bad_csv(p, "red shoes"),
        InvalidInput,
        r"not 'red shoes' \(row 1",
    ),
    "an empty cell": ("b.csv", lambda p: bad_csv(p, ""), InvalidInput, r"not '' \(row 1"),
    "NaN in a cell": ("b.csv", lambda p: bad_csv(p, "[nan, 1]"), NonFiniteVectors, "remove row 1"),
    "mixed lengths in CSV": (
        "b.csv",
        lambda p: bad_csv(p, "[1]"),
        DimensionMismatch,
        "1 numbers in row 1 and 2 in row 0",
    ),
    "an array cut short by NumPy": (
        "b.csv",
        lambda p: bad_csv(p, str(np.arange(2000.0)).replace("\n", "")),
        InvalidInput,
        r"cut short by '...' \(row 1.*save the vectors with np.save",
    ),
    "a column for each dimension": (
        "b.csv",
        lambda p: pd.DataFrame(ROWS, columns=[f"d{i}" for i in range(12)]).to_csv(p),
        InvalidInput,
        r'but 13 columns of numbers: write the numbers of a row into one cell, "\[0.1, -0.4\]"',
    ),
    "a header alone": (
        "b.csv",
        lambda p: p.write_text("key,query\n"),
        InvalidInput,
        "has no vector column: add one",
    ),
    "rows of unequal width": (
        "b.csv",
        lambda p: p.write_text('query\n"1 2"\n"1 2",3\n'),
        UnreadableFile,
        "CSV parse error: .*Expected 1 columns, got 2",
    ),
    "another encoding": (
        "b.csv",
        lambda p: p.write_bytes("kéy,query\n".encode("latin-1")),
        UnreadableFile,
        "cannot be read as .csv",
    ),
    "mixed lengths in JSON": (
        "b.jsonl",
        lambda p: p.write_text('{"query": [1.5, 2]}\n\n{"query": [1.5]}\n'),
        DimensionMismatch,
        "1 numbers in row 1 and 2 in row 0",
    ),
    "null in a vector": (
        "b.jsonl",
        lambda p: p.write_text('{"query": [1.5, 2]}\n\n{"query": [1.5, null]}\n'),
        InvalidInput,
        r"not \[1.5, None\] \(line 3\)",
    ),
    "NaN in JSON": (
        "b.jsonl",
        lambda p: p.write_text('{"query": [1.5, 2]}\n{"query": [1.5, NaN]}\n'),
        NonFiniteVectors,
        "remove row 1",
    ),
    "JSON without vectors": (
        "b.jsonl",
        lambda p: p.write_text('{"query": "red"}\n'),
        InvalidInput,
        "has no vector column: add one",
    ),
    "lists of numbers": (
        "b.jsonl",
        lambda p: p.write_text("[1.5, 2]\n"),
        UnreadableFile,
        "line 1 is no JSON object with names, such as",
    ),
    "gzip by another name": (
        "b.csv",
        lambda p: p.write_bytes(gzip.compress(b"query\n")),
        UnreadableFile,
        r"compressed by gzip: name it b\.csv\.gz",
    ),
    "gzip that is none": (
        "b.csv.gz",
        lambda p: p.write_bytes(b"query\n"),
        UnreadableFile,
        "cannot be read as .csv.gz",
    ),
    "gzip cut off": (
        "b.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(b'{"query": [1.5, 2]}\n' * 99)[:-20]),
        UnreadableFile,
        "cannot be read as .jsonl.gz",
    ),
    "gzip of zeros": (
        "b.jsonl.gz",
        lambda p: p.write_bytes(gzip.compress(bytes(5 << 20))),
        UnreadableFile,
        "line 1 has more than 4,194,304 characters: this is another kind of file",
    ),
    "gzip of an array": (
        "b.npy.gz",
        lambda p: p.write_bytes(gzip.compress(b"x")),
        UnreadableFile,
        "gunzip it first",
    ),
    "pickled vectors": (
        "b.npy",
        lambda p: np.save(p, np.array([ROWS, None], object)),
        UnreadableFile,
        "holds Python objects: save it with a dtype",
    ),
    "a long name": (
        "b.csv",
        lambda p: p.write_text("a" * 1_001 + ",query\n"),
        UnreadableFile,
        "a column whose name has 1,001 characters, and at most 1,000 are read: rename it",
    ),
    "many columns of vectors": (
        "b.jsonl",
        lambda p: p.write_text(json.dumps({f"v{number}": [0.5, 1] for number in range(5_000)})),
        InvalidInput,
        "choose one of 'v0', 'v1', 'v2', 'v3', 'v4' and 4995 more, of a bank with --bank-column",
    ),
    "two arrays": (
        "b.npz",
        lambda p: np.savez(p, mine=ROWS, yours=ROWS),
        InvalidInput,
        "choose one of 'mine', 'yours', of a bank with --bank-column, or name it 'query'",
    ),
    "no rows": (
        "b.parquet",
        lambda p: pq.write_table(pa.table({"query": pa.array([], pa.list_(pa.float32()))}), p),
        EmptyBank,
        "'query' has no rows",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_bank_is_one_line(tmp_path, case):
    name, make, kind, message = BAD[case]
    make(tmp_path / name)
    with pytest.raises(kind, match=message) as refused:
        QueryBank.load(tmp_path / name)
    assert len(str(refused.value).splitlines()) == 1
    assert name in str(refused.value)


SWAPPED = r"did you swap --bank and --pairs\?"
BAD_PAIRS = {
    "a bank in place of pairs": ("a.npy", lambda p: np.save(p, ROWS), f"vectors alone.*{SWAPPED}"),
    "numbers in place of pairs": ("a.csv", lambda p: np.savetxt(p, ROWS, delimiter=","), SWAPPED),
    "no keys": (
        "a.parquet",
        lambda p: write(p, {"query": ROWS, "text": KEYS}),
        f"'key' with the keys of right rows: its columns are 'query', 'text': name one of them with "
        f"--key-column, or {SWAPPED}",
    ),
    "two columns of keys": (
        "a.jsonl",
        lambda p: write(p, {"query": ROWS, "id": [1, 2, 3, 4, 5], "label": KEYS}),
        "'id', 'label': name that which does with --key-column, or rename it to 'key'",
    ),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_pairs_without_clear_keys_are_one_line(tmp_path, case):
    name, make, message = BAD_PAIRS[case]
    make(tmp_path / name)
    with pytest.raises(InvalidInput, match=message) as refused:
        Judgements.load(tmp_path / name)
    assert len(str(refused.value).splitlines()) == 1


def test_a_named_column_has_the_keys(tmp_path):
    """In place of one with a usual name, too. A missing one lists what there is."""
    others = [f"S{key}" for key in KEYS]
    path = write(tmp_path / "a.parquet", {"query": ROWS, "id": KEYS, "stock code": others})
    judged = Judgements.load(path, key_column="stock code")
    assert [list(of_query) for of_query in judged.keys] == [[key] for key in others]
    with pytest.raises(InvalidInput, match="no column 'stck': it has 'query', 'id', 'stock code'"):
        Judgements.load(path, key_column="stck")
    (tmp_path / "a.qrels").write_text("1 0 S1 1\n")
    with pytest.raises(InvalidInput, match="in a place of their own: leave out --key-column"):
        Judgements.load(tmp_path / "a.qrels", key_column="key")


def test_rows_of_items_are_not_numbered_silently(tmp_path, caplog):
    """Vectors that are called item are no keys, and a text that repeats is none."""
    codes = list("vwxyz")
    further = {"brand": list("aabbc"), "code": codes}
    path = write(tmp_path / "a.parquet", {"item": ROWS, **further})
    assert Gallery.load(path, "IP").keys == [0, 1, 2, 3, 4]
    [warning] = caplog.messages
    assert (
        "its rows are numbered from 0: if 'code' has the keys, name it with --key-column" in warning
    )
    caplog.clear()
    assert Gallery.load(path, "IP", key_column="code").keys == codes
    assert Gallery.load(write(tmp_path / "b.parquet", {"item": ROWS}), "IP").keys == [0, 1, 2, 3, 4]
    assert caplog.messages == []


def test_one_name_of_keys_for_two_files(tmp_path):
    """A file without that column has a usual name; in neither, it is missing in both."""
    items = write(tmp_path / "items.parquet", {"item": ROWS, "code": list("vwxyz")})
    pairs = write(tmp_path / "pairs.parquet", {"query": ROWS, "sku": list("vwxyz")})
    assert key_column_of(items, "code", pairs) == "code"
    assert key_column_of(pairs, "code", items) is None
    assert key_column_of(items, "other", pairs) == key_column_of(pairs, "other", items) == "other"
    assert key_column_of(pairs, "code", None) == "code"


@pytest.mark.parametrize(
    ("keys", "rows", "hint"),
    [
        (
            [0, 1],
            ["SKU-00238", "SKU-00239"],
            "keys of the collection are texts such as 'SKU-00238', yours are integers: "
            "if they number the rows",
        ),
        (["17", "18"], ["SKU-00238", "a"], "texts such as 'SKU-00238', yours are integers\\)"),
        (
            ["a", "b"],
            [17, 18],
            "'a' is no whole number, as the keys of the collection are, such as 17",
        ),
        ([0, 1], [500, 501, 900], "the keys of the collection go from 500 to 900"),
    ],
)
def test_keys_of_another_type_are_named(keys, rows, hint):
    judgements = Judgements.of(ROWS[:2], keys)
    with pytest.raises(InvalidInput, match=hint):
        judgements.within(rows, "products")
    # One that fits leaves the others out, with the same reason.
    mixed = Judgements.of(ROWS[:3], [*keys, rows[0]]).within(rows, "products")
    assert len(mixed) == 1
    assert hint.split("(")[0].split(":")[0].rstrip("\\)") in mixed.left_out[0]


def test_a_hole_in_the_keys_is_no_reason_to_doubt_them():
    judged = Judgements.of(ROWS[:3], [1, 5, 9]).within([1, 9], "products")
    assert judged.left_out[0].endswith("no usable row of 'products': 5")


def test_without_pyarrow_one_line_names_the_extra(tmp_path):
    write(tmp_path / "past.csv", {"query": ROWS})
    write(tmp_path / "past.jsonl", {"query": ROWS})
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from milvus_hubness import QueryBank, MissingExtra\n"
        "print(len(QueryBank.load('past.jsonl')))\n"
        "try: QueryBank.load('past.csv')\n"
        "except MissingExtra as error: print(error)\n"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True
    ).stdout.splitlines()
    assert lines == ["5", f"pyarrow is not installed: {install_line('check')}"]


LONG = "9" * 400
"""A whole number beyond float64, whose conversion NumPy ends by an OverflowError."""


@pytest.mark.parametrize("key", ["1", f'"{LONG}"'], ids=["a number", "a text"])
def test_a_whole_number_beyond_float64_in_json_lines(tmp_path, key):
    path = tmp_path / "past.jsonl"
    path.write_text(f'{{"query": [{LONG}, 0.5], "key": {key}}}\n')
    for read in (QueryBank.load, Judgements.load):
        with pytest.raises(
            NonFiniteVectors, match=r"past.jsonl: 'query' has a whole number beyond float64: remove"
        ):
            read(path)


def test_a_whole_number_beyond_float64_in_memory():
    number = int(LONG)
    column = np.empty(2, object)
    column[:] = [[number, 0.5], [0.5, 0.5]]
    with pytest.raises(InvalidInput, match="must hold real numbers, but has other values"):
        QueryBank.of(column)
    frame = pd.DataFrame({"query": [[0.5], [0.5]], "key": [1, number]})
    with pytest.raises(InvalidInput, match="must be a frame of pandas, Polars or Arrow"):
        Judgements.from_frame(frame)


GALLERY = np.random.default_rng(4).standard_normal((300, 12)).astype(np.float32)


def in_cells(rows):
    return "".join(f'"{json.dumps(row.tolist())}"\n' for row in rows)


def in_columns(rows, separator=",", header=""):
    lines = (separator.join(f"{number:.7g}" for number in row) for row in rows)
    return header + "".join(f"{line}\n" for line in lines)


def numbered(first, separator=",", width=12):
    return separator.join(map(str, range(first, first + width))) + "\n"


HEADERS = {
    "vectors without a header": in_cells(GALLERY),
    "after a mark and empty lines": "\ufeff\n\n" + in_cells(GALLERY),
    "numbers without a header": in_columns(GALLERY),
    "numbers after a mark": "\ufeff" + in_columns(GALLERY),
    "numbered from 0": in_columns(GALLERY, header=numbered(0)),
    "numbered from 1": in_columns(GALLERY, header=numbered(1)),
    "some of the numbers": in_columns(GALLERY, header="3,5,8,9,12,40,41,42,50,60,61,700\n"),
    "numbered, with tabs": in_columns(GALLERY, "\t", numbered(1, "\t")),
    "vectors without blanks": "".join(f"{' '.join(map(str, row))}\n" for row in GALLERY.tolist()),
    "vectors without quotes, with semicolons": "".join(
        f"[{'; '.join(map(str, row))}]\n" for row in GALLERY.tolist()
    )
    .replace("[", '"[')
    .replace("]", ']"'),
}


@pytest.mark.parametrize("case", HEADERS)
def test_the_first_vector_of_a_csv_stays_and_a_header_is_none(tmp_path, case):
    """Numbers of rows are keys where there are no others: one vector more or less moves them all."""
    path = tmp_path / "items.csv"
    path.write_text(HEADERS[case], "utf-8")
    gallery = Gallery.load(path, "COSINE")
    np.testing.assert_allclose(gallery.vectors, GALLERY, rtol=1e-6)
    assert list(gallery.keys) == list(range(300))
    np.testing.assert_array_equal(QueryBank.load(path).vectors, gallery.vectors)


def test_decimal_commas(tmp_path):
    """As spreadsheets write them in most languages: semicolons are between numbers then."""
    path = tmp_path / "items.csv"
    with_commas = in_columns(GALLERY, ";").replace(".", ",")
    for header in ("", numbered(1, ";")):
        path.write_text(header + with_commas)
        np.testing.assert_allclose(QueryBank.load(path).vectors, GALLERY, rtol=1e-6)
    path.write_text("0,65;1;-2\n0,17;0;0,5\n")
    np.testing.assert_allclose(QueryBank.load(path).vectors, [[0.65, 1, -2], [0.17, 0, 0.5]])

    cells = "".join(
        f'{17 + number};"[{"; ".join(f"{value:.7g}" for value in row)}]"\n'.replace(".", ",")
        for number, row in enumerate(GALLERY)
    )
    path.write_text("key;vector\n" + cells)
    gallery = Gallery.load(path, "COSINE")
    np.testing.assert_allclose(gallery.vectors, GALLERY, rtol=1e-6)
    assert list(gallery.keys[:2]) == ["17", "18"]

    path.write_text('vector\n"[0,65; 0,17]"\n"[-1,5e-1; 2]"\n')
    np.testing.assert_allclose(QueryBank.load(path).vectors, [[0.65, 0.17], [-0.15, 2]])
    # A price is one number, and no vector of two.
    path.write_text('preis;mein\n"12,50";"[0,65; 0,17]"\n')
    np.testing.assert_allclose(QueryBank.load(path).vectors, [[0.65, 0.17]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            'a,"[0.5, 1.5]"\nb,"[0.1, 0.2]"\n',
            "has a vector and no names of columns in its first li",
        ),
        ("0,1\n1,0\n", "its first line, 0,1, may number the columns or be a vector: delete it in"),
        ("1,2\n0.5,1\n", "its first line, 1,2, may number the columns or be a vector: delete it"),
        (numbered(0) + numbered(0) * 3, r"first line, 0,1,2,3,4,5,6,7,8,9,10,11, may number the"),
        ('vector\n"0,65 0,17"\n', "has no vector column: add one"),
        ('vector\n"[0.5, 1.5; 0.1, 0.2]"\n', "has no vector column: add one"),
        (
            'vector\n"[0,5; 1,5]"\n"0,65 0,17"\n',
            r"must hold lists of numbers such as .*, not '0,65 0,17' \(row 1",
        ),
        ('vector\n"0,65"\n', "has no vector column: add one"),
        ("0,5;1,5\n1.000,5;2\n", "must have numbers alone"),
    ],
)
def test_what_may_be_a_header_or_a_vector_is_refused(tmp_path, content, message):
    path = tmp_path / "items.csv"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message) as refused:
        QueryBank.load(path)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_of_vectors_alone_has_no_columns(tmp_path):
    path = tmp_path / "items.csv"
    path.write_text(in_cells(GALLERY))
    with pytest.raises(InvalidInput, match="has vectors alone, and judgements have the keys of"):
        Judgements.load(path)
    with pytest.raises(InvalidInput, match="has vectors alone, and no column 'query'"):
        QueryBank.load(path, "query")
    path.write_text('"[0.5, 1.5]"\n"[0.5, x]"\n')
    with pytest.raises(InvalidInput, match=r"items.csv must hold lists .*'\[0.5, x\]' \(row 1\)"):
        QueryBank.load(path)


LISTS = {
    "lists": pa.list_(pa.float32()),
    "large lists": pa.large_list(pa.float32()),
    "lists of one size": pa.list_(pa.float32(), 12),
    "views": pa.list_view(pa.float32()),
    "large views": pa.large_list_view(pa.float64()),
    "half precision": pa.list_(pa.float16()),
}


def table_of(name):
    """Vectors and keys, the vectors in a column of this type."""
    if name == "tensors":
        stored = pa.array(ROWS.tolist(), LISTS["lists of one size"])
        vectors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [12]), stored)
    else:
        vectors = pa.array(
            ROWS.astype(np.float16 if name == "half precision" else np.float32).tolist(),
            LISTS[name],
        )
    return pa.table({"mine": vectors, "key": KEYS})


@pytest.mark.parametrize("name", [*LISTS, "tensors"])
def test_vectors_in_every_kind_of_list_that_arrow_has(tmp_path, name):
    table = table_of(name)
    accuracy = 1e-3 if name == "half precision" else 0
    paths = [tmp_path / "items.arrow"]
    with pa.OSFile(str(paths[0]), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        # In two batches, the second of which begins within its buffers.
        writer.write_table(table.slice(0, 2))
        writer.write_table(table.slice(2))
    if "views" not in name:
        paths.append(tmp_path / "items.parquet")
        pq.write_table(table, paths[-1])
    for path in paths:
        gallery = Gallery.load(path, "IP")
        np.testing.assert_allclose(gallery.vectors, ROWS, rtol=accuracy)
        assert list(gallery.keys) == KEYS
    judged = Judgements.from_frame(table.rename_columns(["query", "key"]))
    np.testing.assert_allclose(judged.queries.vectors, ROWS, rtol=accuracy)


def test_rows_that_share_their_numbers(tmp_path):
    """Views need no order, and may overlap."""
    starts = pa.array([24, 0, 12, 0, 6], pa.int32())
    views = pa.ListViewArray.from_arrays(starts, pa.array([12] * 5, pa.int32()), ROWS[:3].ravel())
    table = pa.table({"vector": views})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    numbers = ROWS[:3].ravel()
    expected = [numbers[start : start + 12] for start in starts.to_pylist()]
    np.testing.assert_array_equal(QueryBank.load(tmp_path / "a.arrow").vectors, expected)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[0.5, None]], pa.list_view(pa.float32())), "NaN, infinity or a number beyond"),
        (pa.array([[0.5], None], pa.list_view(pa.float32())), "'query' is null in row 1"),
        (
            pa.array([[0.5], [0.5, 1]], pa.list_view(pa.float32())),
            "has 2 numbers in row 1 and 1 in",
        ),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.float32(), [2, 2]),
                pa.array([[1, 2, 3, 4]], pa.list_(pa.float32(), 4)),
            ),
            "has no vector column: add one",
        ),
        (pa.array([{"a": 1.5}]), "has no vector column: add one"),
    ],
    ids=["a hole in a view", "a missing view", "views of two sizes", "matrices", "records"],
)
def test_lists_that_are_no_vectors_are_one_line(tmp_path, column, message):
    table = pa.table({"query": column})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    with pytest.raises(InvalidInput, match=rf"a\.arrow.*{message}|{message}.*") as refused:
        QueryBank.load(tmp_path / "a.arrow")
    assert len(str(refused.value).splitlines()) == 1
