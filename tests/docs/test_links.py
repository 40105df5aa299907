"""The pages are short, are in the menu, and link to what exists; the site builds without a warning."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
import yaml

from tests.docs import pages

LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def anchors(path):
    """The anchors of the headings of a page, as MkDocs and GitHub make them."""
    text = pages.FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {
        re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain
    }


def links(page):
    return LINK.findall(pages.prose(page))


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_links_within_the_repository_lead_somewhere(page):
    for link in links(page):
        if urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{pages.name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{pages.name_of(page)} links to {link}"


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_pages_that_the_text_names_are_those_that_its_commands_write(page):
    """`check --page` writes hubness.html, and `quari train` its curves beside the network."""
    commands = "\n".join(block.text for block in pages.blocks(page) if block.language == "sh")
    curves = {
        f"{network}.html"
        for network in re.findall(r"quari train .*--out ([\w-]+)\.safetensors", commands)
    }
    named = set(re.findall(r"`([\w-]+\.html)`", page.read_text()))
    assert curves <= named <= curves | {"hubness.html"}


def test_links_to_other_sites_are_few_and_encrypted():
    """They are not fetched."""
    external = {link for page in pages.PAGES for link in links(page) if urlsplit(link).scheme}
    assert {urlsplit(link).scheme for link in external} == {"https"}
    assert {urlsplit(link).netloc for link in external} == {"semver.org"}


def test_the_front_page_and_the_pages_are_short():
    assert len(pages.README.read_text().splitlines()) <= 160
    assert [
        pages.name_of(page) for page in pages.PAGES if len(page.read_text().splitlines()) > 250
    ] == []


def test_the_home_of_the_site_is_the_first_screen_of_the_front_page():
    """With its picture, and from one source."""
    readme = pages.README.read_text()
    home = pages.DOCS / "index.md"
    shown = pages.hooks().front_page()
    assert home.read_text().startswith("<!-- generated: front -->\n")
    assert shown.startswith("# milvus_hubness\n")
    for paragraph in shown.split("\n\n"):
        words = LINK.sub("", paragraph)
        assert words in LINK.sub("", readme)
        assert paragraph.startswith("#") or paragraph not in home.read_text(), "copied by hand"
    targets = LINK.findall(shown)
    assert "pictures/hubs.svg" in targets
    for target in targets:
        assert (pages.DOCS / target.partition("#")[0]).exists(), target


def test_every_page_is_in_the_menu_and_within_reach_of_the_front_page():
    def files(menu):
        for entry in menu:
            for value in entry.values():
                yield from files(value) if isinstance(value, list) else [value]

    menu = [*files(yaml.safe_load((pages.ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(menu) == sorted(
        page.relative_to(pages.DOCS).as_posix() for page in pages.PAGES[1:]
    )
    reached, new = set(), {pages.README}
    while new:
        reached |= new
        targets = {
            (page.parent / link.partition("#")[0]).resolve() for page in new for link in links(page)
        }
        new = targets & set(pages.PAGES) - reached
    assert set(pages.PAGES) - reached == {pages.DOCS / "index.md"}


def test_every_picture_is_what_its_script_draws(tmp_path):
    namespace = {"__name__": "pictures", "__file__": str(pages.DOCS / "pictures.py")}
    exec(compile((pages.DOCS / "pictures.py").read_text(), "pictures.py", "exec"), namespace)
    for path in (pages.DOCS / "pictures").glob("*.svg"):
        assert namespace[path.stem]() == path.read_text(), (
            f"draw {path.name} again: python docs/pictures.py"
        )


@pytest.mark.long
@pytest.mark.skipif(
    find_spec("mkdocs") is None, reason="the site's tools are not installed: make docs"
)
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=pages.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "reference" / "cli.html").read_text()
    assert "--postpone-cutover" in html
    assert (tmp_path / "files" / "SECURITY.md.txt").read_text() == (
        pages.ROOT / "SECURITY.md"
    ).read_text()
