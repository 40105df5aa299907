"""What a client's log says where a collection was switched to another form behind its back."""

import logging

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    AsyncHubnessClient,
    Copy,
    HubnessClient,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
)
from milvus_hubness.milvus.client.held_errors import HeldErrors, recovered_from, watch_pymilvus
from tests.support.galleries import plain_collection, vectors

DIM = 24


@pytest.fixture
def records(monkeypatch):
    """Of pymilvus and of this package, as an application that logs from INFO on gets them."""
    found = []

    class Keeping(logging.Handler):
        def emit(self, record):
            found.append(record)

    handler = Keeping()
    for name, level in (("pymilvus", logging.ERROR), ("milvus_hubness", logging.INFO)):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "level", level)
        logger.manager._clear_cache()
    yield found
    monkeypatch.undo()
    logging.getLogger("pymilvus").manager._clear_cache()


def row(rng, width=DIM):
    return {"id": 1, "vector": vectors(rng, 1, width)[0], "group": 0}


def test_a_client_that_writes_in_the_new_form_logs_one_line(lite, records):
    client, name, rng = lite.client(), lite.name(), np.random.default_rng(2)
    plain_collection(client, name, vectors(rng, 60, DIM), "COSINE")
    client.create_alias(name, f"{name}_live")
    writer = lite.client(HubnessClient, state_ttl=3_600.0)
    writer.upsert(f"{name}_live", [row(rng)])
    bank = QueryBank(vectors(rng, 40, DIM))
    plan = plan_correction(
        lite.store(), name, Recipe(bank, estimator=NNN(4)), Copy(alias=f"{name}_live")
    )
    migrate(lite.store(), plan, no_writers=True)
    records.clear()
    assert writer.upsert(f"{name}_live", [row(rng)])["upsert_count"] == 1
    [told] = records
    assert (told.name, told.levelname) == ("milvus_hubness", "INFO")
    for words in (f"{name}_live", "expected dim 32, got 24", "sent again"):
        assert words in told.getMessage()
    assert "\n" not in told.getMessage()
    records.clear()
    writer.upsert(f"{name}_live", [row(rng)])
    assert not records
    with pytest.raises(MilvusException):
        writer.upsert(f"{name}_live", [{"id": 1, "group": 0}])
    assert any("Traceback" in each.getMessage() for each in records)
    writer.drop_alias(f"{name}_live")


async def test_an_async_client_too(lite, records):
    client, name, rng = lite.client(), lite.name(), np.random.default_rng(2)
    plain_collection(client, name, vectors(rng, 60, DIM), "COSINE")
    client.create_alias(name, f"{name}_live")
    writer = lite.client(AsyncHubnessClient, state_ttl=3_600.0)
    await writer.upsert(f"{name}_live", [row(rng)])
    bank = QueryBank(vectors(rng, 40, DIM))
    plan = plan_correction(
        lite.store(), name, Recipe(bank, estimator=NNN(4)), Copy(alias=f"{name}_live")
    )
    migrate(lite.store(), plan, no_writers=True)
    records.clear()
    assert (await writer.upsert(f"{name}_live", [row(rng)]))["upsert_count"] == 1
    assert [(each.name, each.levelname) for each in records] == [("milvus_hubness", "INFO")]
    await writer.close()
    client.drop_alias(f"{name}_live")


def test_only_records_of_errors_that_were_recovered_from_are_kept_back(records):
    watch_pymilvus()
    log = logging.getLogger("pymilvus.decorators")
    gone, other = (
        MilvusException(message="expected dim 32, got 24"),
        MilvusException(message="disk is full"),
    )
    with HeldErrors():
        log.error("RPC error: [upsert], %s", gone)
        log.error("RPC error: [query], %s", other)
        log.warning("never seen at this level")
        recovered_from(gone, "products")
    assert [each.getMessage()[:20] for each in records] == [
        "RPC error: [query], ",
        "collection 'products",
    ]
    records.clear()

    def fail():
        with HeldErrors():
            log.error("RPC error: [upsert], %s", gone)
            recovered_from(gone, "products")
            log.error("RPC error: [query], %s", other)
            raise other

    with pytest.raises(MilvusException, match="disk is full"):
        fail()
    assert len(records) == 2
    log.error("outside")
    assert records[-1].getMessage() == "outside"

    recovered_from(gone, "products")
    assert "expected dim 32, got 24" in records[-1].getMessage(), "told at once, outside of a call"
