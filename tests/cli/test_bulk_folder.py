"""milvus-hubness migrate run --bulk-folder: refused before anything is written where it cannot be."""

from milvus_hubness.operations.lease_records import LEDGER
from tests.cli.conftest import assert_fails, collections

QUERY_SCALE = ("migrate", "run", "products", "--bank", "bank.npy", "--k", "8", "--bulk-folder", ".")


def test_it_needs_writers_that_rest(files, run):
    assert_fails(run(*QUERY_SCALE), 2, "--no-writers")
    assert collections(files) <= {"products", LEDGER}


def test_milvus_lite_imports_no_files(files, run):
    for command in ("run", "rehearse"):
        assert_fails(run("migrate", command, *QUERY_SCALE[2:], "--no-writers"), 1, "Milvus Lite imports no files")
    assert collections(files) <= {"products", LEDGER}
