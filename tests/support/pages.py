"""What the pages have in common: readers by keyboard, screen reader, on paper and in dark mode can use them."""

import re
from html.parser import HTMLParser
from itertools import pairwise

LANDMARKS = ("header", "main", "footer")


class _Outline(HTMLParser):
    """The elements with their attributes, in order."""

    def __init__(self, source):
        super().__init__()
        self.elements = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


def assert_accessible(source):
    """Landmarks, headings in order, tables with captions and scopes, names of charts and images, a visible focus."""
    page = _Outline(source)
    assert page.all("html")[0]["lang"] == "en"
    top = re.sub(
        "<(header|main|footer)[ >].*?</\\1>", "", source.split("<body>")[1], flags=re.DOTALL
    )
    assert re.sub(r"</?(body|html)>|\s", "", top) == "", "everything is in a landmark"
    assert [tag for tag, _ in page.elements if tag in LANDMARKS] == list(LANDMARKS)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("section"):
        assert attributes.get("aria-label") or attributes["aria-labelledby"] in ids
    assert source.count("<table>") == source.count("<table><caption")
    assert page.all("th") == [
        attributes for attributes in page.all("th") if attributes["scope"] in ("col", "row")
    ]
    for attributes in page.all("svg"):
        assert attributes["role"] == "img"
        assert attributes["aria-label"]
    assert all(attributes["alt"] for attributes in page.all("img"))
    for _, attributes in page.elements:
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0"
            assert attributes["role"] == "region"
            assert attributes["aria-labelledby"] in ids
    for rule in (
        "a:focus-visible",
        ".scroll:focus-visible",
        "@media print",
        "@media screen and (prefers-color-scheme",
    ):
        assert rule in source
