"""The recall gate: what is found is counted against a float64 oracle, and what it promises is kept."""

import json

import faiss
import numpy as np
import pytest

from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.kernels.ann import DEFAULTS, AnnIndex, IndexSpec
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.quality import recall
from milvus_hubness.quality.recall import (
    MeasuredIndex,
    RecallSample,
    affordable_rows,
    measure_recall,
)
from tests.support.galleries import METRICS, nnn, similarity

SMALL = {"M": 8, "efConstruction": 60}
FORMS = ("raw", "stored")


@pytest.fixture(autouse=True)
def one_thread():
    """So that the same graph is built again."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def gallery(rows=2_000, dim=24, queries=150, spread=0.1, seed=0):
    """(vectors, biases, queries): Gaussian rows of various lengths, biases with mean 0."""
    rng = np.random.default_rng(seed)
    items = rng.normal(size=(rows, dim)) * rng.uniform(0.7, 1.3, (rows, 1)) / np.sqrt(dim)
    asked = rng.normal(size=(queries, dim)) / np.sqrt(dim)
    biases = spread * rng.normal(size=rows)
    return (
        items.astype(np.float32),
        (biases - biases.mean()).astype(np.float32),
        asked.astype(np.float32),
    )


def oracle(found, scores, k):
    """Recall by comparing sets, in float64."""
    best = np.argsort(-scores, axis=1)[:, :k]
    return np.mean(
        [len(set(a) & set(b)) / k for a, b in zip(found.tolist(), best.tolist(), strict=True)]
    )


@pytest.mark.parametrize("metric", METRICS)
def test_flat_finds_everything_in_every_form(metric):
    vectors, biases, queries = gallery()
    gate = measure_recall(
        Layout(24, metric), RecallSample(vectors, biases, queries), MeasuredIndex("FLAT", {})
    )
    assert [getattr(gate, form) for form in FORMS] == [(1.0, 1.0, 1.0)] * 2
    assert (gate.search_parameter, gate.value, gate.needed) == (None, None, None)


def test_flat_finds_everything_among_duplicates():
    vectors, biases, queries = gallery(rows=200)
    twice = np.vstack([vectors, vectors]), np.r_[biases, biases]
    assert (
        measure_recall(
            Layout(24, "COSINE"), RecallSample(*twice, queries), MeasuredIndex("FLAT", {})
        ).stored.low
        == 1
    )


@pytest.mark.parametrize("metric", METRICS)
def test_recalls_are_those_of_a_float64_oracle(metric):
    vectors, biases, queries = gallery()
    layout = Layout(24, metric)
    gate = measure_recall(
        layout, RecallSample(vectors, biases, queries), MeasuredIndex("HNSW", SMALL, value=12)
    )
    spec = IndexSpec.of("HNSW", SMALL)
    scores = similarity(queries, vectors, metric)
    unit = (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if metric == "COSINE" else vectors
    )
    raw = AnnIndex(unit, spec, metric="L2" if metric == "L2" else "IP").search(queries, 10, 12)
    fitted = measured_on(layout, vectors, queries)
    stored = AnnIndex(fitted.augment(vectors, biases), spec, metric="IP").search(
        fitted.encode_queries(queries), 10, 12
    )
    assert gate.raw.estimate == pytest.approx(oracle(raw, scores, 10), abs=1e-3)
    assert gate.stored.estimate == pytest.approx(oracle(stored, scores - biases, 10), abs=1e-3)
    for form in FORMS:
        interval = getattr(gate, form)
        assert 0.2 < interval.low < interval.estimate < interval.high < 1


def test_items_of_varying_lengths_are_measured_as_they_will_be_stored():
    rng = np.random.default_rng(2)
    direction = rng.normal(size=24)
    items, bank = (
        (rng.normal(size=(count, 24)) + np.outer(rng.gamma(1, 0.6, count), direction)).astype(
            np.float32
        )
        for count in (2_000, 150)
    )
    biases = nnn(bank, items, "IP", 16, 0.75)
    biases = (biases - biases.mean()).astype(np.float32)
    by_length, without = (
        measure_recall(
            Layout(24, "IP"),
            RecallSample(items, biases, bank),
            MeasuredIndex("HNSW", SMALL, value=64, length_pull=length_pull),
        )
        for length_pull in (True, False)
    )
    assert by_length.raw == without.raw
    assert by_length.stored.estimate > by_length.raw.estimate - 0.01
    assert by_length.stored.estimate > without.stored.estimate + 0.1


def test_cell_columns_are_measured_as_they_will_be_stored():
    vectors, biases, queries = gallery()
    layout = measured_on(
        Layout(24, "IP", multiple_of=64), vectors, np.tile(queries, (4, 1)), locality_hints=True
    )
    locality_hints = np.random.default_rng(4).normal(
        size=(len(vectors), layout.locality_hint_count)
    )
    params = {"nlist": 40}
    gate = measure_recall(
        layout,
        RecallSample(vectors, biases, queries, locality_hints=locality_hints),
        MeasuredIndex("IVF_FLAT", params, value=4),
    )
    stored = AnnIndex(
        layout.augment(vectors, biases, locality_hints),
        IndexSpec.of("IVF_FLAT", params),
        metric="IP",
    )
    found = stored.search(layout.encode_queries(queries), 10, 4)
    wanted = oracle(found, similarity(queries, vectors, "IP") - biases, 10)
    assert gate.stored.estimate == pytest.approx(wanted, abs=1e-3)
    without = measure_recall(
        layout, RecallSample(vectors, biases, queries), MeasuredIndex("IVF_FLAT", params, value=4)
    )
    assert abs(without.stored.estimate - wanted) > 0.01


@pytest.mark.parametrize(("metric", "spread"), [("COSINE", 8), ("L2", 0.3)])
def test_a_wide_bias_costs_recall_and_needed_is_what_wins_it_back(metric, spread):
    vectors, _, queries = gallery()
    biases = spread * np.random.default_rng(1).uniform(-1, 1, len(vectors))
    sample = RecallSample(vectors, biases, queries)

    def measured(value):
        index = MeasuredIndex("HNSW", SMALL, value, graph_hint=False)
        return measure_recall(Layout(24, metric), sample, index)

    gate = measured(20)
    assert gate.stored.high < gate.raw.low
    assert gate.search_parameter == "ef"
    assert gate.needed is not None
    assert 20 < gate.needed <= recall.LIMIT * 20
    standard_error = (gate.raw.high - gate.raw.low) / 2
    needed, less = (measured(gate.needed - by).stored.estimate for by in (0, 1))
    assert needed >= gate.raw.estimate - standard_error
    assert less < gate.raw.estimate


def test_nothing_need_change_where_nothing_is_lost():
    vectors, _, queries = gallery()
    gate = measure_recall(
        Layout(24, "IP"),
        RecallSample(vectors, np.zeros(2_000), queries),
        MeasuredIndex("IVF_FLAT", {"nlist": 20}),
    )
    assert (gate.search_parameter, gate.value, gate.needed) == ("nprobe", 8, 8)


@pytest.mark.parametrize(
    ("rows", "total", "nlist"), [(1_000, 1_000, 40), (1_000, 4_000, 10), (50, 10**6, 1)]
)
def test_cells_of_a_sample_hold_as_many_rows_as_those_of_the_whole(rows, total, nlist):
    vectors, biases, queries = gallery(rows=rows)
    gate = measure_recall(
        Layout(24, "IP"),
        RecallSample(vectors, biases, queries),
        MeasuredIndex("IVF_FLAT", {"nlist": 40}),
        rows_total=total,
    )
    assert gate.index_params == {"nlist": nlist}
    assert gate.rows == rows


def test_rows_drawn_here_shrink_nlist_too():
    vectors, biases, queries = gallery(rows=1_000)
    gate = measure_recall(
        Layout(24, "IP"),
        RecallSample(vectors, biases, queries),
        MeasuredIndex("IVF_SQ8", {"nlist": "40"}),
        at_most=250,
    )
    assert (gate.rows, gate.index_params) == (250, {"nlist": 10})


@pytest.mark.parametrize(
    ("index_type", "kind", "params"),
    [
        ("", "HNSW", {"M": 18, "efConstruction": 240}),
        ("AUTOINDEX", "HNSW", {"M": 18, "efConstruction": 240}),
        ("DISKANN", "HNSW", {"M": 30, "efConstruction": 360}),
        ("GPU_CAGRA", "HNSW", {"M": 30, "efConstruction": 360}),
        ("SCANN", "IVF_FLAT", {"nlist": 4}),
        ("GPU_IVF_FLAT", "IVF_FLAT", {"nlist": 4}),
        ("GPU_IVF_PQ", "IVF_PQ", {"nlist": 4, "m": 4, "nbits": 7}),
        ("GPU_BRUTE_FORCE", "FLAT", {}),
    ],
)
def test_what_cannot_be_built_is_measured_as_its_nearest_relative_and_says_so(
    index_type, kind, params
):
    vectors, biases, queries = gallery(rows=200, queries=20)
    given = {"nlist": 4, "m": 4} if "nlist" in params else {}
    gate = measure_recall(
        Layout(24, "COSINE"),
        RecallSample(vectors, biases, queries),
        MeasuredIndex(index_type, given),
    )
    assert (gate.index_type, gate.measured_as, gate.index_params) == (index_type, kind, params)


@pytest.mark.parametrize("metric", ["IP", "L2"])
@pytest.mark.parametrize("index_type", sorted(DEFAULTS))
def test_every_kind_is_built_and_finds_most(index_type, metric):
    rows, _, queries = gallery(rows=600, queries=40)
    params = {"M": 8, "efConstruction": 60, "nlist": 4, "m": 24, "nbits": 6}
    spec = IndexSpec.of(index_type, params)
    found = AnnIndex(rows, spec, metric=metric).search(queries, 10, 40)
    assert oracle(found, similarity(queries, rows, metric), 10) > 0.75
    assert (
        measure_recall(
            Layout(24, "IP", BiasSlots(2), 48),
            RecallSample(*gallery(200)),
            MeasuredIndex(index_type, params),
        ).measured_as
        is None
    )


def test_a_sample_is_drawn_where_building_would_take_long():
    spec = IndexSpec.of("HNSW", {"M": 16, "efConstruction": 200})
    assert affordable_rows(512, spec) == 4_882
    assert (
        affordable_rows(16, spec)
        == affordable_rows(512, IndexSpec.of("IVF_FLAT", {}))
        == recall.ROWS
    )


def test_rows_without_a_bias_are_left_out():
    vectors, biases, queries = gallery(rows=300)
    vectors[7], queries[3] = 0, 0
    gate = measure_recall(
        Layout(24, "COSINE"), RecallSample(vectors, biases, queries), MeasuredIndex("FLAT", {})
    )
    assert (gate.rows, gate.queries) == (299, 149)


def test_the_finding_is_plain_data():
    vectors, biases, queries = gallery(rows=300)
    told = measure_recall(
        Layout(24, "IP"), RecallSample(vectors, biases, queries), MeasuredIndex("hnsw", SMALL)
    ).to_dict()
    assert json.loads(json.dumps(told)) == told
    assert set(told["raw"]) == {"estimate", "low", "high"}
    assert (told["value"], told["search_parameter"], told["measured_as"]) == (16, "ef", None)


def test_wrong_arguments_are_refused():
    vectors, biases, queries = gallery(rows=100)
    layout = Layout(24, "IP")
    with pytest.raises(InvalidInput, match="two valid rows"):
        measure_recall(
            layout, RecallSample(vectors, biases, queries[:1]), MeasuredIndex("FLAT", {})
        )
    with pytest.raises(InvalidParameter, match="ef must be a whole number of at least 10"):
        measure_recall(
            layout, RecallSample(vectors, biases, queries), MeasuredIndex("HNSW", SMALL, value=9)
        )
    with pytest.raises(InvalidParameter, match="does not divide the width"):
        measure_recall(
            layout, RecallSample(vectors, biases, queries), MeasuredIndex("IVF_PQ", {"m": 7})
        )
    with pytest.raises(InvalidParameter, match="sq_type"):
        measure_recall(
            layout,
            RecallSample(vectors, biases, queries),
            MeasuredIndex("HNSW_SQ", {"sq_type": "SQ5"}),
        )
    with pytest.raises(InvalidParameter, match="nlist"):
        measure_recall(
            layout,
            RecallSample(vectors, biases, queries),
            MeasuredIndex("IVF_FLAT", {"nlist": "many"}),
        )
