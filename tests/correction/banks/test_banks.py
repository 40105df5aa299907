from __future__ import annotations

import hashlib
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.errors import (
    BankTooSmall,
    DimensionMismatch,
    EmptyBank,
    InvalidInput,
    NonFiniteVectors,
    UnreadableFile,
)

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7


def lists(rows=ROWS, kind=None, name="vector"):
    return pa.table({"id": range(len(rows)), name: pa.array([list(row) for row in rows], kind)})


def write_stream(table, path):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_ipc(table, path):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


WRITERS = {
    "b.parquet": lambda table, path: pa.parquet.write_table(table, path, row_group_size=3),
    "b.feather": lambda table, path: pa.feather.write_feather(table, str(path)),
    "b.arrow": write_stream,
    "b.ipc": write_ipc,
}
TABLES = pytest.mark.parametrize("name", WRITERS)


class TestInMemory:
    @pytest.mark.parametrize(
        "given",
        [
            ROWS,
            ROWS.astype(np.float64),
            np.asfortranarray(ROWS),
            ROWS.tolist(),
            [tuple(row) for row in ROWS],
            list(ROWS),
            torch.from_numpy(ROWS),
            torch.from_numpy(ROWS).requires_grad_(),
        ],
    )
    def test_of_anything_two_dimensional(self, given):
        bank = QueryBank.of(given)
        np.testing.assert_array_equal(bank.vectors, ROWS)
        assert bank.vectors.dtype == np.float32
        assert bank.vectors.flags.c_contiguous
        assert (len(bank), bank.dim, bank.source) == (4, 3, "array")

    def test_of_a_bank_is_the_bank(self):
        bank = QueryBank(ROWS)
        assert QueryBank.of(bank) is bank

    def test_is_a_read_only_copy(self):
        rows = ROWS.copy()
        bank = QueryBank(rows, source="mine")
        rows[:] = 0
        np.testing.assert_array_equal(bank.vectors, ROWS)
        with pytest.raises(ValueError, match="read-only"):
            bank.vectors[0, 0] = 1

    def test_half_precision_and_whole_numbers(self):
        np.testing.assert_allclose(QueryBank(ROWS.astype(np.float16)).vectors, ROWS, rtol=1e-3)
        assert QueryBank(np.arange(6).reshape(2, 3)).vectors.dtype == np.float32
        assert QueryBank.of(torch.ones(2, 3, dtype=torch.bfloat16)).dim == 3

    def test_zero_rows_are_allowed(self):
        assert len(QueryBank(np.zeros((2, 3)))) == 2

    @pytest.mark.parametrize("empty", [[], np.empty((0, 3)), np.empty(0), torch.empty(0, 3)])
    def test_empty(self, empty):
        with pytest.raises(EmptyBank, match="has no query"):
            QueryBank(empty)

    def test_rows_of_unequal_length(self):
        with pytest.raises(DimensionMismatch, match="2 numbers in row 1 and 3 in row 0"):
            QueryBank.of([[1, 2, 3], [4, 5], [6, 7, 8]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
    def test_not_finite(self, bad):
        rows = np.zeros((9, 2))
        rows[[1, 3, 4, 5, 6, 8], 1] = bad
        with pytest.raises(NonFiniteVectors, match="row 1, 3, 4, 5, 6 and 1 more"):
            QueryBank(rows)

    @pytest.mark.parametrize(
        "given",
        [
            np.ones(3),
            np.ones((2, 2, 2)),
            [1.0, 2.0],
            [[[1.0]]],
            np.float32(1),
            np.ones((2, 0)),
            [[], []],
        ],
    )
    def test_wrong_shape(self, given):
        with pytest.raises(InvalidInput, match=r"2-D|without a single number"):
            QueryBank.of(given)

    @pytest.mark.parametrize(
        "given",
        [
            [["a", "b"]],
            [[None, 1.0]],
            np.ones((2, 2), complex),
            torch.ones(2, 2, dtype=torch.complex64),
            np.ones((2, 2), bool),
            [[{}]],
            np.array(["ab", "cd"], object),
        ],
    )
    def test_not_numbers(self, given):
        with pytest.raises(InvalidInput, match="real numbers"):
            QueryBank.of(given)


def test_fingerprint_is_of_shape_and_values():
    expected = hashlib.sha256(b"4x3:" + ROWS.astype("<f4").tobytes()).hexdigest()
    bank = QueryBank(ROWS)
    assert bank.fingerprint == f"sha256:{expected}"
    assert bank.fingerprint == QueryBank(ROWS.astype(np.float64), source="elsewhere").fingerprint
    assert (
        len(
            {
                bank.fingerprint,
                QueryBank(ROWS.reshape(3, 4)).fingerprint,
                QueryBank(-ROWS).fingerprint,
            }
        )
        == 3
    )


def test_requirements():
    bank = QueryBank(ROWS, source="b.npy")
    bank.require(at_least=4)
    with pytest.raises(BankTooSmall, match=r"b\.npy has 4 queries; at least 5 are needed"):
        bank.require(at_least=5)
    bank.expect_dim(3, "the collection")
    with pytest.raises(DimensionMismatch, match=r"has dimension 8; the bank from b\.npy has 3"):
        bank.expect_dim(8, "the collection")


class TestArrays:
    def test_npy(self, tmp_path):
        np.save(tmp_path / "b.npy", ROWS.astype(np.float16))
        bank = QueryBank.load(tmp_path / "b.npy")
        np.testing.assert_allclose(bank.vectors, ROWS, rtol=1e-3)
        assert bank.source == str(tmp_path / "b.npy")
        with pytest.raises(InvalidInput, match="no column 'x'"):
            QueryBank.load(tmp_path / "b.npy", "x")

    def test_suffix_in_capitals_and_a_string_path(self, tmp_path):
        np.save(tmp_path / "b.npy", ROWS)
        (tmp_path / "b.npy").rename(tmp_path / "b.NPY")
        assert len(QueryBank.load(str(tmp_path / "b.NPY"))) == 4

    def test_npz(self, tmp_path):
        path = tmp_path / "b.npz"
        np.savez(path, only=ROWS)
        assert len(QueryBank.load(path)) == 4
        np.savez_compressed(path, a=ROWS, b=ROWS[:2])
        assert len(QueryBank.load(path, "b")) == 2
        with pytest.raises(
            InvalidInput,
            match="several arrays: choose one of 'a', 'b', of a bank with --bank-column",
        ):
            QueryBank.load(path)
        with pytest.raises(InvalidInput, match="no array 'c', only 'a', 'b': add it"):
            QueryBank.load(path, "c")
        np.savez(path)
        with pytest.raises(InvalidInput, match="no array: add one"):
            QueryBank.load(path)

    def test_objects_are_not_unpickled(self, tmp_path):
        objects = np.array([ROWS, None], dtype=object)
        np.save(tmp_path / "b.npy", objects)
        np.savez(tmp_path / "b.npz", only=objects)
        for name in ("b.npy", "b.npz"):
            with pytest.raises(UnreadableFile, match="holds Python objects: save it with a dtype"):
                QueryBank.load(tmp_path / name)

    def test_contents_are_checked(self, tmp_path):
        np.save(tmp_path / "b.npy", ROWS[0])
        with pytest.raises(InvalidInput, match="2-D"):
            QueryBank.load(tmp_path / "b.npy")
        np.save(tmp_path / "b.npy", ROWS[:0])
        with pytest.raises(EmptyBank, match=r"b\.npy"):
            QueryBank.load(tmp_path / "b.npy")
        np.save(tmp_path / "b.npy", ROWS * np.nan)
        with pytest.raises(NonFiniteVectors):
            QueryBank.load(tmp_path / "b.npy")


class TestTables:
    @TABLES
    @pytest.mark.parametrize(
        "kind",
        [
            pa.list_(pa.float32()),
            pa.list_(pa.float64()),
            pa.large_list(pa.float32()),
            pa.list_(pa.float32(), 3),
        ],
    )
    def test_the_only_column_of_vectors_needs_no_name(self, tmp_path, name, kind):
        WRITERS[name](lists(kind=kind), tmp_path / name)
        for column in (None, "vector"):
            np.testing.assert_array_equal(QueryBank.load(tmp_path / name, column).vectors, ROWS)

    def test_half_precision_and_whole_numbers(self, tmp_path):
        write_ipc(lists(ROWS.astype(np.float16), pa.list_(pa.float16())), tmp_path / "b.arrow")
        np.testing.assert_allclose(QueryBank.load(tmp_path / "b.arrow").vectors, ROWS, rtol=1e-3)
        write_ipc(lists([[1, 2], [3, 4]], pa.list_(pa.int8())), tmp_path / "b.arrow")
        np.testing.assert_array_equal(
            QueryBank.load(tmp_path / "b.arrow").vectors, [[1, 2], [3, 4]]
        )

    @TABLES
    def test_several_columns_need_a_name(self, tmp_path, name):
        table = pa.table({"first": lists()["vector"], "other": lists(ROWS[:, :2])["vector"]})
        WRITERS[name](table, tmp_path / name)
        assert QueryBank.load(tmp_path / name, "other").dim == 2
        with pytest.raises(
            InvalidInput, match="several vector columns: choose one of 'first', 'other'"
        ):
            QueryBank.load(tmp_path / name)

    @TABLES
    def test_wrong_column(self, tmp_path, name):
        WRITERS[name](lists(), tmp_path / name)
        for column in ("vectors", "id"):
            with pytest.raises(
                InvalidInput, match=f"no vector column '{column}', only 'vector': add it"
            ):
                QueryBank.load(tmp_path / name, column)
        WRITERS[name](lists().drop(["vector"]), tmp_path / name)
        with pytest.raises(InvalidInput, match="no vector column: add one"):
            QueryBank.load(tmp_path / name)

    @TABLES
    def test_rows_of_unequal_length(self, tmp_path, name):
        WRITERS[name](lists([[1.0, 2], [3, 4], [5, 6], [7]]), tmp_path / name)
        with pytest.raises(DimensionMismatch, match="1 numbers in row 3 and 2 in row 0"):
            QueryBank.load(tmp_path / name)

    @TABLES
    def test_null_rows_and_null_numbers(self, tmp_path, name):
        table = pa.table({"vector": pa.array([[1.0, 2.0], None, [3.0, 4.0], None])})
        WRITERS[name](table, tmp_path / name)
        with pytest.raises(InvalidInput, match="'vector' is null in row 1, 3"):
            QueryBank.load(tmp_path / name)
        WRITERS[name](pa.table({"vector": pa.array([[1.0, 2.0], [3.0, None]])}), tmp_path / name)
        with pytest.raises(NonFiniteVectors, match="row 1"):
            QueryBank.load(tmp_path / name)

    @TABLES
    def test_no_rows(self, tmp_path, name):
        WRITERS[name](lists()[:0], tmp_path / name)
        with pytest.raises(EmptyBank):
            QueryBank.load(tmp_path / name)

    def test_part_of_a_table(self, tmp_path):
        write_ipc(lists()[1:], tmp_path / "b.arrow")
        np.testing.assert_array_equal(QueryBank.load(tmp_path / "b.arrow").vectors, ROWS[1:])


SUFFIXES = (".npy", ".npz", ".parquet", ".arrow", ".feather", ".ipc")


class TestUnreadableFiles:
    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_missing(self, tmp_path, suffix):
        with pytest.raises(UnreadableFile, match=f"b{suffix}: no such file"):
            QueryBank.load(tmp_path / f"b{suffix}")

    @pytest.mark.parametrize("suffix", SUFFIXES)
    @pytest.mark.parametrize("content", [b"", b"not a file of vectors" * 50])
    def test_broken(self, tmp_path, suffix, content):
        path = tmp_path / f"b{suffix}"
        path.write_bytes(content)
        with pytest.raises(UnreadableFile, match=f"b{suffix}: cannot be read as .*create it again"):
            QueryBank.load(path)

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_cut_short(self, tmp_path, suffix):
        path = tmp_path / f"b{suffix}"
        rows = np.random.default_rng(0).standard_normal((500, 8))
        if suffix == ".npy":
            np.save(path, rows)
        elif suffix == ".npz":
            np.savez(path, rows=rows)
        else:
            WRITERS[path.name](lists(rows), path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(
            UnreadableFile, match=r"cannot be read|cut off or damaged; create it again"
        ):
            QueryBank.load(path)

    def test_a_damaged_archive(self, tmp_path):
        path = tmp_path / "b.npz"
        np.savez_compressed(path, rows=np.random.default_rng(0).standard_normal((500, 8)))
        content = bytearray(path.read_bytes())
        content[2000:2100] = bytes(100)
        path.write_bytes(content)
        with pytest.raises(UnreadableFile, match="cannot be read"):
            QueryBank.load(path)

    def test_an_archive_of_something_else(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
            archive.writestr("readme.txt", "hello")
        with pytest.raises(InvalidInput):
            QueryBank.load(tmp_path / "b.npz")

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_a_folder(self, tmp_path, suffix):
        (tmp_path / f"b{suffix}").mkdir()
        with pytest.raises(UnreadableFile):
            QueryBank.load(tmp_path / f"b{suffix}")

    @pytest.mark.parametrize("name", ["b.pt", "b", "b.pkl"])
    def test_unknown_kind(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"vectors")
        with pytest.raises(
            UnreadableFile, match=r"unknown kind; a bank is a \.npy, \.npz, \.parquet"
        ):
            QueryBank.load(tmp_path / name)


class TestWithout:
    """The bank before some queries were last sent."""

    ROWS = np.array([[1, 0], [2, 0], [1, 0], [3, 0], [1, 0]], np.float32)

    def test_each_query_takes_one_away_however_often_it_is_named(self):
        bank = QueryBank(self.ROWS, groups=[0, 1, 0, 1, 0])
        rest = bank.without(np.array([[1, 0], [3, 0], [1, 0], [9, 9]], np.float32))
        np.testing.assert_array_equal(rest.vectors, self.ROWS[[1, 2, 4]])
        np.testing.assert_array_equal(rest.groups, [1, 0, 0])
        assert rest.counts is None

    def test_a_count_gives_first(self):
        bank = QueryBank(self.ROWS, counts=[0.25, 2.5, 1.5, 1, 4])
        rest = bank.without(np.array([[1, 0], [2, 0]], np.float32))
        np.testing.assert_array_equal(rest.vectors, self.ROWS[1:])
        np.testing.assert_allclose(rest.counts, [1.5, 0.75, 1, 4])

    def test_of_others_and_of_all(self):
        bank = QueryBank(self.ROWS)
        assert bank.without(np.array([[7, 7]], np.float32)) is bank
        assert QueryBank(self.ROWS[:2]).without(self.ROWS[::-1]) is None
        np.testing.assert_array_equal(bank.without(self.ROWS).vectors, self.ROWS[[2, 4]])

    @pytest.mark.parametrize("seed", range(20))
    def test_equals_taking_them_one_by_one(self, seed):
        rng = np.random.default_rng(seed)
        rows = rng.integers(9, size=(30, 1)).astype(np.float32)
        counts = rng.integers(1, 4, 30)
        queries = rng.permutation(12)[:6, None].astype(np.float32)
        left = counts.copy()
        for query in queries:
            equal = np.flatnonzero((rows == query).all(1))
            if len(equal):
                left[equal[0]] -= 1
        rest = QueryBank(rows, counts=counts).without(queries)
        np.testing.assert_array_equal(rest.vectors, rows[left > 0])
        np.testing.assert_allclose(rest.counts, left[left > 0])
