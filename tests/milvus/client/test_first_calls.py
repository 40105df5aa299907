"""What first-time users pass in place of what is needed: it works, or a message says what to pass."""

import inspect
import typing
from importlib.util import find_spec

import numpy as np
import pyarrow as pa
import pytest
import torch
from milvus_lite.server_manager import server_manager_instance
from pymilvus import AnnSearchRequest, AsyncMilvusClient, MilvusClient, RRFRanker
from pymilvus.exceptions import MilvusException
from qdrant_client import AsyncQdrantClient, QdrantClient, models

import milvus_hubness
from milvus_hubness import (
    CSLS,
    NNN,
    AsyncHubnessClient,
    Beside,
    Copy,
    CorrectionConfig,
    HubnessClient,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    Recipe,
    RefreshOptions,
    clean,
    connect,
    diagnose,
    disable,
    enable,
    migrate,
    plan_correction,
    refresh,
    rollback,
    status,
)
from milvus_hubness.errors import (
    CollectionNotFound,
    InvalidInput,
    InvalidParameter,
    ServerUnavailable,
    UnreadableFile,
)
from milvus_hubness.jobs.store import protocols
from milvus_hubness.milvus.store.server import PlainClient
from qdrant_hubness import HubnessQdrantClient, QdrantStore
from tests.support.galleries import plain_collection, vectors

DIM, ROWS = 8, 60
URI = "shop.db"


@pytest.fixture(scope="module")
def bank():
    return vectors(np.random.default_rng(5), 40, DIM)


@pytest.fixture(scope="module")
def client(tmp_path_factory, bank):
    """A HubnessClient, with the plain collection `products` and its corrected copy `products_hubness`."""
    path = str(tmp_path_factory.mktemp("shop") / URI)
    plain = connect(path, create=True)
    plain_collection(plain, "products", vectors(np.random.default_rng(4), ROWS, DIM), "COSINE")
    store = MilvusStore(plain)
    migrate(
        store, plan_correction(store, "products", Recipe(bank, estimator=NNN(4))), no_writers=True
    )
    ours = HubnessClient(path)
    yield ours
    ours.close()
    plain.close()
    server_manager_instance.release_server(path)


# -- stores ---------------------------------------------------------------------------------------


def test_a_store_of_our_client_sees_what_is_stored(client):
    """It saw a corrected collection as a plain one, as the client hides the correction."""
    found = status(MilvusStore(client), "products_hubness")
    assert (found.corrected, found.source, found.width) == (True, "products", 16)


def test_a_store_of_our_qdrant_client_sees_what_is_stored_and_leaves_it_open(bank):
    ours = HubnessQdrantClient(":memory:")
    ours.create_collection(
        "products", vectors_config=models.VectorParams(size=DIM, distance="Cosine")
    )
    ours.upload_collection(
        "products", vectors(np.random.default_rng(4), ROWS, DIM), ids=range(ROWS)
    )
    store = QdrantStore(ours)
    migrate(
        store, plan_correction(store, "products", Recipe(bank, estimator=NNN(4))), no_writers=True
    )
    assert status(QdrantStore(ours), "products_hubness").corrected
    del store
    assert len(ours.query_points("products_hubness", query=bank[0].tolist(), limit=3).points) == 3
    ours.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            URI,
            "MilvusStore needs a client, not the address 'shop.db': pass MilvusStore(connect('shop.db'))",
        ),
        (
            AsyncMilvusClient,
            "MilvusStore needs a MilvusClient, not AsyncMilvusClient: pass MilvusStore(connect(uri))",
        ),
        (
            AsyncHubnessClient,
            "MilvusStore needs a MilvusClient, not AsyncHubnessClient: pass MilvusStore(connect(uri))",
        ),
        (None, "MilvusStore needs a MilvusClient, not NoneType: pass MilvusStore(connect(uri))"),
    ],
)
def test_a_store_of_something_else_says_how_to_make_one(given, said):
    given = object.__new__(given) if isinstance(given, type) else given
    with pytest.raises(InvalidInput) as refused:
        MilvusStore(given)
    assert str(refused.value) == said


@pytest.mark.parametrize("given", ["http://localhost:6333", AsyncQdrantClient(":memory:"), None])
def test_a_qdrant_store_of_something_else_says_how_to_make_one(given):
    with pytest.raises(InvalidInput, match=r"^QdrantStore needs a .*: pass QdrantStore\(connect\("):
        QdrantStore(given)


def jobs():
    """The public functions that take a database, by name."""
    for name in dir(milvus_hubness):
        function = getattr(milvus_hubness, name)
        if (
            inspect.isfunction(function)
            and next(iter(inspect.signature(function).parameters), "") == "database"
        ):
            yield name, function


JOBS = dict(jobs())


def test_these_jobs_take_a_database():
    assert {
        "adopt", "clean", "cutover", "diagnose", "disable", "enable", "migrate",
        "plan_correction", "refresh", "resume", "rollback", "status", "tune",
    } <= JOBS.keys()  # fmt: skip


@pytest.mark.parametrize("form", ["uri", "path", "plain", "ours", "store"])
def test_a_job_takes_what_a_user_of_pymilvus_has(form, tmp_path, bank):
    """The whole way, by each form; a connection that a job opens is closed again."""
    path = tmp_path / URI
    plain = connect(str(path), create=True)
    plain_collection(plain, "products", vectors(np.random.default_rng(4), ROWS, DIM), "COSINE")
    plain.create_alias("products", "live")
    np.save(tmp_path / "past.npy", bank)
    ours = HubnessClient(str(path))
    database = {
        "uri": str(path), "path": path, "plain": plain, "ours": ours, "store": MilvusStore(plain),
    }[form]  # fmt: skip
    banks = [tmp_path / "past.npy", str(tmp_path / "past.npy"), bank.tolist()]

    plan = plan_correction(
        database, "products", Recipe(banks[0], estimator=NNN(4)), Copy(alias="live")
    )
    migrate(database, plan, no_writers=True)
    assert status(database, "live").corrected
    assert refresh(database, "live", Recipe(banks[1], verdict="skip")).action == "none"
    assert diagnose(database, "live", banks[2]).title == "products_hubness"
    assert (
        rollback(database, "live", options=MigrationOptions(no_writers=True)).source == "products"
    )
    clean(database, "products", drop="products_hubness")
    assert not status(database, "live").corrected
    enabled = plan_correction(
        database, "products", Recipe(banks[0], estimator=NNN(4), verdict="skip"), Beside()
    )
    enable(database, enabled, client_ttl=0)
    disable(database, "products")

    # Neither a client of the user nor another of the same address is closed.
    assert "products" in plain.list_collections()
    assert ours.search("live", [bank[0]], limit=1)[0]
    plain.close()
    ours.close()
    server_manager_instance.release_server(str(path))


def test_a_connection_that_a_job_opens_is_closed_even_if_it_fails(tmp_path, monkeypatch):
    address = str(tmp_path / URI)
    client = connect(address, create=True)
    plain_collection(client, "products", vectors(np.random.default_rng(4), 9, DIM), "COSINE")
    closed = []
    monkeypatch.setattr(
        PlainClient, "close", lambda self: (closed.append(self), MilvusClient.close(self))
    )
    status(address, "products")
    assert len(closed) == 1
    with pytest.raises(CollectionNotFound):
        status(address, "nothing")
    assert len(closed) == 2
    status(client, "products")
    assert len(closed) == 2
    client.close()
    server_manager_instance.release_server(address)


def test_a_mistyped_path_is_no_empty_database(tmp_path):
    with pytest.raises(ServerUnavailable, match=r"shpo\.db"):
        status(str(tmp_path / "shpo.db"), "products")
    assert not (tmp_path / "shpo.db").exists()


@pytest.mark.parametrize("name", JOBS)
def test_a_job_without_a_database_says_what_it_takes(name):
    """Where a client cannot be used, it was AttributeError: no attribute 'info'."""
    names = [
        p.name for p in inspect.signature(JOBS[name]).parameters.values() if p.default is p.empty
    ][1:]
    arguments = [None for each in names if each not in ("options", "changes")]
    keywords = (
        {"renamed_from": "x"} if name == "adopt" else {"drop": "x"} if name == "clean" else {}
    )
    arguments = arguments[: len(arguments) - len(keywords)]
    remedies = {
        "http://root:sesame@:1x": "the address http://***@:1x is invalid",
        AsyncMilvusClient: "not the client AsyncMilvusClient: pass a MilvusClient, or the URI",
        AsyncHubnessClient: "not the client AsyncHubnessClient: pass a MilvusClient, or the URI",
        QdrantClient(":memory:"): "not the client QdrantClient: pass QdrantStore(client)",
    }
    for given, remedy in remedies.items():
        value = object.__new__(given) if isinstance(given, type) else given
        with pytest.raises(InvalidInput) as refused:
            JOBS[name](value, *arguments, **keywords)
        assert remedy in str(refused.value)
        assert "sesame" not in str(refused.value)


def test_stores_are_accepted(client):
    protocols.expect_store(MilvusStore(client))


# -- vectors of torch -----------------------------------------------------------------------------

TENSORS = {
    "bfloat16": lambda rows: torch.tensor(rows).bfloat16(),
    "requires_grad": lambda rows: torch.tensor(rows).requires_grad_(),
    "float64": lambda rows: torch.tensor(rows).double(),
    "a graph of gradients": lambda rows: torch.tensor(rows).requires_grad_() * 1,
}


def as_numpy(tensor):
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "in a list"])
def test_tensors_search_and_are_written_as_their_numbers(client, bank, kind, listed):
    tensor = TENSORS[kind](bank[:2])
    data = list(tensor) if listed else tensor
    expected = client.search("products_hubness", as_numpy(tensor), limit=3)
    assert [hits.ids for hits in client.search("products_hubness", data, limit=3)] == [
        hits.ids for hits in expected
    ]
    request = AnnSearchRequest(data=list(data), anns_field="vector", param={}, limit=3)
    merged = client.hybrid_search("products_hubness", [request], RRFRanker(), limit=3)
    assert [hits.ids for hits in merged] == [hits.ids for hits in expected]
    pages = client.search_iterator("products_hubness", data[:1], batch_size=3)
    assert [hit["id"] for hit in pages.next()] == expected[0].ids
    pages.close()
    client.upsert("products_hubness", [{"id": 900, "vector": data[0], "group": 1}])
    [row] = client.get("products_hubness", [900])
    np.testing.assert_allclose(row["vector"], as_numpy(tensor)[0], rtol=1e-6)
    client.delete("products_hubness", [900])
    np.testing.assert_array_equal(QueryBank(data).vectors, as_numpy(tensor))


def test_complex_tensors_are_refused(client, bank):
    tensor = torch.tensor(bank[:1]).to(torch.complex64)
    for data in (tensor, list(tensor)):
        with pytest.raises(InvalidInput, match="real numbers"):
            client.search("products_hubness", data, limit=3)
        with pytest.raises(InvalidInput, match="real numbers"):
            QueryBank(data)


# -- names of arguments ---------------------------------------------------------------------------

MISTYPED = {
    "strenght": ("strength", lambda c, q, **o: c.search("products_hubness", q, **o)),
    "Strength": (
        "strength",
        lambda c, q, **o: c.hybrid_search("products_hubness", [], RRFRanker(), **o),
    ),
    "profil": ("profile", lambda c, q, **o: c.search_iterator("products_hubness", q, **o)),
    "with_raw_scores": ("with_raw_score", lambda c, q, **o: c.search("products_hubness", q, **o)),
    "candidate": ("candidates", lambda c, q, **o: c.match("products_hubness", q, **o)),
    "biass": ("bias", lambda c, q, **o: c.insert("products_hubness", [], **o)),
    "bais": ("bias", lambda c, q, **o: c.upsert("products_hubness", [], **o)),
    "state_tll": ("state_ttl", lambda c, q, **o: HubnessClient("shop.db", **o)),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistyped_argument_is_not_ignored(client, bank, name):
    """pymilvus ignores arguments that it does not know: strenght=0 searched at full strength."""
    meant, call = MISTYPED[name]
    with pytest.raises(InvalidParameter) as refused:
        call(client, bank[:1], **{name: 0})
    assert (refused.value.message, isinstance(refused.value, MilvusException)) == (
        f"unknown argument {name!r}: did you mean {meant!r}?",
        True,
    )


def test_further_arguments_of_pymilvus_are_not_taken_for_ours(client, bank):
    further = {
        "consistency_level": "Strong",
        "group_by_field": "group",
        "round_decimal": 3,
        "strict_cast": True,
    }
    assert client.search("products_hubness", bank[:1], limit=3, **further)
    assert client.search("products_hubness", bank[:1], limit=3, ignore_growing=True)


async def test_a_mistyped_argument_of_a_query_of_qdrant():
    ours = HubnessQdrantClient(":memory:")
    with pytest.raises(InvalidParameter, match="did you mean 'strength'"):
        ours.query_points("products", query=[1.0], strenght=0)
    with pytest.raises(InvalidParameter, match="did you mean 'profile'"):
        ours.query_batch_points("products", [], profiles="image")
    ours.close()


# -- banks and estimators -------------------------------------------------------------------------


def test_a_bank_may_be_a_file_everywhere(client, bank, tmp_path, monkeypatch):
    """CorrectionConfig("file.npy") was accepted, and failed in the middle of create_collection."""
    np.save(tmp_path / "past.npy", bank)
    monkeypatch.chdir(tmp_path)
    store = MilvusStore(client)
    calls: list[typing.Callable[[object], object]] = [
        CorrectionConfig,
        lambda path: CorrectionConfig(Recipe(bank, target_bank=path)),
        lambda path: plan_correction(store, "products", path),
        lambda path: plan_correction(store, "products", path, Beside()),
        lambda path: RefreshOptions(recipe=path),
        QueryBank.of,
    ]
    for path in ("past.npy", tmp_path / "past.npy"):
        for call in calls:
            call(path)
    for call in calls:
        with pytest.raises(UnreadableFile, match=r"nothing\.npy: no such file"):
            call(tmp_path / "nothing.npy")


def test_a_bank_may_be_a_column_of_a_table(bank):
    table = pa.table({"text": ["q"] * len(bank), "embedding": bank.tolist()})
    columns = (
        table["embedding"],
        table["embedding"].combine_chunks(),
        pa.FixedSizeListArray.from_arrays(pa.array(bank.ravel()), DIM),
        np.array([*map(list, bank), None], object)[:-1],
        table.to_pandas()["embedding"] if find_spec("pandas") else bank,
    )
    for column in columns:
        assert np.array_equal(QueryBank.of(column).vectors, bank)
    for rows, message in (
        ([[1.0, 2.0], None], "the bank has None in place of a vector: see row 1"),
        ([[1.0, 2.0], [1.0]], "the bank has 1 numbers in row 1 and 2 in row 0"),
        ([["a", "b"], ["c", "d"]], "the bank must hold real numbers"),
    ):
        with pytest.raises(InvalidInput, match=message):
            QueryBank.of(pa.array(rows))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("csls", "an estimator is needed, not the text 'csls': pass CSLS()"),
        (CSLS, "an estimator is needed, not its class: pass CSLS()"),
        (16, "an estimator is needed, such as NNN(k=16), not 16"),
    ],
)
def test_something_in_place_of_an_estimator_says_how_to_make_one(client, bank, given, said):
    store = MilvusStore(client)
    calls = [
        lambda: CorrectionConfig(Recipe(bank, estimator=given)),
        lambda: plan_correction(store, "products", Recipe(bank, estimator=given)),
        lambda: plan_correction(store, "products", Recipe(bank, estimator=given), Beside()),
        lambda: RefreshOptions(recipe=Recipe(estimator=given)),
    ]
    for call in calls:
        with pytest.raises(InvalidInput) as refused:
            call()
        assert str(refused.value) == said


def test_jobs_run_on_a_store_of_our_client(client, bank):
    store = MilvusStore(client)
    done = enable(
        store,
        plan_correction(store, "products", Recipe(bank, estimator=NNN(4)), Beside()),
        client_ttl=0,
    )
    assert done.rows == ROWS
    milvus_hubness.disable(store, "products")
