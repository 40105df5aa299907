"""LinearMaps: that it learns the maps, scores by them, and is saved, loaded and used as any re-ranker."""

import numpy as np
import pytest

from milvus_hubness import LinearMaps, QuariReranker
from milvus_hubness.correction.rerank import Adaptive
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.pairs import Pairs
from milvus_hubness.extras.quari.reranker import Labelled
from milvus_hubness.extras.quari.settings import TrainingSettings
from milvus_hubness.quality.right_items import RightItems

DIM = 8
SETTINGS = TrainingSettings.linear(
    epochs=12,
    batch=50,
    learning_rate=0.03,
    least_rate=6e-4,
    temperature=0.1,
    noise=0.1,
    neighbors=10,
)


def turned(seed, count=300):
    """Pairs whose items are the queries under one rotation, the same for all seeds, with noise."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(DIM, DIM)))[0]
    queries = rng.normal(size=(count, DIM))
    return Pairs(queries, queries @ rotation + 0.2 * rng.normal(size=(count, DIM)))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    path = tmp_path_factory.mktemp("maps") / "maps.safetensors"
    options = {"memory": 0, "path": path, "encoder": "mini", "candidates": 300, "device": "cpu"}
    return LinearMaps.fit(turned(1), SETTINGS, **options), path


def test_maps_find_what_one_rotation_hides(fitted):
    maps, held = fitted[0], turned(2)
    result = Labelled(held.queries, held.gallery, RightItems.of(held.answers)).evaluate(maps)
    assert result["raw"]["R@1"] < 0.1
    assert result["reranked"]["R@1"] > 0.7
    assert isinstance(maps, Adaptive)


def test_scores_are_cosines_of_mapped_vectors(fitted):
    maps, path = fitted
    W, S = (
        Checkpoint.load(path).weights[name].double().numpy() for name in ("query_map", "item_map")
    )
    queries, items = turned(3, 5).queries, turned(4, 30).gallery
    mapped, stored = queries @ W.T, items @ S.T
    lengths = np.outer(np.linalg.norm(mapped, axis=1), np.linalg.norm(stored, axis=1))
    np.testing.assert_allclose(
        maps.scores(queries, [items] * 5), mapped @ stored.T / lengths, atol=1e-5
    )
    direct = maps.direct_queries(queries)
    np.testing.assert_allclose(np.linalg.norm(direct, axis=1), 1, rtol=1e-5)
    wanted = mapped @ S
    np.testing.assert_allclose(
        direct, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5
    )


def test_a_file_is_read_by_either_class(fitted):
    maps, path = fitted
    queries, items = turned(3, 2).queries, turned(4, 9).gallery
    for loaded in (LinearMaps.load(path, encoder="mini", correction=0.5), QuariReranker.load(path)):
        np.testing.assert_array_equal(
            loaded.scores(queries, [items] * 2), maps.scores(queries, [items] * 2)
        )
    checkpoint = Checkpoint.load(path)
    assert checkpoint.config.form == "linear"
    assert len(checkpoint.history) == 13
