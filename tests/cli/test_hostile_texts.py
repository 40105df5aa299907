"""Keys, texts and names that would steer a terminal are shown as escapes by every command, and are exact in JSON."""

import json
import logging
import os
import sys
import time
import unicodedata
from datetime import datetime, timezone

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType

from milvus_hubness import connect
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import silent
from milvus_hubness.basics.texts import visible, visible_json, visible_line
from milvus_hubness.cli import console
from milvus_hubness.cli.migrate.show import LINES, printed
from milvus_hubness.jobs.common.progress import Event
from tests.cli.conftest import DIM
from tests.support.galleries import vectors

HOSTILE = {
    "title": "\x1b]0;owned\x07key",
    "clear": "\x1b[2J\x1b[Hkey",
    "8-bit": "\x9b2Jkey\x85",
    "delete": "key\x7f\x08\x08",
    "override": "key\u202egnp.exe",
    "isolate": "\u2067key\u2069",
    "marks": "k\u200ee\u200fy\u061c",
    "no width": "ke\u200by\u2060\ufeff\xad",
    "joiner": "ke\u200dy",
    "separators": "key\u2028hub\u2029",
    "lines": "key\nhub      another  99 -> 99\r",
    "markup": "[bold red]key[/] [link=https://x.test]",
    "emoji": "key:warning:",
    "tags": "key\U000e0041\U000e007f",
}
FORBIDDEN = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160)])) + (
    "\u061c\u200b\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\xad\ufeff"
)
BANK = ("--bank", "bank.npz", "--bank-column", "query")
NNN = (*BANK, "--method", "nnn", "--param", "k=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder, with a collection whose keys and groups are hostile, and queries with hostile texts.

    `gallery` has further rows, as `check` has no verdict on few.
    """
    folder, former = tmp_path_factory.mktemp("hostile"), os.getcwd()
    os.chdir(folder)
    rng = np.random.default_rng(3)
    client = connect("shop.db", create=True)
    schema = client.create_schema()
    schema.add_field("sku", DataType.VARCHAR, max_length=200, is_primary=True)
    schema.add_field("group", DataType.VARCHAR, max_length=200)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    hostile = [*HOSTILE.values()]
    for name, count in ("products", len(hostile)), ("gallery", 60):
        client.create_collection(
            name, schema=schema, index_params=index, consistency_level="Strong"
        )
        keys = [*hostile, *(f"plain {number}" for number in range(count - len(hostile)))]
        rows = [
            {"sku": key, "group": hostile[i % 4], "vector": vector}
            for i, (key, vector) in enumerate(zip(keys, vectors(rng, count, DIM), strict=True))
        ]
        client.insert(name, rows)

    for name in ("bank", "pairs"):
        chosen = [hostile[i % len(hostile)] for i in range(40)]
        texts = np.array([f"{key}\ud800 text" for key in chosen])
        np.savez(f"{name}.npz", query=vectors(rng, 40, DIM), key=np.array(chosen), text=texts)
    client.close()
    yield folder
    server_manager_instance.release_server("shop.db")
    os.chdir(former)


def assert_harmless(text):
    assert not set(text) & set(FORBIDDEN), sorted(set(text) & set(FORBIDDEN))
    text.encode()


COMMANDS = {
    "hubs": ["hubs", "products", *NNN],
    "explain a query": [
        "hubs",
        "products",
        *NNN,
        "--query-number",
        "1",
        "--top",
        "20",
        "--query-text",
        "text",
    ],
    "check": [
        *("check", "gallery", "--pairs", "pairs.npz", *BANK, "--query-text", "text"),
        *("--slice-by", "group", "--group-by", "group", "--page", "hubness.html"),
    ],
    "tune": ["tune", "products", "--bank", "bank.npz", "--bank-column", "query"],
    "match": ["match", "products", "--queries", "bank.npz", "--out", "matches.npz"],
    "status": ["status", "products"],
    "migrate plan": ["migrate", "run", "--plan", "products", *NNN],
    **{
        f"explain {name}": ["hubs", "products", "--row", key, *NNN, "--query-text", "text"]
        for name, key in HOSTILE.items()
    },
    "an unknown key": ["hubs", "products", "--row", "none\x1b[2J\u202e", *NNN],
    "an unknown collection": ["status", "none\x1b[2J\u202e"],
    "an unknown command": ["none\x1b[2J\u202e"],
    "an unknown option": ["status", "products", "--none\x1b[2J\u202e"],
    "an unknown method": [
        "hubs",
        "products",
        "--bank",
        "bank.npz",
        "--method",
        "none\x1b[2J\u202e",
    ],
    "a file that is missing": ["hubs", "products", "--bank", "none\x1b[2J\u202e.npy"],
    "a configuration": ["serve", "--config", "hubness.toml", "--check"],
}


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(folder, run, command, option):
    (folder / "hubness.toml").write_text(
        '[[collection]]\nname = "\\u001b[2J"\n"none\\u001b[2J\\u202e" = 1\nbank_column = "\\u001b[2J"\n'
    )
    if command[:2] == ["match", "products"]:
        command = [*command[:3], "queries.npy", *command[4:]]
        np.save("queries.npy", np.load("bank.npz")["query"])
    done = run(*command, *option)
    assert "Traceback" not in done.stderr
    assert done.stdout + done.stderr, "there is something to look at"
    assert_harmless(done.stdout)
    assert_harmless(done.stderr)
    if option and done.stdout:
        json.loads(done.stdout)


def test_keys_are_shown_and_no_markup_is_obeyed(folder, run):
    done = run("hubs", "products", *NNN)
    for shown in (
        r"\x1b]0;owned\x07key",
        r"key\u202egnp.exe",
        r"ke\u200by\u2060\ufeff\xad",
        r"key\nhub",
        "[bold red]key[/]",
        "[link=https://x.test]",
        "key:warning:",
    ):
        assert shown in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith((" hub ", " anti-hub "))]
    assert len(rows) == len(HOSTILE), "no key looks like a row"


def test_json_for_programs_is_exact(folder, run):
    listed = json.loads(run("hubs", "products", *NNN, "--json").stdout)["hubs"]["rows"]
    assert {row["key"] for row in listed} == set(HOSTILE.values())
    told = json.loads(
        run(
            "hubs", "products", "--row", HOSTILE["clear"], *NNN, "--query-text", "text", "--json"
        ).stdout
    )
    assert all(query["text"].endswith("\ud800 text") for query in told["hubs"]["row"]["queries"])


def test_the_page_shows_them_too(folder, run):
    done = run(*COMMANDS["check"])
    assert done.returncode in (0, 3), done.stderr
    page = (folder / "hubness.html").read_text("utf-8")
    assert_harmless(page)
    assert r"key\u202egnp.exe" in page
    assert r"\ud800 text" in page


def test_progress_bars_name_what_they_count(monkeypatch, capsys):
    monkeypatch.setattr(console, "err", console._Terminal(stderr=True))
    monkeypatch.setattr(console.err, "_force_terminal", True)
    monkeypatch.setattr(console.err, "_environ", {"TERM": "xterm"})
    monkeypatch.setattr(console.err, "is_interactive", True)
    monkeypatch.setattr(console.err, "_width", 200)
    drawn = ""
    with console.progress_bars() as progress:
        for text in HOSTILE.values():
            progress(f"reading {text}", 1, 2)
        until = time.monotonic() + 20
        while "[link=" not in drawn and time.monotonic() < until:
            time.sleep(0.05)
            drawn += capsys.readouterr().err
    for text in HOSTILE.values():
        assert f"reading {visible_line(text)}" in drawn
    assert not set(drawn) & set(FORBIDDEN) - set("\x1b\r"), (
        "rich draws bars with escape sequences of its own"
    )
    for steered in ("\x1b[2J", "\x1b]0;", "\x1b]8;"):
        assert steered not in drawn


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_lines_tables_and_events(text, capsys):
    listen = printed(silent)
    for name, facts in (
        ("warning", {"message": text}),
        ("paused", {"reason": text}),
    ):
        assert name in LINES
        listen(Event(name, facts, datetime.now(timezone.utc)))
    console.say(text)
    console.say(text, to_stderr=True)
    console.show_styled(text, (text, "red"))
    console.show_table(text, (text,), [(text,)])
    console.show_facts(text, {text: text})
    for shown in capsys.readouterr():
        assert_harmless(shown)


def test_a_log_record_is_one_line(capsys):
    handler = logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    try:
        for text in HOSTILE.values():
            log.warning("the key %s failed", text)
            log.warning(f"the key {text} failed")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2 * len(HOSTILE)
        assert_harmless("".join(lines))
        try:
            raise ValueError("\x1b[2J\u202e")
        except ValueError:
            log.exception("failed")
        told = capsys.readouterr().err
        assert "ValueError: \\x1b[2J\\u202e" in told
        assert_harmless(told)
    finally:
        log.removeHandler(handler)


def test_every_character_without_a_sight_of_its_own_is_escaped():
    """All of Unicode's controls and formats, except signs that are drawn around the digits of some scripts."""
    drawn = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
    kept = {0x0A, 0x09} | drawn
    for code in range(0x110000):
        char = chr(code)
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in kept:
            assert visible(char) != char, hex(code)
            assert visible(f"a{char}b").isascii()


def test_words_that_need_joiners_stay_and_what_is_shown_twice_stays_as_it_is():
    for word in ("می\u200cخواهم", "क्\u200dष", "👩\u200d🔧", "שלום", "naïve\tc\nd", r"a\x1b"):
        assert visible(word) == word
    for text in HOSTILE.values():
        assert visible(visible(text)) == visible(text)
        assert json.loads(visible_json(json.dumps(text, ensure_ascii=False))) == text
