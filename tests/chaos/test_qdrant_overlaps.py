"""Two jobs overlap on a Qdrant collection while an application writes: no write of HubnessQdrantClient is undone."""

import pytest

from tests.chaos.overlaps import NAMES, Trial, late_changes_of_names, run_trial
from tests.chaos.qdrant_overlaps import QDRANT_KINDS, qdrant
from tests.support.servers import QdrantServer

pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", QDRANT_KINDS)
@pytest.mark.parametrize(
    ("backend", "plan", "seed"),
    [("qdrant-strict", "take over", 13), ("qdrant-local", "together", 17)],
)
def test_any_request_is_held(tmp_path, backend, kind, plan, seed):
    with qdrant(backend) as uri:
        outcome = run_trial(Trial(seed, kind, backend, plan), uri, tmp_path)
    assert not outcome.problem, outcome.line


def test_a_copy_is_dropped_after_another_job(tmp_path):
    with qdrant("qdrant-strict") as uri:
        trial = Trial(19, "clean", "qdrant-strict", call=NAMES)
        drops = [
            each
            for each in late_changes_of_names(trial, uri, tmp_path)
            if each.call.startswith("request of DropCollection")
        ]
        assert drops
        for drop in drops:
            outcome = run_trial(drop, uri, tmp_path)
            assert not outcome.problem, outcome.line


def test_a_server_serves_them_too(tmp_path):
    if reason := QdrantServer.unavailable():
        pytest.skip(reason)
    with qdrant("qdrant-server") as uri:
        outcome = run_trial(Trial(5, "refresh", "qdrant-server", "take over"), uri, tmp_path)
    assert not outcome.problem, outcome.line
