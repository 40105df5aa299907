"""How many files of the package a reader has to open to follow a search, a migration and a refresh."""

import inspect
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from pymilvus import MilvusClient

import milvus_hubness
from milvus_hubness import NNN, HubnessClient, MilvusStore, QueryBank, connect, migrate, plan_migration, refresh

PACKAGE = str(Path(milvus_hubness.__file__).parent)
MOST_FILES = {"search": 7, "migration": 30, "refresh": 29}


def files_of(call):
    """Return the files of the package whose functions the call runs, in any thread."""
    files = set()

    def profile(frame, event, _):
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # Modules and class bodies run once, when they are imported.
        if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
            files.add(code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    rng = np.random.default_rng(0)
    uri = str(tmp_path_factory.mktemp("traces") / "milvus.db")
    items, *banks = (rng.standard_normal((rows, 32), np.float32) for rows in (600, 300, 300))
    plain = MilvusClient(uri)
    plain.create_collection("products", 32, metric_type="COSINE")
    plain.insert("products", [{"id": i, "vector": row.tolist()} for i, row in enumerate(items)])
    store = MilvusStore(connect(uri))

    def migration():
        plan = plan_migration(store, "products", QueryBank(banks[0]), estimator=NNN(16))
        assert migrate(store, plan).target == "products_hubness"

    def full_refresh():
        done = refresh(store, "products_hubness", bank=QueryBank(banks[1]), force=True, client_ttl=0.0)
        assert (done.action, done.scanned) == ("full", 600)

    found = {"migration": files_of(migration)}
    client = HubnessClient(uri)

    def search():
        [hits] = client.search("products_hubness", [items[0].tolist()], limit=5)
        assert len(hits) == 5

    search()
    search()
    found["search"] = files_of(search)
    found["refresh"] = files_of(full_refresh)
    client.close()
    return found


@pytest.mark.parametrize("job", MOST_FILES)
def test_a_reader_opens_few_files(traces, job):
    assert 3 < len(traces[job]) <= MOST_FILES[job], "\n".join(sorted(traces[job]))
