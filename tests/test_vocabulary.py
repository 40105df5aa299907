"""The words that the glossary replaces appear in no identifier, message or docstring of the packages."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "milvus_hubness",
    *(path.parent for path in (ROOT / "integrations").glob("*/*_hubness/__init__.py")),
]

REPLACED = {
    "CorrectionConfig": "Hubness(",
    "CorrectionNotRecommended": "NotAdvised",
    "DualWriteFailed": "MirrorFailed",
    "Cancelled": "Stopped",
    "MigrationOptions": "Steering",
    "no_writers": "--frozen",
    "max_miss_rate": "--misses, allowed_misses",
    "bank": "milvus-hubness living",
    "augmented vector": "stored form, StoredForm",
    "augmented query": "asked form, asked, wrapped",
    "mean bias": "centre",
    "graph hint column": "link column, link columns, takes_link",
    "locality hint columns": "cell column, cell columns, takes_cells, axes",
    "excess answers taken by hubs": "unevenness, Robin Hood, robin_hood",
    "bias location": "stored_in, keeps_vectors, placement, Placed",
    "query samples": "traffic",
    "collection state": "says of itself, say of themselves",
    "state cache": "knowledge",
    "dual write": "mirror, mirrors, mirrored, mirroring, unmirrored",
    "refresh plan": "aim, aims",
    "refresh evaluation": "shadow",
    "reconciler": "looker",
    "worker": "keeper, keepers",
    "scheduler": "ticker",
    "task, overrides": "wish, wishes",
    "encode, decode": "wrap, strip, told",
    "valid": "sound, soundness",
    "invalid": "unsound",
    "repair": "mend, mends, mended, mending",
    "release, acquire": "let_go, be_alone",
    "report": "tell, tells, telling",
    "plain English": "of ours, of theirs, is told, told otherwise",
}
"""Words of the glossary, and what they replace: words that meant one of our things beside the right one, and turns of
phrase that hid who does what. Words of common English are not among them."""

REPLACED_BY = {word: name for name, words in REPLACED.items() for word in words.split(", ")}
WORDS = sorted({word for words in REPLACED.values() for word in words.split(", ")})

ELSEWHERE = {
    "axes": ("charts.py",),
    "written": ("jobs/refresh/", "serve/"),
    "Robin Hood": ("quality/measures.py",),
    "tell": ("quality/tuning.py",),
}
"""Where a word has its ordinary meaning: charts have axes, a refresh counts the rows it has written, a formula
names its paper, and few pairs cannot tell a gain from 0."""

TEXTS = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
"""Tokens of prose; from Python 3.12 on, the texts of f-strings are tokens of their own."""

LIBRARIES = re.compile(
    r"(text)?wraps?|wrap_future|r?l?strip|append(_row)?|repeat(_interleave)?|tell|isfinite"
)
"""Methods of Python, NumPy, torch and pymilvus."""


def _parts(name):
    """An identifier with its parts apart: `_drop_mirror` as `_ drop_mirror mirror`."""
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return " ".join([name, *parts, "_".join(parts)])


def _texts(path, modules):
    """The line of each identifier, string and comment, and its text; names of modules,
    which are files, and methods of Python's own types are left out."""
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    first, before = "", ""
    for number, token in enumerate(tokens):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            first = ""
        elif token.type == tokenize.NAME:
            first = first or token.string
            after = tokens[number + 1].string
            is_module = token.string in modules and (first in ("from", "import") or after == ".")
            is_librarys = before == "." and LIBRARIES.fullmatch(token.string)
            if not is_module and not is_librarys:
                yield token.start[0], _parts(re.sub(r"NotFound|NOT_FOUND", "", token.string))
        elif token.type in TEXTS:
            yield token.start[0], re.sub(r"[\w./]+/[\w./]+|\w+\.py\b", "", token.string)
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.string


def _uses(package):
    """Return for each replaced word the places that use it, as file:line."""
    files = sorted(package.rglob("*.py"))
    modules = {path.stem for path in files} | {path.parent.name for path in files}
    lines = {}
    for path in files:
        place = path.relative_to(package).as_posix()
        for line, text in _texts(path, modules):
            lines.setdefault(" ".join(text.split()), []).append((place, line))
    any_word = re.compile("|".join(map(re.escape, WORDS)), re.IGNORECASE)
    lines = {text: places for text, places in lines.items() if any_word.search(text)}
    uses = {word: [] for word in WORDS}
    for word in WORDS:
        pattern = re.compile(
            rf"(?<![\w-]){re.escape(word)}(?!\w)", re.IGNORECASE if word.islower() else 0
        )
        for text, places in lines.items():
            if pattern.search(text):
                uses[word] += [
                    f"{at}:{n}" for at, n in places if not at.startswith(ELSEWHERE.get(word, "/"))
                ]
    return uses


@pytest.fixture(scope="module")
def uses():
    return {package.name: _uses(package) for package in PACKAGES}


@pytest.mark.parametrize("word", WORDS)
def test_a_replaced_word_is_used_nowhere(uses, word):
    assert len(uses) == 5
    assert {name: places[word] for name, places in uses.items() if places[word]} == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def drop_mirror(collection): ...\n", "mirror"),
        ("class TrafficState: ...\n", "traffic"),
        ('raise ValueError(f"{name!r} has no centre")\n', "centre"),
        ("count = 1  # of the traffic\n", "traffic"),
    ],
)
def test_a_word_that_comes_back_is_noticed(tmp_path, text, word):
    (tmp_path / "module.py").write_text(text)
    assert _uses(tmp_path)[word] == ["module.py:1"]


def test_a_measure_has_one_name_on_every_page():
    """The pages of diagnose and of the documentation; the glossary says what papers call it."""
    pages = [*ROOT.glob("milvus_hubness/**/*.html"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    other = re.compile(r"robin.?hood|unevenness", re.IGNORECASE)
    assert [page.name for page in pages if other.search(page.read_text("utf-8"))] == ["glossary.md"]
    name = REPLACED_BY["unevenness"]
    for page in (
        "milvus_hubness/reports/report.html",
        "docs/concepts/hubness.md",
        "docs/reference/glossary.md",
    ):
        assert name in (ROOT / page).read_text("utf-8").lower()
