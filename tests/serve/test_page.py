"""The page shows what is kept, needs nothing but itself, and looks right in a browser."""

import base64
import hashlib
import re
from datetime import datetime, timedelta, timezone

import pytest

from milvus_hubness.serve.config import CollectionTable
from milvus_hubness.serve.page import HEADERS, render
from milvus_hubness.serve.reconcile import Course, Reconciliation
from milvus_hubness.serve.worker import CollectionView, ServiceView, Standing
from tests.pages import DARK, LIGHT, assert_accessible, browse, contrast, needs_chromium

AT = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)
EVIL = "<script>alert(1)</script>\"'&$at"


def outcomes(count=60, every=timedelta(minutes=30)):
    """A full refresh a night, new rows in between; the last but one night's was refused."""
    found = []
    for number in range(count):
        at = AT - every * (count - number)
        full = number % 20 == 5
        refused = number == 45
        action = "refused" if refused else "full" if full else "pending" if number % 3 else "none"
        skewness = {"raw": 3.1 + number / 100, "old": 1.2, "new": 2.4 if refused else 1.1} if full else {}
        found.append(
            Reconciliation(
                at=at,
                result="ok",
                action=action,
                message="the bank changed" if full else "bank and parameters are unchanged",
                seconds=12.3,
                rows=1_234_567,
                pending=12,
                scanned=1_234_567 if full else 12,
                written=34_567 if full else 12,
                skipped=1_200_000 if full else 0,
                epoch=number,
                bias_age_seconds=0.0,
                oldest_seconds=every.total_seconds() if number else 0.0,
                skewness=skewness,
            )
        )
    return tuple(found)


def shown(*collections, waiting_for=""):
    view = ServiceView("0.1.0", "http://milvus:19530", AT - timedelta(days=3), AT, waiting_for, collections)
    return render(view)


def collection(name="products", kept=(), last=None, running=None, failing=None, failures=0, **facts):
    standing = Standing(
        running=running,
        last=last or (kept[-1] if kept else None),
        last_success=kept[-1].at if kept else None,
        failing=failing,
        failures=failures,
    )
    return CollectionView(CollectionTable(name=name, **facts), standing, AT + timedelta(seconds=40), kept)


@pytest.fixture(scope="module")
def full_page():
    trouble = Reconciliation(
        at=AT, result="failed", message="no Milvus answers at http://milvus:19530: " + "deadline " * 9
    )
    long_name = "a_collection_with_a_name_that_is_as_long_as_names_of_collections_get_in_the_wild_" * 2
    few = outcomes(3, timedelta(seconds=20))
    return shown(
        collection(kept=outcomes(), field="vector", profile="text"),
        collection("videos", few, running=Course(AT, "computing biases", 40_000, 1_200_000)),
        collection(long_name, outcomes(9), last=trouble, failing=trouble, failures=3),
        collection("songs"),
        waiting_for="the first reconciliation of songs",
    )


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
        "raw 3.55",
        "in use 1.20",
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
    assert "refused 2.40" in page
    assert "in use 1.20" in page


def test_nothing_that_is_shown_can_be_run():
    evil = Reconciliation(at=AT, result="failed", message=EVIL, action=EVIL)
    page = shown(collection(EVIL, (evil,), last=evil, failing=evil, failures=1, field=EVIL), waiting_for=EVIL)
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
    assert 'aria-label="Skewness over time: raw 3.55, in use 1.20"' in full_page


def test_it_is_renewed_unless_its_reader_stops_that(full_page):
    view = ServiceView("0.1.0", "http://milvus:19530", AT - timedelta(days=3), AT, "", ())
    still = render(view, renews=False)
    assert 'http-equiv="refresh"' in full_page
    assert 'href="still"' in full_page
    assert "refresh" not in still
    assert 'href="./"' in still
    assert_accessible(still)


def test_labels_do_not_cover_each_other():
    alike = tuple(one.model_copy(update={"skewness": {"raw": 1.0, "new": 1.0}}) for one in outcomes(4))
    page = shown(collection(kept=alike))
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start" class="(?:before|after)">', page)]
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


MEASURE = """<script>
const wide = [...document.querySelectorAll('main, .card, svg, figure, dl > div')].filter(
  e => e.scrollWidth > e.clientWidth + 1 || !e.getBoundingClientRect().height);
const labels = [...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')].map(
  text => text.getBoundingClientRect()));
const covered = labels.flatMap(all => all.flatMap((a, i) => all.slice(i + 1).filter(b =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)));
const outside = [...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text')].filter(
  text => text.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1 ||
  text.getBoundingClientRect().left < svg.getBoundingClientRect().left - 1));
document.title = `${wide.length} too wide, ${covered.length} covered, ${outside.length} outside`;
</script></body>"""


@needs_chromium
@pytest.mark.xdist_group("chromium")
@pytest.mark.parametrize("width", [400, pytest.param(1200, marks=pytest.mark.long)])
def test_in_a_browser_nothing_is_too_wide_or_covered(full_page, tmp_path, width):
    page = tmp_path / "page.html"
    narrow = full_page.replace("<main>", "<main id=here>").replace("</body>", MEASURE)
    narrow = narrow.replace("header, main, footer {", f"header, main, footer {{ width: {width}px;", 1)
    narrow = narrow.replace('http-equiv="refresh"', "")
    page.write_text(narrow, encoding="utf-8")
    dom = browse(page, tmp_path, "--dump-dom", f"--window-size={max(width, 500)},1200")
    [title] = re.findall("<title>(.*?)</title>", dom.split("<body>")[0])
    assert title == "0 too wide, 0 covered, 0 outside"


@needs_chromium
@pytest.mark.xdist_group("chromium")
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_in_a_browser_every_text_stands_out(full_page, tmp_path, scheme):
    count, colour, weak = contrast(full_page, tmp_path, scheme)
    assert (count > 150, weak) == (True, "[]")
    assert colour == ("rgb(245, 244, 240)" if scheme == LIGHT else "rgb(17, 21, 27)")
