"""Files that fuzzing has found: each once ended in a traceback, in a message without an end, or the process itself."""

import base64
import contextlib
import gzip
import io
import os
import struct
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milvus_hubness.basics.files.parquet_footer import chunks_of
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.errors import HubnessError, UnreadableFile
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.jobs.common.inputs import read_texts
from milvus_hubness.jobs.common.judgements import Judgements, read_clicks
from milvus_hubness.serve import ConfigFile
from tests.support.memory import peak_of

HISTOGRAM = zlib.decompress(
    base64.b64decode(
        "eNqVVM1LG0EUn9mvriGUKJ11FnLIIS62aIxiREpKnLV+0Wg1FE1PbYxLKsZoY2oUpJTisefSo5deCv0H7MH8AYVCL4WC"
        "Yj+QHlqh0FMv7Xuzm6agFx/svLfvvfn9fm922FmR62caa1D2imYZZ6SDkPt5QsiTH52NDPjjd98aB+D3Fh5/1SPmm4/7"
        "1AzHBuOfdG7ei3+AVN/hL0g1dmZOddP8s3uix8xrGUglRw5/fsGtjdfdLzOMsAQb6AGKCDOYEeUmVGKwNyOjPdhyYJHu"
        "c7Lt7RB15lVY9dPLCjiuanpk4M7mi31CQHySJbKAidK5RkkbTWMTmhp4IL/CeA80NcmbFW7SIELys1lJHoojoEEVNY58"
        "AJUFh3yhODYWcFkEkg5mtUiGlG66yGlBQrTFEEJVqaowzS6nCDc2ig+81QIzSMrl+sNHXnWbKczIpqEvpXGtvLxRYwph"
        "oS6FX/LK3qpXqQE7vKkr3jZhYYi0mrdV6yLZKOo37KiddkiUhewUMSL2sA8qgZoATLG49Uy1fivOe+qYF/sKdg9OjZoI"
        "jKiQ9FXH6LDH8bzgQWbNZ5YKgcqwjqh1TJ23qvNUvdihn+UybIcYAU844JHzS6Ida5c6z3Xns/b/uZ9BsTQbcBQNqU90"
        "y3BM60gndpSHRS53e+G6/034d6UPrV5yhRBzwrdbQtSFWxLjQpTEaEnmXGiYxmBUiCmZaHnhl9y1ZuRDuUmElntzMnm3"
        "1S9tDJelifnBJfk6WsL+yizqQYgpqWfyH15gWJuolb055K+jnknUGZgrO2duAsgwUkyPB6KbfBLKH0qWivn5crGyEtTn"
        "fH2uLE6hZLfujzTWEuGKLemL581TyOfKi9AJ5+fvb0oriRuEx9YLVbistd7i+npvoVpdq8c2verG8lolNjCUSCb67TRc"
        "8ah/O0bgwszCb+svbTLtgw=="
    )
)
"""A table whose footer has a histogram of another size: to ask pyarrow for its columns ends the process."""


def an_unclosed_header(path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


def header_with_a_key_of_bytes(path):
    header = b"{b'descr': '<f4', 'fortran_order': False, 'shape': (7, 4), }".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(112))


def a_member_whose_header_has_a_key_of_bytes(path):
    header_with_a_key_of_bytes(path.with_suffix(".npy"))
    with zipfile.ZipFile(path, "w") as file:
        file.write(path.with_suffix(".npy"), "query.npy")


def another_name_of_a_member(path):
    """An archive in whose directory a member has another name than in its header, of 20,000 bytes."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("query.npy" + "y" * 20_000, b"")
        file.writestr("query.npy", b"")
    content = path.read_bytes()
    first, second = content.find(b"PK\x01\x02"), content.rfind(b"PK\x01\x02")
    # Where the second member begins, in the directory: where the first does.
    at = second + 42
    path.write_bytes(content[:at] + content[first + 42 : first + 46] + content[at + 4 :])


FOUND = {
    "a histogram of another size": (
        ".parquet",
        lambda path: path.write_bytes(HISTOGRAM),
        "histogram size mismatch",
    ),
    "an unclosed header": (".npy", an_unclosed_header, r"EOF in multi-line|Cannot parse header"),
    "a key of bytes": (".npy", header_with_a_key_of_bytes, "not supported between"),
    "a key of bytes in a member": (
        ".npz",
        a_member_whose_header_has_a_key_of_bytes,
        "not supported between",
    ),
    "another name of a member": (".npz", another_name_of_a_member, "File name in directory"),
}


@pytest.mark.parametrize("case", FOUND)
def test_a_file_that_fuzzing_has_found_is_one_short_line(tmp_path, case):
    suffix, place, reason = FOUND[case]
    path = tmp_path / f"named{suffix}"
    place(path)
    # In a process of its own, since one of them ended it.
    peak_of(lambda: refused(path, reason))


def refused(path, reason):
    with pytest.raises(
        UnreadableFile, match=rf"^[^\n]*named.*{reason}[^\n]*create it again$"
    ) as error:
        QueryBank.load(path)
    assert len(str(error.value)) < 300 + len(os.fspath(path))


@pytest.mark.parametrize(
    "options", [{"row_group_size": 100, "write_page_index": True}, {}], ids=str
)
def test_the_sizes_in_a_footer_are_those_that_pyarrow_has(tmp_path, options):
    path = tmp_path / "named.parquet"
    table = pa.table(
        {
            "query": pa.array(np.zeros((300, 3)).tolist()),
            "a.b": ["x"] * 300,
            "number": pa.array(range(300), pa.int32()),
            "record": [{"inner": 1.5}] * 300,
        }
    )
    pq.write_table(table, path, **options)
    metadata = pq.ParquetFile(path).metadata
    expected = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column, name in zip(map(group.column, range(4)), table.column_names, strict=True):
            expected.append((name, column.num_values, column.total_uncompressed_size))
    found = list(chunks_of(memoryview(path.read_bytes())))
    assert [(chunk.name, chunk.values, chunk.uncompressed) for chunk in found] == expected


def test_a_footer_that_is_cut_or_changed_is_a_value_error(tmp_path):
    path = tmp_path / "named.parquet"
    pq.write_table(pa.table({"query": [[0.5, 1.5]]}), path)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        changed[rng.integers(4, len(content) - 4)] = rng.integers(256)
        with contextlib.suppress(ValueError):
            list(chunks_of(memoryview(changed)))
    for size in (0, 3, 8, 50):
        with pytest.raises(ValueError, match="footer"):
            list(chunks_of(memoryview(content[-size:] if size else b"")))


def seeds():
    """A small file of each kind, by its suffix."""
    rows = [[0.5, 1.5], [0.25, -1.0]]
    table = pa.table({"query": rows, "key": ["a", "b"], "text": ["red", "blue"]})
    arrays, parquet, arrow = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(arrays, query=np.array(rows), key=np.array([1, 2]), text=np.array(["a", "b"]))
    pq.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    array = io.BytesIO()
    np.save(array, np.array(rows))
    csv = b'query,key,text,weight\n"[0.5, 1.5]",1,red,2\n"[0.25; -1,5]","[1,2]",blue,1\n'
    lines = b'{"query":[0.5,1.5],"key":[1,"b"],"grade":[1,2],"text":"red"}\n'
    return {
        ".npy": array.getvalue(),
        ".npz": arrays.getvalue(),
        ".parquet": parquet.getvalue(),
        ".arrow": arrow.getvalue(),
        ".csv": csv,
        ".csv.gz": gzip.compress(csv),
        ".jsonl": lines,
        ".qrels": b"query-id\tcorpus-id\tscore\nq\ta b\t1\n",
        ".json": b'{"q": {"a": 1, "b": 0.5}}',
        ".toml": b"[server]\nuri = 'http://h:1'\n[[collection]]\nname = 'a'\nparams = {k = 8}\n",
    }


READERS = (
    QueryBank.load,
    Judgements.load,
    read_clicks,
    lambda path: Gallery.load(path, "IP"),
    lambda path: read_texts(None, str(path), "text", 2),
    ConfigFile,
)


@pytest.mark.long
@pytest.mark.parametrize("suffix", seeds())
@settings(max_examples=1_500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_files_are_read_or_refused_in_one_line(suffix, tmp_path_factory, data):
    content = bytearray(seeds()[suffix])
    # Numbers that sizes and counts may have are among what takes the place of some bytes.
    values = st.one_of(
        st.binary(min_size=1, max_size=8),
        st.sampled_from([b"\xff" * 4, b"\x7f" + b"\xff" * 7, b"\0" * 8, b"9" * 400, b'"', b";"]),
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        value = data.draw(values)
        content[at : at + data.draw(st.sampled_from([0, len(value)]))] = value
    path = tmp_path_factory.getbasetemp() / f"named{suffix}"
    path.write_bytes(content)
    for read in READERS:
        try:
            read(path)
        except HubnessError as refused:
            lines = str(refused).splitlines()
            # A configuration has a line for each fault.
            assert read is ConfigFile or len(lines) == 1
            assert max(map(len, lines)) < 1_000
