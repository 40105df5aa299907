"""The rights that docs/operations/permissions.md names: each line is run by a user that has exactly these."""

import time
from unittest.mock import Mock

import numpy as np
import pytest
from pymilvus import MilvusClient

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    HubnessClient,
    MilvusStore,
    NotCaughtUp,
    QueryBank,
    Recipe,
    StoreError,
    check,
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
    tune,
)
from milvus_hubness.jobs.migration.rights import try_rights
from milvus_hubness.jobs.refresh.sampling import list_samplings, start_sampling, stop_sampling
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.needed_grants import grant_calls, needed_grants
from milvus_hubness.milvus.pymilvus_private import connection_of
from tests.docs import pages
from tests.milvus.authorization import ALL, Authorized, User, on_2_3_5, requested, rights_in
from tests.support import servers
from tests.support.galleries import plain_collection, vectors

DIM, ITEMS, BANK = 8, 60, 40
READER = "reader"
PAGE = (pages.DOCS / "operations" / "permissions.md").read_text()
LINES = {
    who.replace("`", ""): rights_in(rights)
    for who, rights, *_ in pages.table_rows(PAGE, "Exact rights, and built-in groups")
}


@pytest.fixture(scope="module")
def authorized():
    if reason := servers.MilvusServer.unavailable():
        pytest.skip(reason)
    with servers.MilvusServer(channels=2, authorization=True) as server:
        yield Authorized(server.uri)


@pytest.fixture(scope="module")
def users(authorized):
    """A user for each line of the page, and some with a right too few."""
    ledger = LINES["the same, while a migration runs"]["hubness_ledger"]
    rights = {
        **LINES,
        "no upsert": without(WRITER, "products__bias_b", "Upsert"),
        "no delete": without(WRITER, "products__bias_a", "Delete"),
        "searcher": {ALL: {"DescribeCollection"}, "products": {"Search"}},
        "no index": {ALL: LINES["migrate, bank sample"][ALL] - {"CreateIndex", "CreatePartition"}},
        "no ledger": without("the same, while a migration runs", "hubness_ledger", *ledger),
    }
    return {name: authorized.user(granted) for name, granted in rights.items()}


@pytest.fixture
def shop(authorized, monkeypatch):
    """An uncorrected collection on it."""
    # Chunks after the first ones are inserted.
    monkeypatch.setattr(MilvusStore, "chunk_rows", lambda store, source: 4)
    yield Shop(authorized.root, authorized.plain)
    authorized.clean()


class Shop:
    """The collections of the page, as an administrator makes them."""

    def __init__(self, owner, plain):
        self.owner, self.plain = owner, plain
        rng = np.random.default_rng(3)
        self.items, self.bank = vectors(rng, ITEMS, DIM), vectors(rng, BANK, DIM)
        plain_collection(plain, "products", self.items, "IP")

    def planned(self, user, **switch):
        bank = QueryBank(self.bank)
        return plan_correction(
            user.store(), "products", Recipe(bank, estimator=NNN(8)), Copy(**switch)
        )

    def migrated(self, user=None, **switch):
        user = user or self.owner
        alone = switch.pop("no_writers", False)
        return migrate(user.store(), self.planned(user, **switch), no_writers=alone)

    def enabled(self, user=None):
        user = user or self.owner
        return enable(user.store(), self.planned_enable(user))

    def planned_enable(self, user):
        bank = QueryBank(self.bank)
        return plan_correction(user.store(), "products", Recipe(bank, estimator=NNN(8)), Beside())

    def row(self, key):
        return {"id": key, "vector": self.items[0].tolist(), "group": 7}


def read(client, name, shop):
    client.search(name, data=shop.bank[:2].tolist(), limit=3, output_fields=["group"])
    client.query(name, filter="id < 3", output_fields=["*"])
    client.get(name, [1])


def write(client, name, shop):
    client.insert(name, [shop.row(1_000), shop.row(1_001)])
    client.upsert(name, [shop.row(1_000)])
    client.delete(name, ids=[1_000])
    client.delete(name, filter="id == 1001")


def reads_of_a_copy(shop):
    shop.migrated(alias="shop")
    user = yield
    read(user.client(), "shop", shop)


def reads_beside_a_side_collection(shop):
    shop.enabled()
    user = yield
    read(user.client(), "products", shop)
    # The next refresh moves the searches to the other side collection.
    refresh(shop.owner.store(), "products", Recipe(estimator=NNN(4)), force=True, client_ttl=0)
    read(user.client(), "products", shop)


def sampled_searches(shop):
    shop.migrated(alias="shop")
    start_sampling(shop.owner.store(), "shop", rate=1.0)
    user = yield
    client = user.client()
    client.search("shop", data=shop.bank.tolist(), limit=3)
    # A client that closes waits two seconds for its samples, and a busy server takes longer.
    deadline = time.monotonic() + 30
    while count(shop, "products_hubness__query_samples_vector") < BANK:
        assert time.monotonic() < deadline, "samples were not stored"
        time.sleep(0.1)


def writes_to_a_copy(shop):
    shop.migrated(alias="shop")
    user = yield
    write(user.client(), "shop", shop)


def writes_beside_a_side_collection(shop):
    shop.enabled()
    user = yield
    write(user.client(), "products", shop)
    # A deletion by a filter leaves its bias to the next refresh.
    assert count(shop, "products__bias_a") == ITEMS + 1


def writes_while_a_refresh_runs(shop):
    class Stopping(MilvusStore):
        """The copy is verified, and writes must reach it."""

        def point_alias(self, alias, collection):
            raise StoreError("the connection broke")

    shop.migrated(alias="shop")
    with pytest.raises(StoreError, match="the connection broke"):
        refresh(Stopping(shop.owner.store().client), "shop", QueryBank(shop.bank[:30]))
    user = yield
    write(user.client(), "shop", shop)
    user.client().insert("shop", [shop.row(2_000)])
    assert count(shop, "products_hubness_r2") == ITEMS + 1


def writes_while_a_migration_runs(shop):
    shop.migrated()
    user = yield
    write(user.client(), "products", shop)
    user.client().insert("products", [shop.row(2_000)])
    assert count(shop, "products_hubness") == ITEMS + 1


def plans_and_reports(shop):
    with_ledger(shop)
    user = yield
    shop.planned(user)
    shop.planned_enable(user)
    diagnose(user.store(), "products", QueryBank(shop.bank[:20]), QueryBank(shop.bank[20:]))


def statuses(shop):
    shop.migrated(alias="shop")
    start_sampling(shop.owner.store(), "shop")
    user = yield
    assert status(user.store(), "shop").corrected
    list_samplings(user.store(), "shop")


def verdicts(shop):
    with_ledger(shop)
    user = yield
    tune(user.store(), "products", QueryBank(shop.bank))
    check(user.store(), "products", QueryBank(shop.bank))


def jobs(shop):
    shop.plain.create_partition("products", "further")
    user = yield
    shop.migrated(user, alias="shop", no_writers=True)
    start_sampling(user.store(), "shop")


def refreshes(shop):
    """The second one drops the first copy."""
    shop.plain.create_partition("products", "further")
    shop.migrated(alias="shop")
    if READER not in shop.plain.list_roles():
        shop.plain.create_role(READER)
    for name in ("products_hubness", "shop"):
        shop.plain.grant_privilege(READER, "Collection", "Search", name)
    user = yield
    for size in (30, 35):
        refresh(user.store(), "shop", QueryBank(shop.bank[:size]))
    assert not shop.plain.has_collection("products_hubness")
    granted = {
        each["object_name"]
        for each in shop.plain.describe_role(READER)["privileges"]
        if each["privilege"] == "Search"
    }
    assert granted == {"shop", *(f"products_hubness{end}" for end in ("", "_r2", "_r3"))}


def jobs_that_drop(shop):
    shop.plain.create_partition("products", "further")
    user = yield
    shop.enabled(user)
    assert disable(user.store(), "products") == "products__bias_a"
    shop.migrated(user, rename=True, no_writers=True)
    start_sampling(user.store(), "products")
    stop_sampling(user.store(), "products")
    rollback(user.store(), "products")
    clean(user.store(), "products", drop="products_hubness")


def with_ledger(shop):
    """Have a job leave a ledger."""
    start_sampling(shop.owner.store(), "products")
    stop_sampling(shop.owner.store(), "products")


def count(shop, name):
    [row] = shop.plain.query(name, output_fields=["count(*)"], consistency_level="Strong")
    return row["count(*)"]


SCENARIOS = {
    "search, query and get, on a copy": reads_of_a_copy,
    "the same, beside a side collection": reads_beside_a_side_collection,
    "search, while its queries are sampled": sampled_searches,
    "insert, upsert and delete, on a copy": writes_to_a_copy,
    "the same, with a side collection": writes_beside_a_side_collection,
    "the same, while a refresh runs": writes_while_a_refresh_runs,
    "the same, while a migration runs": writes_while_a_migration_runs,
    "migrate run --plan, enable --plan, diagnose(…)": plans_and_reports,
    "status": statuses,
    "tune, check": verdicts,
    "migrate, bank sample": jobs,
    "refresh, serve": refreshes,
    "enable, disable, bank sample --off, migrate with --rename, rollback and clean": jobs_that_drop,
}
"""What a user with the rights of each line of the page does: after `yield`, with the user that is sent."""


def test_each_line_of_the_page_is_run():
    assert LINES.keys() == SCENARIOS.keys()


def union(*lines):
    """The rights of several lines of the page."""
    rights = {}
    for line in lines:
        for name, privileges in LINES[line].items():
            rights[name] = rights.get(name, set()) | privileges
    return rights


READS = "search, query and get, on a copy"


@pytest.mark.parametrize(
    ("purpose", "lines", "today"),
    [
        ("reader", [READS], {"Search", "Query"}),
        (
            "application",
            [READS, "insert, upsert and delete, on a copy", "the same, while a migration runs"],
            {"Search", "Query", "Insert", "Upsert", "Delete"},
        ),
        (
            "job",
            [
                "migrate, bank sample",
                "refresh, serve",
                "enable, disable, bank sample --off, migrate with --rename, rollback and clean",
            ],
            None,
        ),
    ],
)
def test_the_printed_grants_are_those_of_the_page(purpose, lines, today):
    """And those of today, on the source and on the alias, which 2.3.5 asks for by the name of a request."""
    wanted = union(*lines)
    if today is not None:
        wanted |= {"products": today, "live": today}
    assert needed_grants(purpose, "products", alias="live") == wanted


def test_the_printed_calls_are_those_of_pymilvus():
    """With its own names, each kind of object as Milvus has it."""
    needed = needed_grants("application", "products", newer=True)
    client = Mock(spec=MilvusClient)
    for call in grant_calls("shop", needed):
        exec(call, {"client": client})
    client.create_role.assert_called_once_with("shop")
    granted = [call.args for call in client.grant_privilege.call_args_list]
    assert ("shop", "Global", "DescribeCollection", "*") in granted
    assert ("shop", "Collection", "GetLoadState", "products__bank") in granted
    assert len(granted) == sum(map(len, needed.values()))
    assert not any("Load" in each for each in granted)


@pytest.mark.parametrize(
    "line",
    [
        "search, query and get, on a copy",
        "the same, beside a side collection",
        "insert, upsert and delete, on a copy",
        "the same, while a migration runs",
    ],
)
def test_no_request_of_an_application_needs_more_than_the_page_names(tmp_path, monkeypatch, line):
    """By what pymilvus's protocol declares, on Milvus Lite, which has no users."""
    alone = User(servers.lite_uri(tmp_path), "")
    shop = Shop(alone, connect(alone.uri, create=True))
    steps = SCENARIOS[line](shop)
    next(steps)
    with requested(monkeypatch) as needed:
        # pymilvus would share the connection.
        application = User(alone.uri, "another:token")
        with pytest.raises(StopIteration):
            steps.send(application)
    assert needed
    granted = LINES[line]
    assert lacking(by_grant(on_2_3_5(needed), granted), granted) == {}


@pytest.mark.server
@pytest.mark.parametrize("line", SCENARIOS)
def test_the_rights_of_the_page_are_enough_and_none_is_too_many(shop, users, line, monkeypatch):
    steps = SCENARIOS[line](shop)
    next(steps)
    with requested(monkeypatch) as needed, pytest.raises(StopIteration):
        steps.send(users[line])
    granted = LINES[line]
    asked = by_grant(on_2_3_5(needed), granted)
    assert lacking(asked, granted) == {}
    assert lacking(granted, asked) == {}


def lacking(rights, others):
    """Return those of some rights that are not among others."""
    missing = {name: rights[name] - others.get(name, set()) for name in rights}
    return {name: privileges for name, privileges in missing.items() if privileges}


def by_grant(needed, granted):
    """Return needed rights by the names of the grants."""
    merged = {}
    for name, privileges in needed.items():
        grant = name if name in granted else ALL
        merged.setdefault(grant, set()).update(privileges)
    return merged


@pytest.mark.server
def test_a_rehearsal_names_the_rights_that_an_application_lacks(shop, users):
    migration = shop.migrated()

    def tried(line):
        store = users[line].store()
        return try_rights(store, migration, ["products"])

    assert tried("searcher").has == ("Search",)
    assert tried("searcher").lacks == {"products_hubness": ("Search",)}
    writer = tried("the same, while a migration runs")
    assert writer.has == ("Query", "Insert", "Upsert", "Delete")
    # Those of after the switch, which the line has not.
    assert writer.lacks == {"products_hubness": ("Insert", "Query")}
    lacks = tried("no ledger").lacks[LEDGER]
    assert lacks == ("GetLoadState", "Query")  # the role `public` has IndexDetail
    assert try_rights(shop.owner.store(), migration, ["products"]).lacks == {}
    assert (count(shop, "products"), count(shop, "products_hubness")) == (ITEMS, ITEMS)
    with pytest.raises(StoreError):
        connect(shop.owner.uri, token="shop:wrong")


# -- with a right too few -------------------------------------------------------------------------


WRITER = "the same, with a side collection"


def without(line, collection, *privileges):
    """Return the rights of a line but some on one collection."""
    rights = LINES[line]
    return {**rights, collection: rights[collection] - {*privileges}}


@pytest.mark.server
def test_a_writer_without_a_right_on_the_side_collection_changes_nothing(shop, users):
    """Before, the row was stored, and an insert that was repeated doubled it."""
    shop.enabled()
    for client in (users["no upsert"].client(), users["no upsert"].client()):
        for method in (client.insert, client.upsert):
            with pytest.raises(StoreError, match=r"nothing was written to 'products'.*Upsert"):
                method("products", [shop.row(1_000)])
        client.close()
    assert (count(shop, "products"), count(shop, "products__bias_a")) == (ITEMS, ITEMS)

    client = users["no delete"].client()
    client.insert("products", [shop.row(1_000)])
    with pytest.raises(StoreError, match=r"nothing was written to 'products'.*Delete"):
        client.delete("products", ids=[1_000])
    assert (count(shop, "products"), count(shop, "products__bias_a")) == (ITEMS + 1, ITEMS + 1)


@pytest.mark.server
def test_a_copy_without_a_right_that_it_takes_is_refused_before_anything_is_written(shop, users):
    """It has no partitions to create, so that it may lack the right for that."""
    before = shop.plain.list_collections()
    with pytest.raises(
        StoreError, match=r"so nothing was written: grant CreateIndex, as `milvus-hub"
    ):
        shop.migrated(users["no index"], no_writers=True)
    assert shop.plain.list_collections() == before

    shop.plain.create_partition("products", "further")
    with pytest.raises(StoreError, match=r"grant CreateIndex, CreatePartition, as"):
        shop.migrated(users["no index"], no_writers=True)


@pytest.mark.server
def test_a_refresh_that_may_not_grant_or_drop_says_so_and_goes_on(shop, users, caplog):
    shop.migrated(alias="shop")
    store = users["migrate, bank sample"].store()
    planned = refresh(store, "shop", QueryBank(shop.bank[:30]), plan=True)
    [remark] = planned.copy.remarks
    assert remark.startswith("this user may not read grants, and those on 'products_hubness'")
    assert "once for all, keep the collection in a database of its own" in remark
    for size in (30, 35):
        done = refresh(store, "shop", QueryBank(shop.bank[:size]))
        assert (done.action, done.dropped) == ("full", ())
    assert "the former copy 'products_hubness' stays for now: " in caplog.text
    assert shop.plain.has_collection("products_hubness")
    # Whoever may drop makes up for it.
    last = refresh(users["refresh, serve"].store(), "shop", QueryBank(shop.bank[:32]))
    assert last.dropped == ("products_hubness", "products_hubness_r2")


@pytest.mark.server
def test_a_writer_asks_for_its_rights_once(shop, users, monkeypatch):
    """A later write costs what it did: one request on each of the two collections."""
    shop.enabled()
    user = users[WRITER]
    client = HubnessClient(user.uri, token=user.token)
    client.insert("products", [shop.row(1_000)])
    client.delete("products", ids=[1_000])
    sent = []
    connection = connection_of(client)
    for method in ("insert_rows", "upsert_rows", "delete", "describe_collection"):
        call = getattr(connection, method)

        def noted(collection_name, *args, call=call, method=method, **options):
            sent.append((method, collection_name))
            return call(collection_name, *args, **options)

        monkeypatch.setattr(connection, method, noted)
    client.insert("products", [shop.row(1_001)])
    client.delete("products", ids=[1_001])
    assert sent == [
        ("insert_rows", "products"),
        ("upsert_rows", "products__bias_a"),
        ("delete", "products"),
        ("delete", "products__bias_a"),
    ]


@pytest.mark.server
def test_a_disable_without_the_right_to_drop_is_finished_by_disable(shop, users):
    shop.enabled()
    with pytest.raises(StoreError, match="PrivilegeRenameCollection"):
        disable(users["migrate, bank sample"].store(), "products")
    assert status(shop.owner.store(), "products").leftovers == (
        "products__bias_a",
        "products__bias_b",
    )
    assert disable(shop.owner.store(), "products") == "products__bias_a"
    assert not shop.plain.has_collection("products__bias_a")


@pytest.mark.server
def test_the_migration_names_a_writer_without_rights_on_the_ledger(shop, users):
    client = users["no ledger"].client()
    different = iter(np.random.default_rng(4).normal(size=(1_000, DIM)).tolist())

    class WritesBeside(MilvusStore):
        """Somebody writes between any two passes."""

        def count(self, collection):
            if collection == "products":
                client.upsert("products", [{**shop.row(1), "vector": next(different)}])
            return super().count(collection)

    plan = shop.planned(shop.owner)
    with pytest.raises(NotCaughtUp, match=r"by no dual write.*a client without the rights"):
        migrate(WritesBeside(shop.owner.store().client), plan)
