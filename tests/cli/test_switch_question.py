"""`migrate run` in a terminal: the question before the switch, and what follows each reply."""

import json

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus.exceptions import MilvusException

from milvus_hubness import HubnessClient, connect
from tests.cli.conftest import DIM
from tests.support.galleries import vectors
from tests.support.terminals import CTRL_C, CTRL_D, Terminal, lines_of

RUN = ("migrate", "run", "products", "--bank", "bank.npy", "--param", "k=8")
QUESTION = "Switch live to products_hubness? [y/N] "


@pytest.fixture
def live(files):
    """An alias over the collection; no process has the database open."""
    client = connect("shop.db")
    client.create_alias("products", "live")
    client.close()
    server_manager_instance.release_server("shop.db")


def behind(name):
    client = connect("shop.db")
    try:
        return client.describe_collection(name)["collection_name"]
    finally:
        client.close()


def test_a_yes_at_a_real_terminal_switches(live):
    terminal = Terminal(*RUN, "--alias", "live")
    shown = terminal.until(QUESTION)
    assert shown.index("verified: 60 rows") < shown.index(QUESTION)
    assert "plain clients fail when they search or write it" in " ".join(shown.split())
    terminal.type("y\n")
    assert terminal.code() == 0, terminal.shown
    assert "products_hubness: switched" in terminal.shown
    assert "━" not in "".join(lines_of(terminal.drawn)), "no bar is left"
    assert behind("live") == "products_hubness"


@pytest.mark.parametrize("reply", ["n\n", "live\n", CTRL_D], ids=["n", "word", "end"])
def test_any_other_reply_leaves_the_copy_for_the_cutover(live, run, at_terminal, reply):
    code, screen = at_terminal(*RUN, "--alias", "live", replies=[reply])
    assert code == 0, screen.shown
    assert QUESTION in screen.shown
    assert "No name was moved" in screen.shown
    assert "milvus-hubness migrate cutover products --alias live" in screen.shown
    assert behind("live") == "products"
    status = json.loads(run("migrate", "status", "products", "--json").stdout)["migration"]
    assert (status["phase"], status["lease"]) == ("verified", None)

    done = run("migrate", "cutover", "products", "--alias", "live")
    assert done.returncode == 0, done.stderr
    assert behind("live") == "products_hubness"


def test_ctrl_c_at_the_question_ends_the_run_and_it_can_be_continued(live, run, at_terminal):
    code, screen = at_terminal(*RUN, "--alias", "live", replies=[CTRL_C])
    assert code == 130, screen.shown
    assert QUESTION in screen.shown
    assert "stopped; repeat the command to continue" in screen.shown
    assert "Traceback" not in screen.shown
    assert behind("live") == "products"
    status = json.loads(run("migrate", "status", "products", "--json").stdout)["migration"]
    assert (status["phase"], status["lease"]) == ("verified", None)

    again = run("migrate", "run", "products", "--alias", "live")
    assert again.returncode == 0, again.stderr
    assert behind("live") == "products_hubness"


def test_a_continued_run_puts_the_question_too(live, run, at_terminal):
    assert run(*RUN).returncode == 0
    carry_on = ("migrate", "run", "products", "--alias", "live")
    code, screen = at_terminal(*carry_on, replies=["y\n"])
    assert code == 0, screen.shown
    assert QUESTION in screen.shown
    assert behind("live") == "products_hubness"


@pytest.mark.parametrize("option", ["--yes", "--json"])
def test_no_question_where_a_script_has_decided(live, at_terminal, option):
    code, screen = at_terminal(*RUN, "--alias", "live", option)
    assert code == 0, screen.shown
    assert "[y/N]" not in screen.shown
    assert behind("live") == "products_hubness"


def test_no_question_without_a_terminal_or_without_a_name(live, run):
    assert "[y/N]" not in run(*RUN).stdout
    switched = run(*RUN, "--alias", "live")
    assert "[y/N]" not in switched.stdout
    assert behind("live") == "products_hubness"


def test_what_it_says_of_plain_clients_is_true(live, run):
    assert (
        "plain clients fail" in run("migrate", "run", "--plan", *RUN[2:], "--alias", "live").stdout
    )
    assert run(*RUN, "--alias", "live").returncode == 0
    query = vectors(np.random.default_rng(3), 1, DIM)
    plain = connect("shop.db")
    with pytest.raises(MilvusException):
        plain.search("live", data=list(query), limit=3)
    with pytest.raises(MilvusException):
        plain.insert("live", [{"id": 900, "vector": query[0], "group": 0}])
    client = HubnessClient("shop.db")
    for name in ("live", "products"):
        [hits] = client.search(name, data=list(query), limit=3)
        assert len(hits) == 3
