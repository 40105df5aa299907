"""Results as the last value of a notebook cell: a page where there is one, else a table of facts."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import (
    NNN,
    Copy,
    Judgements,
    Recipe,
    connect,
    diagnose,
    migrate,
    plan_correction,
    rollback,
    status,
    tune,
)
from milvus_hubness.errors import UnreadableFile
from tests.support.galleries import hubby_gallery, plain_collection, vectors

DIM = 8
NASTY = "<script>alert('x')</script>"


class Elements(HTMLParser):
    """The elements and texts of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.names, self.frames, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.frames += [dict(attrs)["srcdoc"]] if tag == "iframe" else []

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("notebook") / "shop.db")
    plain = connect(path, create=True)
    rng = np.random.default_rng(4)
    plain_collection(plain, "products", vectors(rng, 60, DIM), "COSINE")
    yield plain
    plain.close()
    server_manager_instance.release_server(path)


@pytest.fixture(scope="module")
def diagnosis(client):
    bank = vectors(np.random.default_rng(5), 60, DIM)
    return diagnose(client, "products", bank[:20], Recipe(bank[20:], estimator=NNN(4)))


def test_a_diagnosis_is_its_page(diagnosis, tmp_path):
    diagnosis.save(tmp_path / "hubness.html")
    page = (tmp_path / "hubness.html").read_text(encoding="utf-8")
    assert "products" in page
    shown = Elements(diagnosis._repr_html_())
    assert shown.names == ["iframe"]
    assert shown.frames == [page], "the whole page, apart from the notebook's own styles"


def test_a_page_that_cannot_be_written_is_an_error(diagnosis, tmp_path):
    with pytest.raises(UnreadableFile, match="cannot write"):
        diagnosis.save(tmp_path / "no folder" / "hubness.html")


def test_plans_and_status_are_tables(client):
    bank = vectors(np.random.default_rng(5), 40, DIM)
    plan = plan_correction(
        client, "products", Recipe(bank, estimator=NNN(4)), Copy(target="second_copy")
    )
    shown = Elements(plan._repr_html_())
    assert {"Plan", "second_copy", "60"} <= set(shown.texts)
    assert shown.names.count("tr") == shown.names.count("th") == shown.names.count("td") > 9
    table = Elements(status(client, "products")._repr_html_())
    assert {"Status", "products", "60", "False"} <= set(table.texts)
    assert "None" not in table.texts


def test_what_others_wrote_is_text(client):
    bank = vectors(np.random.default_rng(5), 40, DIM)
    plan = plan_correction(client, "products", Recipe(bank, estimator=NNN(4)))
    shown = Elements(replace(plan, body=replace(plan.body, server=NASTY))._repr_html_())
    assert "script" not in shown.names
    assert NASTY in shown.texts


def test_a_tuning_is_its_verdict_and_the_best_trials(client):
    items, queries, answers = hubby_gallery()
    plain_collection(client, "photos", items, "IP")
    judged = Judgements.of(queries[400:], answers[400:])
    tuning = tune(client, "photos", queries[:400], judgements=judged)
    shown = Elements(tuning._repr_html_())
    assert shown.texts[0] == tuning.verdict == "apply"
    assert any("points of R@1" in text for text in shown.texts)
    assert "R@1" in shown.texts, "the heading of the measure"
    assert "as it is" in shown.texts, "the raw search stands among the trials"
    assert shown.names.count("tr") == 1 + 5
    assert "None" not in shown.texts


def test_what_jobs_return_is_a_table(client):
    client.create_collection("plain", dimension=DIM, consistency_level="Strong")
    rows = vectors(np.random.default_rng(6), 60, DIM)
    client.insert("plain", [{"id": i, "vector": row} for i, row in enumerate(rows)])
    plan = plan_correction(
        client, "plain", Recipe(rows[:40], estimator=NNN(4), verdict="skip"), Copy(alias="live")
    )
    migrate(client, plan, no_writers=True)
    back = Elements(rollback(client, "live")._repr_html_())
    assert {"Rollback", "live", "plain", plan.body.target} <= set(back.texts)
