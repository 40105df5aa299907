"""Every page that the product makes, as a person sees it: on a telephone and on a screen, in both modes.

The pages are opened in one Chromium. Their screenshots stay in the folder of the test: `pytest --basetemp FOLDER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import milvus_hubness
from milvus_hubness.extras.quari.curves import learning_curves
from milvus_hubness.reports.images import Images
from milvus_hubness.reports.page import render
from milvus_hubness.serve.http_server import HttpServer
from milvus_hubness.serve.page import service_routes
from milvus_hubness.serve.worker import ServiceMetrics
from tests.docs import pages
from tests.support import sample_pages
from tests.support.browser import MODES, WIDTHS, needs_chromium

PACKAGE = Path(milvus_hubness.__file__).parent
SHOT_AT = (390, 1280)

pytestmark = [needs_chromium, pytest.mark.xdist_group("chromium")]


def seen(browser, url, folder, *, reload=False, **settings):
    """Open a page at every width in both modes; return what a person notices, and the least number of texts.

    reload: for pages that choose their colours when they are first opened, and remember them.
    """
    noticed, counts = [], []
    browser.show(WIDTHS[0], MODES[0])
    browser.open(url)
    for mode in MODES:
        browser.show(WIDTHS[0], mode)
        if reload:
            browser.open_anew(url, mode)

        for width in WIDTHS:
            browser.show(width, mode)
            found = browser.notice(settings)
            noticed += [f"{width} px, {mode}: {problem}" for problem in found["problems"]]
            if found["isDark"] != (mode == "dark"):
                noticed.append(f"{width} px, {mode}: the page is not {mode}")
            counts.append(found["texts"])

            if width in SHOT_AT:
                image = browser.screenshot()
                (folder / f"{mode}-{width}.png").write_bytes(image)
    return noticed, min(counts)


def written(folder, source):
    page = folder / "page.html"
    page.write_text(source, encoding="utf-8")
    return page.as_uri()


REPORTS = {
    "full": {},
    "uncorrected": {"strength": 0.0},
    "of few things": {
        "positives": None, "verdict": None, "fields": None, "keys": None, "query_texts": None,
        "slice_by": None, "group_by": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_the_report_of_diagnose(browser, tmp_path, name):
    picture = tmp_path / "item.png"
    picture.write_bytes(sample_pages.png())
    found = sample_pages.untidy_diagnosis(picture, **REPORTS[name])
    noticed, texts = seen(
        browser, written(tmp_path, render(found, "image", Images(tmp_path))), tmp_path
    )
    assert noticed == []
    assert texts > 150
    assert browser.evaluate("document.images.length > 10") == (name != "of few things")
    verdict = "Skewness" if name == "of few things" else "Apply weakly"
    assert browser.notice()["largest"].startswith(verdict)


@pytest.mark.parametrize("path", ["/", "/still"])
def test_the_page_of_serve(browser, tmp_path, path):
    """With the headers of its server: a policy that forbids the page's own style would leave it bare."""
    view = sample_pages.full_service_view()
    routes = service_routes(lambda: view, lambda: True, ServiceMetrics())
    with HttpServer("127.0.0.1:0", routes) as server:
        noticed, texts = seen(browser, server.url + path, tmp_path)
    assert noticed == []
    assert texts > 150


@pytest.mark.parametrize(("epochs", "scale"), [(20, 1.0), (1, 1.0), (200, 0.002)])
def test_the_learning_curves_of_quari(browser, tmp_path, epochs, scale):
    """Also of a training that hardly begins, and of one that hardly finds anything, whose labels are long."""
    history = sample_pages.training(epochs, scale)
    best = max(history, key=lambda epoch: epoch.mrr).epoch
    noticed, texts = seen(browser, written(tmp_path, learning_curves(history, best)), tmp_path)
    assert noticed == []
    assert texts > 20
    charts = browser.evaluate(
        "[...document.querySelectorAll('svg > title')].map(one => one.textContent)"
    )
    assert [chart.partition(" against")[0] for chart in charts] == [
        "Training loss", "Validation MRR", "Validation R@1",
    ]  # fmt: skip


def test_the_pictures_of_the_documentation(browser, tmp_path):
    """As inline drawings in a column of a page that keeps to the mode, where their texts can be looked at."""
    drawings = [path.read_text("utf-8") for path in sorted((pages.DOCS / "pictures").glob("*.svg"))]
    style = (
        "<style>:root { color-scheme: light dark; background: #fff; font-family: sans-serif } svg { max-width: 100% }"
        "@media (prefers-color-scheme: dark) { :root { background: #1e2129; color: #fff } }</style>"
    )
    head = f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>Pictures</title>{style}<h1>Pictures</h1>"
    noticed, texts = seen(browser, written(tmp_path, head + "<p>".join(drawings)), tmp_path)
    assert noticed == []
    assert texts >= 25
    assert len(drawings) >= 3


WITH_PICTURES = [page for page in pages.PAGES if "/pictures/" in page.read_text("utf-8")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=pages.ROOT, env=environment, check=True)
    return folder


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="the site's tools are not installed: make docs"
)
@pytest.mark.parametrize(
    "page",
    ["index.md", "how-to/proxy.md", "reference/cli.md", *WITH_PICTURES],
    ids=lambda page: Path(page).stem,
)
def test_the_documentation_site(browser, site, tmp_path, page):
    """Tables and blocks of code are as wide as they are: the site lets them scroll."""
    built = site / pages.DOCS.joinpath(page).relative_to(pages.DOCS).with_suffix(".html")
    settings = {"within": "article", "mayScroll": "pre, .md-typeset__scrollwrap"}
    noticed, texts = seen(browser, built.as_uri(), tmp_path, reload=True, **settings)
    assert noticed == []
    assert texts > 20
    assert browser.evaluate("document.querySelectorAll('article img').length > 0") == (
        page in WITH_PICTURES
    )


def test_no_page_is_forgotten():
    """A new template, or markup in a module, needs a test above."""
    templates = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.html")}
    assert templates == {
        "reports/report.html",
        "extras/quari/curves.html",
        "serve/page.html",
    }
    sources = [*PACKAGE.rglob("*.py"), *(pages.ROOT / "integrations").rglob("*.py")]
    assert [path.name for path in sources if "<!doctype" in path.read_text("utf-8").lower()] == []
