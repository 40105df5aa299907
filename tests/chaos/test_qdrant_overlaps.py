"""Two jobs overlap on a Qdrant collection while an application writes: no write of HubnessQdrantClient is undone."""

import pytest

from tests.chaos.overlaps import Trial, run_trial
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


def test_a_server_serves_them_too(tmp_path):
    if reason := QdrantServer.unavailable():
        pytest.skip(reason)
    with qdrant("qdrant-server") as uri:
        outcome = run_trial(Trial(5, "refresh", "qdrant-server", "take over"), uri, tmp_path)
    assert not outcome.problem, outcome.line
