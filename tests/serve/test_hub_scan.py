"""The service scans its collections for planted hubs: metric, page and log."""

import logging
import urllib.request

import pytest

from milvus_hubness import (
    Blend,
    Copy,
    MigrationOptions,
    QueryBank,
    Recipe,
    migrate,
    plan_correction,
    refresh,
)
from tests.serve.worlds import Running, config_file
from tests.support.planted import DIM, centroid, gallery

ITEMS, BANK, USERS = gallery(rows=600)


def shop(lite):
    client, name = lite.client(), lite.name("shop")
    client.create_collection(name, dimension=DIM, metric_type="COSINE", consistency_level="Strong")
    client.insert(name, [{"id": i, "vector": row} for i, row in enumerate(ITEMS)])
    alias = lite.name("live")
    plan = plan_correction(
        lite.store(),
        name,
        Recipe(QueryBank(BANK), estimator=Blend(), verdict="skip"),
        Copy(alias=alias),
    )
    migrate(lite.store(), plan, MigrationOptions(no_writers=True))
    return alias


def read(running, path=""):
    with urllib.request.urlopen(f"{running.url}{path}", timeout=5) as answer:
        return answer.read().decode()


def gauge(running, name):
    [line] = [
        line for line in read(running, "/metrics").splitlines() if line.startswith(f"{name}{{")
    ]
    return float(line.split()[-1])


@pytest.mark.parametrize("scanned", [True, False])
def test_planted_rows_are_reported(lite, tmp_path, caplog, scanned):
    alias = shop(lite)
    hubs = centroid(USERS, 5)
    lite.hubness_client().insert(
        alias, [{"id": 9000 + i, "vector": row} for i, row in enumerate(hubs)]
    )
    limit = "" if scanned else "hub_scan_rows = 604\n"
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{alias}"\n{limit}'
        'fill = "1d"\nrefresh = "1d"\nclient_ttl = 0\n'
    )
    with (
        caplog.at_level(logging.WARNING, logger="milvus_hubness"),
        Running(config_file(tmp_path, text), refresh, open_store=lite.store) as running,
    ):
        running.wait_for("ready")
        if scanned:
            assert gauge(running, "milvus_hubness_suspicious_rows") == 5
            assert gauge(running, "milvus_hubness_suspicious_rows_ratio") == pytest.approx(5 / 605)
            assert "rows look like planted hubs" in read(running)
            assert "5, 0.83%" in read(running)
            assert "9000" in caplog.text
        else:
            assert "milvus_hubness_suspicious_rows{" not in read(running, "/metrics")
            assert "look like planted hubs" not in caplog.text
