"""check without a database: faults, verdict and hubs of arrays and files, as tune and diagnose say."""

import json
from html import unescape

import numpy as np
import pandas as pd
import pytest

from milvus_hubness import Judgements, MultiVectors, QueryBank, Recipe, check
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.jobs.common.judging import FEWEST_ITEMS
from milvus_hubness.quality import tuning
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.reports.tuned import QUICK_ITEMS, QUICK_QUERIES, TuningInputs
from tests.support.galleries import hubby_gallery
from tests.support.pages import assert_accessible


def crowded():
    """Items of which those far along a drift are hubs, queries that drift too, and the item of each."""
    rng = np.random.default_rng(0)
    drift = rng.standard_normal(24)
    items = rng.standard_normal((400, 24)) + np.outer(rng.gamma(1, 0.4, 400), drift)
    answers = rng.integers(0, 400, 900)
    queries = items[answers] + rng.standard_normal((900, 24)) + 0.8 * drift
    return items.astype(np.float32), queries.astype(np.float32), answers


ITEMS, QUERIES, ANSWERS = crowded()
BANK, ASKED, RIGHT = QUERIES[:500], QUERIES[500:], ANSWERS[500:]


@pytest.fixture(scope="module")
def judged():
    return check(ITEMS, recipe=BANK, judgements=Judgements.of(ASKED, RIGHT))


def test_a_few_items_are_not_judged_with_and_without_labels():
    few = ITEMS[: FEWEST_ITEMS - 1]
    judgements = Judgements.of(QUERIES[:60], list(range(30)) * 2)
    for labels in (None, judgements):
        with pytest.raises(
            InvalidInput, match=f"49 items are too few .* {FEWEST_ITEMS} are needed"
        ):
            check(Gallery.of(few, "IP"), recipe=QUERIES[100:200], judgements=labels)


@pytest.mark.long
def test_verdict_and_page_measure_among_all_items_as_float64_does():
    """Also where methods are tried on a part of them, among which more right ones come first."""
    items, asked, right = hubby_gallery(rows=3 * tuning.MOST_ITEMS, queries=1_200)
    pairs = Judgements.of(asked[700:], right[700:])
    told = check(Gallery.of(items, "IP"), recipe=asked[:700], judgements=pairs)
    scores = asked[700:].astype(float) @ items.T.astype(float)
    raw = float((scores.argmax(1) == right[700:]).mean())
    fitted = told.tuning.choice.settled().fit(QueryBank(asked[:700]), gallery=items)
    corrected = scores - told.tuning.strength * fitted.bias(items)
    after = float((corrected.argmax(1) == right[700:]).mean())

    [remark] = told.tuning.remarks
    assert f"and {raw:.1%} among all" in remark
    assert told.tuning.rows[0].value > 1.2 * raw, "the part flatters"
    page = told.diagnosis
    assert (page.value_before, page.value_after) == pytest.approx((raw, after), abs=0.005)
    for gain in (page.gain, told.tuning.interval):
        assert gain.estimate == pytest.approx(after - raw, abs=0.005)


def test_the_verdict_is_that_of_tune(judged):
    layout = Layout(ITEMS.shape[1], "COSINE")
    alone = tuning.tune(
        layout.reduce_queries(BANK),
        layout.reduce_items(ITEMS),
        queries=LabelledQueries.of(layout.reduce_queries(ASKED), RIGHT),
    )
    assert judged.tuning.to_dict() == alone.to_dict()
    assert (judged.verdict, judged.sentence) == (alone.verdict, alone.sentence)
    assert judged.verdict == "apply"
    assert not judged.is_refused
    assert judged.faults == ()


def test_the_page_and_the_verdict_show_the_same_figures_of_the_bank(judged):
    """They take long, and are those on the queries that have labels."""
    assert judged.diagnosis.findings == list(judged.tuning.findings)
    assert judged.diagnosis.bank.real_queries


def test_a_quick_look_keeps_all_right_items_and_says_of_how_many_it_is():
    count = QUICK_ITEMS + 70
    gallery = Gallery.of(np.eye(2, dtype=np.float32)[np.arange(count) % 2], "IP")
    bank = QueryBank(np.ones((QUICK_QUERIES + 9, 2)))
    keys = [3, count - 1]
    judged = Judgements.of(np.ones((2, 2)), keys).within(gallery.keys, "items")
    quick = TuningInputs(gallery, bank, judged=judged).quick(seed=0)
    part = quick.gallery
    assert (len(part.keys), len(quick.bank)) == (QUICK_ITEMS, QUICK_QUERIES)
    assert set(keys) <= set(part.keys)
    np.testing.assert_array_equal(part.vectors, gallery.vectors[part.keys])
    [remark] = quick.remarks
    assert remark.startswith("a quick look at 5,000 of 5,070 items and 1,000 of 1,009 queries")
    small = Gallery.of(ITEMS, "IP")
    all_of_it = TuningInputs(small, QueryBank(BANK)).quick(seed=0)
    assert (all_of_it.is_quick, all_of_it.remarks) == (True, ())


def test_the_page_shows_the_verdict_and_the_method_that_it_is_about(judged, tmp_path):
    assert judged.diagnosis.verdict["sentence"] == judged.sentence
    assert judged.diagnosis.strength == round(judged.tuning.strength, 2)
    gain = judged.diagnosis.gain
    assert gain.estimate == pytest.approx(judged.tuning.interval.estimate, abs=0.05)
    path = judged.save(tmp_path / "hubness.html")
    page = path.read_text("utf-8")
    assert_accessible(page)
    assert judged.sentence[1:] in unescape(page)
    assert "First: the data" not in page
    assert "srcdoc" in judged._repr_html_()
    assert json.loads(json.dumps(judged.to_dict()))["verdict"] == "apply"


def test_files_and_keys_of_their_own(judged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [f"SKU-{number}" for number in range(len(ITEMS))]
    rows = {"id": keys, "embedding": list(map(list, ITEMS.astype(float)))}
    pd.DataFrame(rows).to_parquet("items.parquet")
    np.save("past.npy", BANK)
    pairs = {"embedding": list(map(list, ASKED.astype(float))), "label": [keys[i] for i in RIGHT]}
    pd.DataFrame(pairs).to_json("pairs.jsonl", orient="records", lines=True)
    of_files = check("items.parquet", recipe="past.npy", judgements="pairs.jsonl")
    assert of_files.verdict == judged.verdict
    assert of_files.title == "items.parquet"
    assert of_files.diagnosis.gain == judged.diagnosis.gain
    assert of_files.diagnosis.hubs[0].item.key == f"SKU-{judged.diagnosis.hubs[0].item.key}"


def test_without_labels_no_query_is_corrected_by_itself():
    """The bias of a query's own score would flatter: half of the bank corrects the other half."""
    alone = check(ITEMS, recipe=BANK)
    assert alone.tuning.interval is None
    assert 100 <= alone.diagnosis.n_queries <= 250
    assert any("one half of the bank" in line for line in alone.diagnosis.left_out)
    real = check(ITEMS, recipe=Recipe(BANK, queries=ASKED))
    assert real.diagnosis.n_queries == len(ASKED)
    assert not any("half" in line for line in real.diagnosis.left_out)


def test_faults_come_first_and_grave_ones_refuse(tmp_path):
    items = ITEMS.copy()
    items[:50] = 0
    found = check(items, recipe=BANK, judgements=Judgements.of(ASKED, RIGHT))
    assert [fault.name for fault in found.faults] == ["zero vectors"]
    assert found.is_refused
    page = found.save(tmp_path / "p.html").read_text("utf-8")
    assert_accessible(page)
    assert page.index("50 of 400 rows have a zero vector") < page.index('class="card verdict')
    # The keys of the rest are still those of the rows.
    assert all(hub.item.key >= 50 for hub in found.diagnosis.hubs)


def test_under_each_metric():
    for metric in ("ip", "L2"):
        assert check(Gallery.of(ITEMS, metric), recipe=BANK).diagnosis.n_items == len(ITEMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": None}, "items alone show no hubs: pass past queries as bank"),
        ({"recipe": "samples"}, "bank 'samples' is in a database: name a collection"),
        ({"recipe": Recipe(BANK, gate=5)}, "check takes no gate: leave it out of the recipe"),
        ({"field": "vector"}, "no collection to check: name one"),
        (
            {"judgements": Judgements.of(ASKED, RIGHT), "recipe": Recipe(BANK, queries=ASKED)},
            "leave out the other",
        ),
        ({"source": "http://localhost:19530"}, r"is a database: pass MilvusStore\(connect"),
        ({"source": "shop.db"}, r"is a database: pass MilvusStore\(connect\('shop.db'\)\)"),
        ({"collection": "products"}, "a store is needed"),
        ({"judgements": Judgements.of(ASKED, RIGHT + 1000)}, "go from 0 to 399"),
    ],
)
def test_arguments_that_do_not_go_together_are_one_line(arguments, message):
    with pytest.raises(InvalidInput, match=message) as refused:
        check(**{"source": ITEMS, "recipe": BANK, **arguments})
    assert len(str(refused.value).splitlines()) == 1


def test_keys_of_another_number_than_the_items():
    with pytest.raises(InvalidInput, match="items has 2 keys for 400 items"):
        Gallery.of(ITEMS, keys=[1, 2])


def test_vectors_of_another_model():
    with pytest.raises(DimensionMismatch, match="embed both with one model"):
        check(ITEMS, recipe=QueryBank(BANK[:, :-1]))


def texts(count, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((3, 8)).astype(np.float32) for _ in range(count)]


def test_items_of_several_vectors_have_a_verdict_and_faults_and_no_page():
    documents = texts(300, 1)
    documents[7][:] = 0
    result = check(
        Gallery.of(MultiVectors.of(documents), "IP"), recipe=MultiVectors.of(texts(100, 2))
    )
    assert result.verdict == "leave it alone"
    assert [fault.text for fault in result.faults] == ["1 of 300 rows has a zero vector"]

    among = MultiVectors.of([*texts(90, 2), *documents[8:18]])
    faults = check(Gallery.of(MultiVectors.of(documents), "IP"), recipe=among).faults
    assert "items as queries" in {fault.name for fault in faults}
    with pytest.raises(InvalidInput, match="rows have several vectors each: check without a page"):
        result.diagnosed()
