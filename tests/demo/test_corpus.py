from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from milvus_hubness.demo.run import Pair, collect
from milvus_hubness.errors import UnreadableFile

DOCSTRING = "Say what this function does at some length."
BODY = "total = sum(values)  # a comment that is part of the body\nreturn total / len(values)"

STDLIB = Path(sysconfig.get_path("stdlib"))


def function(name: str, docstring: str = DOCSTRING, body: str = BODY) -> str:
    lines = [
        f"def {name}(values):",
        f'    """{docstring}"""',
        *(f"    {line}" for line in body.splitlines()),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def indent(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def test_a_pair_is_the_docstring_and_the_body_after_it(tmp_path: Path) -> None:
    write(tmp_path / "one.py", function("mean"))
    assert collect(tmp_path) == (Pair("one.mean", DOCSTRING, BODY),)


def test_names_are_qualified_through_packages_classes_and_branches(tmp_path: Path) -> None:
    write(tmp_path / "pkg" / "__init__.py", function("a", DOCSTRING + "1", BODY + " + 1"))
    method = indent(indent(function("b", DOCSTRING + "2", BODY + " + 2")))
    write(tmp_path / "pkg" / "mod.py", "if True:\n    class C:\n" + method)
    assert [pair.name for pair in collect(tmp_path)] == ["pkg.a", "pkg.mod.C.b"]


def test_form_feeds_do_not_shift_the_body(tmp_path: Path) -> None:
    write(tmp_path / "one.py", "import os\n\f\n# \x0b \x85\n" + function("mean"))
    assert [pair.body for pair in collect(tmp_path)] == [BODY]


def test_the_same_docstring_or_body_is_taken_once(tmp_path: Path) -> None:
    other = "return statistics.mean(value for value in values if value is not None)"
    write(tmp_path / "a.py", function("first"))
    write(tmp_path / "b.py", function("same_body", DOCSTRING + " Twice."))
    write(tmp_path / "c.py", function("same_docstring", body=other))
    assert [pair.name for pair in collect(tmp_path)] == ["a.first"]


@pytest.mark.parametrize(
    "path",
    [
        "test/one.py",
        "pkg/tests/one.py",
        "site-packages/one.py",
        "idlelib/idle_test/one.py",
        "one.txt",
    ],
)
def test_tests_and_installed_packages_are_left_out(tmp_path: Path, path: str) -> None:
    write(tmp_path / path, function("mean"))
    with pytest.raises(UnreadableFile, match="no source files"):
        collect(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        function("no_words", docstring="Short."),
        function("no_work", body="return 0"),
        f'def one_line(values): "{DOCSTRING}"; return [value + value for value in values if value]\n',
        "def undocumented(values):\n" + indent(BODY),
    ],
)
def test_functions_that_say_or_do_too_little_are_left_out(tmp_path: Path, text: str) -> None:
    write(tmp_path / "kept.py", function("mean"))
    write(tmp_path / "one.py", text)
    assert [pair.name for pair in collect(tmp_path)] == ["kept.mean"]


def test_files_that_cannot_be_read_or_parsed_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "kept.py", function("mean"))
    write(tmp_path / "python2.py", "print 'hello'\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\xfe")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "gone.py")
    assert [pair.name for pair in collect(tmp_path)] == ["kept.mean"]


def test_invalid_escapes_stay_silent(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write(tmp_path / "one.py", function("mean", body=BODY + r" or '\d'"))
    assert len(collect(tmp_path)) == 1
    assert not [
        each for each in recwarn if issubclass(each.category, SyntaxWarning | DeprecationWarning)
    ]


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="nowhere"):
        collect(tmp_path / "nowhere")


def test_a_real_package() -> None:
    pairs = collect(STDLIB / "json")
    collect.cache_clear()
    assert pairs == collect(STDLIB / "json")
    (raw_decode,) = (pair for pair in pairs if pair.name == "decoder.JSONDecoder.raw_decode")
    assert raw_decode.docstring.startswith("Decode a JSON document")
    assert "Decode a JSON document" not in raw_decode.body
    assert raw_decode.body.endswith("return obj, end")
