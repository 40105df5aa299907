"""What the pages have in common: readers by keyboard, screen reader, on paper and in dark mode can use them."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
DARK, LIGHT = "--blink-settings=preferredColorScheme=0", "--blink-settings=preferredColorScheme=1"
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
    top = re.sub("<(header|main|footer)[ >].*?</\\1>", "", source.split("<body>")[1], flags=re.DOTALL)
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
    assert page.all("th") == [attributes for attributes in page.all("th") if attributes["scope"] in ("col", "row")]
    for attributes in page.all("svg"):
        assert attributes["role"] == "img"
        assert attributes["aria-label"]
    assert all(attributes["alt"] for attributes in page.all("img"))
    for _, attributes in page.elements:
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0"
            assert attributes["role"] == "region"
            assert attributes["aria-labelledby"] in ids
    for rule in ("a:focus-visible", ".scroll:focus-visible", "@media print", "@media screen and (prefers-color-scheme"):
        assert rule in source


def browse(page, tmp_path, *options):
    """What headless Chromium writes about a file, without a network and with a profile of its own."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, timeout=60, check=True, cwd=tmp_path).stdout.decode()


CONTRAST = """<script>
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const light = colour => {
  const [r, g, b] = numbers(colour).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = element => {
  const colour = getComputedStyle(element).backgroundColor;
  return numbers(colour)[3] === 0 ? ground(element.parentElement) : colour;
};
document.querySelectorAll('details').forEach(element => element.open = true);
const own = element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
const pairs = [...document.querySelectorAll('body *')].filter(
  element => own(element) && !element.closest('script, title')).map(element => {
    const style = getComputedStyle(element);
    const colour = element.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(colour), light(ground(element))].sort((a, b) => b - a);
    return [(a + 0.05) / (b + 0.05), element.className.baseVal ?? element.className, colour, element.textContent];
  });
const weak = pairs.filter(pair => pair[0] < 4.5);
document.title = `${pairs.length} texts on ${ground(document.querySelector('h1'))}, weak: ${JSON.stringify(weak)}`;
</script></body>"""


def contrast(source, tmp_path, scheme):
    """The number of texts in a browser, the colour of the page, and the texts with a contrast below 4.5 to 1."""
    page = tmp_path / "contrast.html"
    source = re.sub("<meta http-equiv[^>]*>", "", source)
    page.write_text(source.replace("</body>", CONTRAST), encoding="utf-8")
    [title] = re.findall("<title>(.*?)</title>", browse(page, tmp_path, "--dump-dom", scheme).split("</head>")[0])
    count, colour, weak = re.fullmatch(r"(\d+) texts on (rgb\(.*?\)), weak: (.*)", title).groups()
    return int(count), colour, weak
