"""Small files that would fill the memory, of every format: by what is decompressed, decoded, or built of it."""

import gzip
import io
import json
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milvus_hubness.basics.files import sizes
from milvus_hubness.basics.files.columns import open_columns
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.errors import HubnessError, UnreadableFile
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.jobs.common.inputs import read_texts
from milvus_hubness.jobs.common.judgements import Judgements, read_clicks
from tests.support.memory import peak_of

FULL = 64 << 20
"""What a file may grow to by any factor, in bytes."""

SMALL = 1 << 18
"""The same in the short tests."""


def texts_of(path):
    return read_texts(None, str(path), "text", 1)


def column_of(path):
    with open_columns(path) as columns:
        return columns.values(columns.names[0], may_be_lists=True)


def packed(content):
    return lambda path, size: path.write_bytes(gzip.compress(repeated(content, size), 1))


def repeated(content, size):
    return content * (size // len(content))


def line_of(member):
    """One line that is not too long, as often as it takes."""

    def place(path, size):
        count = min(3 << 20, 4 * size) // (len(member) + 1)
        line = b'{"text":[' + b",".join([member] * count) + b"]}\n"
        path.write_bytes(gzip.compress(line * (1 + 2 * size // len(line)), 1))

    return place


def new_names(path, size):
    lines = "".join(f'{{"a{number}":1}}\n' for number in range(size // 12))
    path.write_bytes(gzip.compress(lines.encode(), 1))


def csv_of(header, row):
    return lambda path, size: path.write_bytes(
        gzip.compress(header + b"\n" + repeated(row, 2 * size), 1)
    )


def archive_of(dtype, shape=None):
    def place(path, size):
        shown = (size,) if shape is None else shape
        content = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            content, {"shape": shown, "fortran_order": False, "descr": dtype}
        )
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            body = bytes(int(np.prod(shown, dtype=object)) * np.dtype(dtype).itemsize)
            file.writestr("text.npy", content.getvalue() + body)

    return place


def parquet_of(make):
    return lambda path, size: pq.write_table(pa.table({"text": make(size)}), path)


def arrow_of(make):
    def place(path, size):
        table = pa.table({"text": make(size)})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    return place


def shared_members(size):
    """Rows that are views of the same numbers."""
    count = 1 << 10
    starts = pa.array(np.zeros(count, np.int32))
    lengths = pa.array(np.full(count, size // count, np.int32))
    return pa.ListViewArray.from_arrays(starts, lengths, pa.array(np.zeros(size // count)))


def equal_texts(size):
    """One text, which is in a dictionary once."""
    numbers = pa.array(np.zeros(1 << 10, np.int32))
    return pa.DictionaryArray.from_arrays(numbers, pa.array(["a" * (size // 512)]))


def runs(size):
    return pa.RunEndEncodedArray.from_arrays(pa.array([size], pa.int32()), pa.array(["a"]))


def no_values(size):
    """Of a type without values."""
    return pa.Array.from_buffers(pa.null(), (1 << 31) - 1, [None])


def empty_lists(size):
    """A billion lists of no number."""
    empty = pa.array([], pa.float32())
    return pa.Array.from_buffers(pa.list_(pa.float32(), 0), 10**9, [None], children=[empty])


BOMBS = {
    "a line of commas": (".csv.gz", packed(b","), QueryBank.load),
    "a line of commas after a mark": (".csv.gz", packed(b"\xef\xbb\xbf;"), QueryBank.load),
    "rows of commas": (".csv.gz", csv_of(b"a" + b",a" * 999, b"," * 999 + b"\n"), QueryBank.load),
    "rows of a digit": (".csv.gz", csv_of(b"text", b"1\n"), texts_of),
    "numbers of a digit": (".csv.gz", csv_of(b"1,1", b"1,1\n"), QueryBank.load),
    "vectors of two digits": (".csv.gz", csv_of(b"query", b"1 2\n"), QueryBank.load),
    "lists in cells": (".csv.gz", csv_of(b"key", b'"[[],[],[],[],[],[],[],[]]"\n'), column_of),
    "empty lines": (".jsonl.gz", packed(b"\n"), QueryBank.load),
    "empty objects": (".jsonl.gz", packed(b"{}\n"), QueryBank.load),
    "objects of one number": (".jsonl.gz", packed(b'{"a":1}\n'), QueryBank.load),
    "objects of new names": (".jsonl.gz", new_names, QueryBank.load),
    "lists in a line": (".ndjson.gz", line_of(b"[]"), texts_of),
    "objects in a line": (".ndjson.gz", line_of(b'{"":{}}'), texts_of),
    "vectors of whole numbers": (
        ".jsonl.gz",
        packed(b'{"query":[1,1,1,1,1,1,1,1]}\n'),
        QueryBank.load,
    ),
    "judgements": (".qrels.gz", packed(b"a a a 1\n"), read_clicks),
    "values of no size": (".npz", archive_of("<U0", (10**9,)), texts_of),
    "values of no size that are vectors": (".npz", archive_of("|V0", (10**9, 4)), QueryBank.load),
    "rows without a number": (".npz", archive_of("<f4", (10**12, 0)), texts_of),
    "rows without a row": (".npz", archive_of("<f4", (0, 10**12)), texts_of),
    "texts of a byte": (".npz", archive_of("|S1"), texts_of),
    "holes in a table": (".parquet", parquet_of(lambda size: pa.nulls(size)), texts_of),
    "truths in a table": (
        ".parquet",
        parquet_of(lambda size: pa.array(np.zeros(size, np.bool_))),
        texts_of,
    ),
    "empty texts in a table": (
        ".parquet",
        parquet_of(lambda size: pa.array([""]).take(pa.array(np.zeros(size // 4, np.int32)))),
        texts_of,
    ),
    "equal texts in a table": (".parquet", parquet_of(equal_texts), texts_of),
    "holes in Arrow": (".arrow", arrow_of(no_values), texts_of),
    "runs in Arrow": (".arrow", arrow_of(lambda size: runs(1 << 30)), texts_of),
    "empty lists in Arrow": (".arrow", arrow_of(empty_lists), QueryBank.load),
    "empty keys in Arrow": (".arrow", arrow_of(empty_lists), column_of),
    "records of nothing": (
        ".arrow",
        arrow_of(lambda size: pa.array([{}] * 8, pa.struct([]))),
        texts_of,
    ),
    "views of the same numbers": (".arrow", arrow_of(shared_members), QueryBank.load),
    "views of the same keys": (".arrow", arrow_of(shared_members), column_of),
}
"""The suffix of each, how it is made, and how it is read."""


def refused(read, path):
    with pytest.raises(HubnessError, match=r"named[^\n]*: [^\n]*$") as error:
        read(path)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_is_refused_before_it_grows(tmp_path, monkeypatch, bomb):
    """With a bound of 256 KiB, so that the files are small."""
    suffix, place, read = BOMBS[bomb]
    monkeypatch.setattr(sizes.Growth, "freely", SMALL)
    path = tmp_path / f"named{suffix}"
    place(path, SMALL)
    assert path.stat().st_size < SMALL
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        refused(read, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A line of JSON is in memory as a whole, and imports are counted too.
    allowed = max(SMALL, sizes.MOST_INFLATED * path.stat().st_size)
    bound = 2 * allowed + (40 << 20 if "in a line" in bomb else 6 << 20)
    assert peak < bound, f"{peak:,} bytes"
    assert pa.total_allocated_bytes() - before < bound


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_does_not_fill_the_memory(tmp_path, bomb):
    suffix, place, read = BOMBS[bomb]
    path = tmp_path / f"named{suffix}"
    place(path, FULL)
    taken = peak_of(lambda: refused(read, path)) - peak_of(lambda: None)
    assert taken < 400 << 20, f"{taken:,} bytes"


def test_honest_files_that_compress_well_are_read(tmp_path, monkeypatch):
    """A log of clicks with few keys, and vectors of few numbers."""
    monkeypatch.setattr(sizes.Growth, "freely", SMALL)
    rng = np.random.default_rng(0)
    count = 12_000
    keys = rng.integers(0, 200, count)
    lines = [json.dumps({"key": f"SKU-{key}", "query_id": f"q{key % 50}"}) for key in keys]
    path = tmp_path / "clicks.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert sum(read_clicks(path).values()) == count

    table = pa.table({"key": [f"SKU-{key}" for key in keys], "query_id": keys % 50})
    pq.write_table(table, tmp_path / "clicks.parquet")
    assert sum(read_clicks(tmp_path / "clicks.parquet").values()) == count

    rows = rng.choice([-1.0, 1.0], (500, 512)).astype(np.float32)
    np.savez_compressed(tmp_path / "signs.npz", query=rows, key=np.arange(500, dtype=np.int8) % 3)
    np.testing.assert_array_equal(QueryBank.load(tmp_path / "signs.npz").vectors, rows)
    assert len(Judgements.load(tmp_path / "signs.npz")) == 500
    assert Gallery.load(tmp_path / "signs.npz", "IP").keys[:4] == [0, 1, 2, 0]


def test_a_line_of_any_length_is_refused(tmp_path):
    path = tmp_path / "past.jsonl"
    path.write_bytes(b'{"query": [1.5, 2]}\n{"text": "' + b"a" * (4 << 20) + b'"}\n')
    with pytest.raises(UnreadableFile, match="line 2 has more than 4,194,304 characters"):
        QueryBank.load(path)
