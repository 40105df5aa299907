"""Biases by the database's own search over the bank are those that are computed beside it."""

import pytest

from milvus_hubness import CSLS, NNN, InvalidParameter, QueryBank, Sinkhorn, refresh
from tests.congruence.test_refresh import ITEMS, Corrected
from tests.galleries import METRICS


@pytest.mark.parametrize("metric", METRICS)
def test_the_server_tells_the_biases(backend, monkeypatch, metric):
    here = Corrected(backend, metric)
    asked = []
    real = type(here.store).bank_scores

    def counted(self, reference, rows, k):
        asked.append((len(rows), k))
        return real(self, reference, rows, k)

    monkeypatch.setattr(type(here.store), "bank_scores", counted)
    done = refresh(
        here.store, here.name, bank=QueryBank(here.other), estimator=NNN(6), engine="server", force=True
    )
    assert (done.mode, done.scanned) == ("full", ITEMS)
    assert sum(rows for rows, _ in asked) == ITEMS
    here.assert_scores(here.other, 6)
    here.make_pending([3, 50])
    asked.clear()
    assert refresh(here.store, here.name, engine="server").written == 2
    assert asked[0] == (2, 6)
    here.assert_scores(here.other, 6)
    refresh(here.store, here.name, estimator=CSLS(4), engine="server", force=True)
    here.assert_scores(here.other, 4, alpha=0.5)


def test_what_the_server_cannot_tell(lite):
    here = Corrected(lite)
    with pytest.raises(InvalidParameter, match="NNN and CSLS"):
        refresh(here.store, here.name, estimator=Sinkhorn(), engine="server", force=True)
    with pytest.raises(InvalidParameter, match="engine is"):
        refresh(here.store, here.name, estimator=NNN(3), engine="cluster", force=True)
