"""What the pages of the product show in tests: diagnoses, outcomes of a service, and trainings."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import numpy as np

from milvus_hubness.extras.quari.checkpoint import Epoch
from milvus_hubness.quality.data_faults import Fault
from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.reconcile import Course, Reconciliation
from milvus_hubness.serve.worker import CollectionView, ServiceView, Standing
from tests.support.diagnoses import diagnose

AT = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)


def diagnosis(n_items=60, n_queries=80, evil="plain", **options):
    """A diagnosis of random vectors. evil: part of every name, value and text of the user."""
    rng = np.random.default_rng(1)
    gallery = rng.normal(size=(n_items, 8))
    positives = rng.integers(n_items, size=n_queries)
    queries = gallery[positives] + rng.normal(size=(n_queries, 8))
    bank = rng.normal(size=(30, 8)) + 0.3
    full = {
        "bank": bank,
        "positives": positives,
        "keys": [f"{evil}{n}" for n in range(n_items)],
        "fields": [{f"{evil}name": evil, "price": n} for n in range(n_items)],
        "query_texts": [f"{evil} query {n}" for n in range(n_queries)],
        "verdict": {"verdict": "apply", "reason": evil},
        "title": f"Shop {evil}",
        "strength": 0.5,
    }
    biases = np.sort(bank @ gallery.T, 0)[-5:].mean(0)
    made = diagnose(queries, gallery, biases, **{**full, **options})
    return replace(
        made, faults=(Fault("zero vectors", f"3 of 60 rows {evil}", "embed them again"),)
    )


def untidy_diagnosis(picture, **options):
    """A diagnosis with every part that a page can have, of long names and values as users have them.

    picture: the path of an image, which every item has.
    """
    rng = np.random.default_rng(2)
    languages = ("German", "Plattdeutsch der Insel Pellworm und der Halligen, unnormiert", "日本語")
    fields = [
        {
            "language": languages[n % 3],
            "url": f"https://shop.test/catalogue/summer/{n}?variant=blue-and-white-striped&size=XL",
            "image": str(picture),
        }
        for n in range(60)
    ]
    options = {
        "bank": rng.normal(size=(60, 8)) + 0.3,
        "keys": [f"sku-{n:06}-a-key-that-has-no-place-to-break-it" for n in range(60)],
        "fields": fields,
        "slice_by": "language",
        "group_by": "language",
        "verdict": {"verdict": "apply weakly", "reason": "R@1 rises by +1.2 points (0.1 to 2.3)"},
        "title": "collection_of_a_customer_with_a_long_name_2026, field image_embedding_of_the_model",
        **options,
    }
    return diagnosis(**options)


def outcomes(count=60, every=timedelta(minutes=30)):
    """A full refresh a night, new rows in between; the last but one night's was refused."""
    found = []
    for number in range(count):
        full = number % 20 == 5
        refused = number == 45
        action = "refused" if refused else "full" if full else "pending" if number % 3 else "none"
        new = 0.24 if refused else 0.11
        found.append(
            Reconciliation(
                at=AT - every * (count - number),
                result="ok",
                action=action,
                message="the bank changed" if full else "bank and parameters are unchanged",
                seconds=12.3,
                rows=1_234_567,
                pending=12,
                scanned=1_234_567 if full else 12,
                written=34_567 if full else 12,
                skipped=1_200_000 if full else 0,
                epoch=number,
                bias_age_seconds=0.0,
                oldest_seconds=every.total_seconds() if number else 0.0,
                excess_answers={"raw": 0.31 + number / 1_000, "old": 0.12, "new": new}
                if full
                else {},
            )
        )
    return tuple(found)


def service_view(*collections, waiting_for=""):
    started = AT - timedelta(days=3)
    return ServiceView("0.1.0", "http://milvus:19530", started, AT, waiting_for, collections)


def collection_view(
    name="products", kept=(), last=None, running=None, failing=None, failures=0, **facts
):
    standing = Standing(
        running=running,
        last=last or (kept[-1] if kept else None),
        last_success=kept[-1].at if kept else None,
        failing=failing,
        failures=failures,
    )
    return CollectionView(
        CollectionTable(name=name, **facts), standing, AT + timedelta(seconds=40), kept
    )


def full_service_view():
    """A service with a collection in each condition: well, at work, failing, and never looked at."""
    trouble = Reconciliation(
        at=AT,
        result="failed",
        message="no Milvus answers at http://milvus:19530: " + "deadline " * 9,
    )
    long_name = "a_collection_with_a_name_that_is_as_long_as_names_of_collections_get_in_the_wild_"
    running = Course(AT, "computing biases", 40_000, 1_200_000)
    return service_view(
        collection_view(kept=outcomes(), field="vector", profile="text"),
        collection_view("videos", outcomes(3, timedelta(seconds=20)), running=running),
        collection_view(2 * long_name, outcomes(9), last=trouble, failing=trouble, failures=3),
        collection_view("songs"),
        waiting_for="the first reconciliation of songs",
    )


def training(epochs=20, scale=1.0):
    """The history of a training whose loss falls and whose recall, times `scale`, stops rising."""
    history = [Epoch(0, None, scale * 0.118, scale * 0.204)]
    for epoch in range(1, epochs + 1):
        rise = 1 - 0.8**epoch
        late = min(0.1, 0.002 * max(0, epoch - 14))
        recall, reciprocal = 0.118 + 0.2 * rise - late, 0.204 + 0.25 * rise - late
        history.append(Epoch(epoch, 5.9 * 0.85**epoch, scale * recall, scale * reciprocal))
    return history


def png(width=64, height=48, colour=(18, 104, 122)):
    """The bytes of an image of one colour."""

    def chunk(name, data):
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    lines = (b"\0" + bytes(colour) * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
