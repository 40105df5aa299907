"""What an application is to be granted for a copy, without a database."""

from types import SimpleNamespace

import pytest

from milvus_hubness.errors import StoreError
from milvus_hubness.jobs.migration.rights import (
    COPIES,
    ApplicationRights,
    expect_rights,
    try_rights,
)
from milvus_hubness.jobs.store.ownership import LEDGER

MIGRATION = SimpleNamespace(
    source="products", target="products_hubness", bank_collection="products__bank"
)


class User:
    def __init__(self, **granted):
        self._granted = {name: set(rights.split()) for name, rights in granted.items()}

    def denied(self, collection, rights):
        return [right for right in rights if right not in self._granted.get(collection, ())]


def tried(user, *aliases):
    return try_rights(user, MIGRATION, ["products", *aliases])


def test_a_user_who_searches_needs_the_same_on_the_copy():
    user = User(products="Search Query")
    assert tried(user) == ApplicationRights(
        ("Search", "Query"), {"products_hubness": ("Query", "Search")}
    )
    granted = User(products="Search Query", products_hubness="Search Query")
    assert tried(granted).lacks == {}


def test_a_user_who_writes_needs_the_bank_the_ledger_and_dual_writes():
    result = tried(User(products="Insert", products_hubness="Insert"))
    assert result.has == ("Insert",)
    assert result.lacks == {
        "products": ("Query",),
        "products_hubness": ("Delete", "Upsert"),
        "products__bank": ("GetLoadState", "Query"),
        LEDGER: ("GetLoadState", "IndexDetail", "Query"),
    }
    everything = "Search Query Insert Upsert Delete GetLoadState IndexDetail"
    names = ("products", "products_hubness", "products__bank", LEDGER)
    assert tried(User(**dict.fromkeys(names, everything))).lacks == {}


def test_rights_on_any_name_of_the_source_count():
    """Milvus before 2.6.9 asks for a grant on the name of the request."""
    result = tried(User(live="Search", products_hubness="Search"), "live")
    assert result == ApplicationRights(("Search",), {"products": ("Search",)})


def test_a_user_without_any_right_on_the_source_lacks_nothing_for_the_copy():
    assert tried(User(products_hubness="Search")) == ApplicationRights((), {})


def test_a_copy_needs_the_rights_of_every_copy_and_those_of_its_partitions():
    plain = SimpleNamespace(name="products", partitions=(None,))
    parted = SimpleNamespace(name="products", partitions=("a", "b"))
    user = User(products_hubness=" ".join(COPIES))
    expect_rights(user, plain, "products_hubness")
    with pytest.raises(
        StoreError, match="grant CreatePartition, as `milvus-hubness grants products"
    ):
        expect_rights(user, parted, "products_hubness")
    with pytest.raises(StoreError, match="grant CreateAlias, CreateCollection"):
        expect_rights(User(), plain, "products_hubness")


def test_where_no_rights_can_be_tried_a_copy_goes_on():
    expect_rights(object(), SimpleNamespace(name="products", partitions=(None,)), "copy")
