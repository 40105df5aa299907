"""The page shows what is kept, needs nothing but itself, and looks right in a browser."""

import base64
import hashlib
import re
from datetime import timedelta

import pytest

from milvus_hubness.serve.page import HEADERS, render
from milvus_hubness.serve.reconcile import Reconciliation
from milvus_hubness.serve.worker import ServiceView
from tests.support.pages import assert_accessible
from tests.support.sample_pages import AT, full_service_view, outcomes, service_view
from tests.support.sample_pages import collection_view as collection

EVIL = "<script>alert(1)</script>\"'&$at"


def shown(*collections, waiting_for=""):
    return render(service_view(*collections, waiting_for=waiting_for))


@pytest.fixture(scope="module")
def full_page():
    return render(full_service_view())


def text(page):
    return " ".join(re.sub("<[^>]*>", " ", page.split("<main>")[1]).split())


def test_the_page_holds_the_figures(full_page):
    said = text(full_page)
    for words in (
        "Not ready: waiting for the first reconciliation of songs",
        "products field vector · profile text",
        "Last success 30 min ago",
        "Next run in 40 s",
        "Rows 1,234,567",
        "every 60s",
        "at 0 3 * * *",
        "raw 35.5%",
        "in use 12.0%",
        "now 30 min",
        "computing biases, 40,000 of 1,200,000",
        "no Milvus answers",
        "(3 times in a row)",
        "not reconciled yet",
    ):
        assert words in said


def test_biases_that_were_refused_are_told_of():
    refused = outcomes()[45]
    page = shown(collection(kept=outcomes()[:46], last=refused))
    assert "the new biases were refused" in page
    assert '<circle class="refused"' in page
    assert "refused 24.0%" in page
    assert "in use 12.0%" in page


def test_nothing_that_is_shown_can_be_run():
    evil = Reconciliation(at=AT, result="failed", message=EVIL, action=EVIL)
    page = shown(
        collection(EVIL, (evil,), last=evil, failing=evil, failures=1, field=EVIL), waiting_for=EVIL
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "$at" in page


def test_the_policy_lets_in_the_own_style_and_nothing_else(full_page):
    [style] = re.findall("<style>(.*?)</style>", full_page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert "unsafe" not in policy
    assert not re.findall(r"\b(style|src|on\w+)=", full_page)
    assert not re.findall(r"https?://(?!milvus:19530)", full_page)


def test_it_can_be_read_in_every_way(full_page):
    assert_accessible(full_page)
    assert (
        'aria-label="Excess answers taken by hubs over time: raw 35.5%, in use 12.0%"' in full_page
    )


def test_it_is_renewed_unless_its_reader_stops_that(full_page):
    view = ServiceView("0.1.0", "http://milvus:19530", AT - timedelta(days=3), AT, "", ())
    still = render(view, renews=False)
    assert 'http-equiv="refresh"' in full_page
    assert 'href="still"' in full_page
    assert "refresh" not in still
    assert 'href="./"' in still
    assert_accessible(still)


def test_labels_do_not_cover_each_other():
    alike = tuple(
        one.model_copy(update={"excess_answers": {"raw": 0.1, "new": 0.1}}) for one in outcomes(4)
    )
    page = shown(collection(kept=alike))
    heights = [
        float(y)
        for y in re.findall(r'y="([\d.]+)" text-anchor="start" class="(?:before|after)">', page)
    ]
    assert abs(heights[0] - heights[1]) >= 15
    assert max(heights) <= 174


@pytest.mark.parametrize(
    ("every", "times"),
    [
        (timedelta(seconds=1), ["11:59:00", "11:59:30", "12:00:00"]),
        (timedelta(minutes=7), ["05:00", "08:30", "12:00"]),
        (timedelta(days=1), ["28 Jan 12:00", "27 Feb 12:00", "29 Mar 12:00"]),
    ],
)
def test_a_chart_names_its_first_middle_and_last_time(every, times):
    page = shown(collection(kept=outcomes(every=every)))
    assert re.findall(r'text-anchor="middle" class="soft">([^<]*)<', page) == times * 2
