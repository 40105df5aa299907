"""The page holds the figures and needs nothing but itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from benchmarks.environment import RESULTS
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend
from milvus_hubness.errors import InvalidInput
from milvus_hubness.quality.measures import Interval
from milvus_hubness.quality.verdict import EXPECTED_GAIN
from milvus_hubness.reports.images import Images
from milvus_hubness.reports.page import render
from tests.support.diagnoses import diagnose
from tests.support.galleries import hubby_gallery
from tests.support.pages import assert_accessible
from tests.support.sample_pages import diagnosis as made

EVIL = "<script>alert(1)</script>\"'&$title"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags, ids, classes, attributes, the text, and whether every tag is closed in order."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.ids, self.attributes, self.texts, self.open = [], set(), [], [], []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())


def test_the_page_holds_the_figures():
    found = made()
    page = Page(render(found))
    assert page.open == []
    assert {"distribution", "strength", "hubs", "antihubs", "coverage"} <= page.ids
    for text in (
        "Shop plain", "80 queries · 60 items · a bank of 30 · strength 0.5", "Apply",
        "in use: 0.5",
        f"{found.before.skewness:.2f} → {found.after.skewness:.2f}",
        f"{100 * found.before.excess_answers:.1f}% → {100 * found.after.excess_answers:.1f}%",
        f"{100 * found.retrieval_before['R@1']:.1f}% → {100 * found.retrieval_after['R@1']:.1f}%",
        f"Share of answers from hubs, N ≥ 20{found.before.hub_occurrence:.3f}{found.after.hub_occurrence:.3f}",
        f"{100 * found.reciprocity.before:.1f}% → {100 * found.reciprocity.after:.1f}%"
        f"query and item first for each other; at most {found.reciprocity.at_most:.1%}",
        f"Reciprocity of {found.reciprocity.distinct} distinct queries; at most {found.reciprocity.at_most:.1%}"
        f"{found.reciprocity.before:.3f}{found.reciprocity.after:.3f}",
        f"Gini index; 0 is even{found.before.gini:.3f}{found.after.gini:.3f}",
        f"{found.antihubs.rescued} that were lost are found after correction, "
        f"{found.antihubs.after - found.antihubs.before + found.antihubs.rescued} that were found are not",
        f"{100 * found.coverage.reached / 60:.1f}% of the items are reached by the bank",
        f"{len(found.coverage.regions)} regions of the gallery",
    ):  # fmt: skip
        assert text in page.text, text
    for one in found.histogram:
        label = str(one.low) if one.low == one.high else f"{one.low}–{one.high}"
        for name, count in (("before", one.before), ("after", one.after)):
            assert ("aria-label", f"{count} items with N_10 {label} {name}") in page.attributes
    for hub in found.hubs:
        assert hub.item.key in page.text
        label = f"N_10 of {hub.item.key}: {hub.item.before} before, {hub.item.after} after"
        assert ("aria-label", label) in page.attributes
        for one in hub.swallows:
            assert f"“{one.text}” has it at rank {one.rank}" in page.text
            assert f"its right answer at {one.right_before} → {one.right_after}" in page.text
    for item in found.antihubs.examples + found.antihubs.never:
        assert item.key in page.text
    for item, similarity in found.coverage.farthest:
        assert f"{similarity:.3f}" in page.text
        assert item.key in page.text
    for point in found.strengths:
        assert f"strength {point.strength:g}: {point.hubness.skewness:.2f}" in page.text
        assert f"strength {point.strength:g}: {100 * point.value.estimate:.1f}%" in page.text


def test_the_page_explains_what_the_bank_shows():
    bank = np.random.default_rng(2).normal(size=(60, 8)) + 0.3
    found = made(bank=bank)
    page = Page(render(found))
    assert "bank" in page.ids
    assert f"here: {max(0, found.bank.excess):.0%}; banks of their own gained" in page.text
    assert len(found.findings) >= 5
    for finding in found.findings:
        assert str(finding) in page.text
    assert found.to_dict()["bank"]["two_views"] == found.bank.two_views
    assert "bank" not in Page(render(made())).ids, "30 queries say too little"
    assert_accessible(render(found))


def test_the_expected_gain_is_that_of_the_saved_benchmark():
    saved = json.loads((RESULTS / "verdict.json").read_text())
    assert [list(point) for point in EXPECTED_GAIN] == saved["expected_gain"]


def test_it_needs_nothing_but_itself():
    source = render(made())
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert "://" not in source
    assert not re.search(r"@import|url\(", source)
    assert "default-src 'none'" in source
    assert "prefers-color-scheme: dark" in source
    assert "$" not in source


def test_every_chart_has_a_name():
    source = render(made())
    charts = re.findall(r"<svg [^>]*>.{9}", source)
    assert len(charts) >= 3
    bars = re.findall(r'<div class="(?:bars|share after)"[^>]*>', source)
    assert len(bars) > 10
    assert all(re.search(r'role="img" aria-label="[^"]+"', each) for each in bars)
    for chart in charts:
        assert re.search(r'role="img" aria-label="[^"]+"><title>', chart)


def test_it_can_be_read_in_every_way():
    assert_accessible(render(made(slice_by="price", group_by="price")))
    assert_accessible(
        render(made(positives=None, verdict=None, fields=None, keys=None, query_texts=None))
    )


def test_the_summary_says_in_words_what_the_figures_say():
    found = made()
    text = Page(render(found)).text
    words = text.split("In plain words")[1].split("a right answer first")[0]
    for figure in (
        f"among the first 10 results of {found.before.largest} of 80 queries; an even share would be 13.3",
        f"{found.antihubs.before} of 60 items are found by no query",
        f"is found by {found.after.largest} queries, and {found.antihubs.after} items by none",
        f"{found.retrieval_before['R@1']:.1%} of the queries without correction and for "
        f"{found.retrieval_after['R@1']:.1%} with it",
    ):  # fmt: skip
        assert figure in words, figure
    assert found.to_dict()["summary"] == found.summary
    assert "No right answers are known here" in made(positives=None).summary[-1]
    gains = (
        (0.01, 0.2, "a gain that is larger"),
        (-0.2, -0.1, "a loss that"),
        (-1, 1, "within chance"),
    )
    for low, high, said in gains:
        changed = replace(found, gain=Interval((low + high) / 2, low, high))
        assert said in changed.summary[2]


def test_slices_count_the_items_of_each_value():
    fields = [{"language": "fr" if n % 3 else "de", "price": n} for n in range(60)]
    found = made(fields=fields, slice_by="language")
    assert [(group.value, group.items) for group in found.slices] == [("fr", 40), ("de", 20)]
    assert sum(group.share_before for group in found.slices) == pytest.approx(1)
    lost = sum(group.items * group.after.antihubs for group in found.slices)
    assert lost == pytest.approx(found.antihubs.after)
    assert max(group.before.largest for group in found.slices) == found.before.largest
    assert sum(group.queries for group in found.slices) == 80
    gains = sum(group.queries * group.gain.estimate for group in found.slices)
    assert gains / 80 == pytest.approx(found.gain.estimate)
    source = render(found)
    text = Page(source).text
    for group in found.slices:
        assert (
            f'<tr><th scope="row">{group.value}</th><td data-name="Items">{group.items}</td>'
            in source
        )
        assert f"{group.before.skewness:.2f} → {group.after.skewness:.2f}" in text
        assert f"{group.hubs[0].key} ({group.hubs[0].after})" in text
        largest = max(group.hubs, key=lambda hub: hub.after)
        assert group.hubs[0] == largest
        assert group.hubs[0].fields["language"] == group.value
    many = made(fields=fields, slice_by="price", positives=None).slices
    assert [(group.value is None, group.items) for group in many[-2:]] == [(False, 1), (True, 48)]
    assert many[0].gain is None
    with pytest.raises(
        InvalidInput,
        match="no scalar field 'colour': choose one of language, price with --slice-by",
    ):
        made(fields=fields, slice_by="colour")


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c63f8cfc0f01f00050001ff89993d1d0000000049454e44ae426082"
)


def test_a_page_embeds_the_images_of_its_folder_and_counts_the_others(tmp_path):
    (tmp_path / "small.png").write_bytes(PIXEL)
    fields = [{"picture": "small.png" if i % 2 else "../small.png"} for i in range(60)]
    images = Images(tmp_path)
    source = render(made(fields=fields), "picture", images)
    assert source.count('<img src="data:image/') > 5
    assert 'alt="Image of plain' in source
    assert "img-src data:" in source
    assert images.left_out > 5
    assert f"{images.left_out} images left out: not a PNG" in source
    assert "<img" not in render(made(fields=fields), "picture"), "no folder, no file"
    assert "<img" not in render(made(fields=fields), "photo", Images(tmp_path))
    assert "left out" not in render(made(fields=fields), "photo", Images(tmp_path))


def test_what_users_wrote_is_escaped():
    source = render(made(evil=EVIL, slice_by=f"{EVIL}name"), f"{EVIL}name")
    page = Page(source)
    assert page.open == []
    assert "script" not in page.tags
    assert "<script" not in source
    assert page.text.count("<script>alert(1)</script>\"'&$title") > 20


def test_long_values_are_cut_and_few_fields_shown():
    fields = [{"text": "x" * 5000, **{f"f{n}": n for n in range(50)}}] * 60
    source = render(made(fields=fields))
    assert "x" * 200 not in source
    assert "x" * 159 + "…" in source
    assert "f10" not in source


def test_without_positives_or_verdict():
    found = made(positives=None, verdict=None, fields=None, keys=None, query_texts=None)
    page = Page(render(found))
    assert f"Skewness {found.before.skewness:.2f} → {found.after.skewness:.2f}" in page.text
    assert "for a verdict" in page.text
    assert "R@1" not in page.text
    assert f"query {found.hubs[0].swallows[0].query}" in page.text


def test_without_verdict_the_gain_is_the_headline():
    found = made(verdict=None)
    text = Page(render(found)).text
    assert "nothing was held out to judge by" in text
    assert f"{100 * found.gain.estimate:+.1f} points".replace("-", "−") in text


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [
        ({"verdict": "leave it alone", "reason": "no gain"}, "leave-it-alone"),
        ({"verdict": "apply weakly", "reason": "some gain"}, "apply-weakly"),
        ({"verdict": "not proven", "reason": "too few pairs"}, "not-proven"),
    ],
)
def test_the_verdict_has_a_tone(verdict, tone):
    source = render(made(verdict=verdict))
    assert f'class="card verdict {tone}"' in source
    assert f".verdict.{tone} " in source
    assert verdict["reason"] in source


def test_degenerate_galleries():
    for queries, gallery in (
        (np.ones((3, 2)), np.ones((1, 2))),
        (np.zeros((2, 3)), np.zeros((40, 3))),
    ):
        n_items = len(gallery)
        found = diagnose(
            queries, gallery, np.zeros(n_items), bank=queries, k=1, strength=0, strengths=[]
        )
        assert Page(render(found)).open == []


def test_each_chart_has_its_line():
    """One for each measure, and what banks like this one gained."""
    items, queries, answers = hubby_gallery()
    biases = Blend().fit(QueryBank(queries[:300]), gallery=items).bias(items)
    found = diagnose(queries[300:], items, biases, bank=queries[:300], positives=answers[300:])
    source = render(found)
    assert source.count("<article") == len(found.hubs) > 0

    drawn = re.findall(r'<svg[^>]* aria-label="([^"]*)"[^>]*>(.*?)</svg>', source, re.DOTALL)
    assert [(label, inside.count("<polyline")) for label, inside in drawn] == [
        ("Gain of a correction against the answers that hubs take in excess", 1),
        *(
            (f"{measure} against the strength of the correction", 1)
            for measure in ("R@1", "Skewness", "Anti-hubs")
        ),
    ]
