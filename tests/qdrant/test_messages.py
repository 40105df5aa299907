"""What commands say on Qdrant: one line for an error, words and no Python, and only options that there are."""

import ast
import json
import logging
import re
import warnings
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse
from typer.main import get_command

import milvus_hubness
import qdrant_hubness
from milvus_hubness import (
    NNN,
    CollectionNotFound,
    MigrationOptions,
    NoMigration,
    QueryBank,
    Recipe,
    ResumeRefused,
    ServerUnavailable,
    StoreError,
    cli,
    cutover,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.correction.state import BankReference
from milvus_hubness.jobs.migration.ledger import Ledger
from qdrant_hubness.store import QdrantStore, connect
from qdrant_hubness.store.requests import translated
from tests.qdrant.strict import StrictServer, listening
from tests.qdrant.strict.grpc_errors import CallFailed
from tests.support.galleries import vectors

ALONE = MigrationOptions(no_writers=True)
DIM = 8
PYTHON = re.compile(r"""[{\[(]['"]|\b(None|True|False)\b|'[a-z_]+': """)
"""What a repr of a dictionary, a list or a tuple looks like."""


def refused(text, status=400):
    content = json.dumps({"status": {"error": text}, "time": 0.0}).encode()
    return UnexpectedResponse(status, "Bad Request", content, httpx.Headers())


def said(error, collection="items", alias=""):
    """Return what becomes of an error of qdrant-client."""
    with pytest.raises(StoreError) as raised, translated(collection, alias):
        raise error
    assert "\n" not in str(raised.value)
    return raised.value


def test_advice_about_parameters_of_requests_and_internal_names_are_left_out():
    alias = "items__lease_3_0a1b2c3d"
    text = f'Bad request: Limit exceeded 11 > 10 for "limit" of {alias}. Help: Reduce the "limit" parameter to 10.'
    message = str(said(refused(text), alias=alias))
    assert "Reduce" not in message
    assert "lease" not in message
    assert "raise that limit in the strict mode of 'items'" in message
    message = str(
        said(
            refused(
                "request larger than rate limiter capacity, please try to split your request.", 429
            )
        )
    )
    assert "split" not in message
    assert "raise that limit in the strict mode of 'items'" in message


SILENT = {
    "REST": ResponseHandlingException(ConnectionResetError("reset by\n peer")),
    "a gateway": UnexpectedResponse(
        503, "Service Unavailable", b"<html>\nno upstream</html>", httpx.Headers()
    ),
    "gRPC": CallFailed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"),
    "gRPC, too late": CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
}


@pytest.mark.parametrize("way", SILENT)
def test_a_server_that_stops_answering_says_how_to_go_on(way):
    error = said(SILENT[way])
    assert isinstance(error, ServerUnavailable)
    assert "run the command again, which continues" in str(error)


BANK = BankReference(collection="bank", generation="ab", fingerprint="ab", count=1, size=1)


def test_a_server_that_is_gone_is_one_line_whatever_is_read_of_it():
    with listening(StrictServer(version="1.15.0")) as uri:
        client = connect(uri)
        store = QdrantStore(client)
    reads = {
        "a store": lambda: QdrantStore(client),
        "names": store.collection_names,
        "its version": store.server_version,
        "banks in use": lambda: store.drop_bank_generations([BANK]),
        "properties": lambda: store.properties.forget("items"),
    }
    for name, read in reads.items():
        with pytest.raises(ServerUnavailable, match="stopped answering") as raised:
            read()
        assert "''" not in str(raised.value), name


def test_a_key_without_rights_names_the_variable():
    for error in (
        refused("Forbidden", 403),
        CallFailed(grpc.StatusCode.PERMISSION_DENIED, "Forbidden"),
    ):
        assert "$MILVUS_HUBNESS_TOKEN" in str(said(error))


def test_a_rate_is_an_error_of_the_store():
    assert "rate limit" in str(said(ResourceExhaustedResponse("Read rate limit\n exceeded", 60)))


def test_a_rate_that_lasts_is_one_line_of_the_command(monkeypatch, capsys):
    server = StrictServer()
    client = server.client()
    rates = models.StrictModeConfig(enabled=True, read_rate_limit=1)
    config = models.VectorParams(size=DIM, distance="Dot")
    client.create_collection("items", vectors_config=config, strict_mode_config=rates)
    monkeypatch.setenv("MILVUS_HUBNESS_WAIT_SECONDS", "2")
    with listening(server) as url:
        monkeypatch.setattr(
            "sys.argv", ["milvus-hubness", "status", "items", "--uri", f"qdrant+{url}"]
        )
        client.count("items")
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("milvus-hubness: Qdrant refused a request on 'items': ")


def test_a_key_over_http_is_one_line_of_ours(monkeypatch, caplog):
    monkeypatch.setattr(
        QdrantClient, "info", lambda self: models.VersionInfo(title="", version="1.18.1")
    )
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        connect("http://qdrant.example:6333", "k3y").close()
    assert not [str(each.message) for each in caught if "Api key" in str(each.message)]
    [message] = caplog.messages
    assert "the API key for http://qdrant.example:6333 is sent unencrypted" in message
    assert "https://" in message
    caplog.clear()
    connect("http://127.0.0.1:6333", "k3y").close()
    assert not caplog.messages, "nobody is on the way"


@pytest.fixture
def small(backend):
    rng = np.random.default_rng(5)
    name = backend.fill(vectors(rng, 60, DIM), "Dot")
    return backend.store(), name, QueryBank(vectors(rng, 40, DIM))


def test_a_mistyped_name_is_answered_with_near_ones_only(small):
    store, name, bank = small
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))), ALONE)
    # The database may have others with near names: the nearest comes first.
    with pytest.raises(NoMigration, match=rf"did you mean {name} -> {name}_hubness( or |\?)"):
        rollback(store, f"{name}_hubnes")
    with pytest.raises(CollectionNotFound, match=f"did you mean .*'{name}_hubness'"):
        store.info(f"{name}_hubnes")
    with pytest.raises(NoMigration) as raised:
        rollback(store, "something else")
    assert name not in str(raised.value)


def test_among_many_near_names_the_nearest_is_the_first_of_three(small):
    store, name, bank = small
    migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))), ALONE)
    ledger = Ledger(store)
    present = ledger.find(name)
    others = [
        present.model_copy(
            update={
                "id": f"{number}",
                "source": f"{name}{number}",
                "target": f"{name}{number}_hubness",
            }
        )
        for number in range(5)
    ]
    try:
        for other in others:
            ledger.write(other)
        with pytest.raises(NoMigration, match=rf"mean {name} -> {name}_hubness or ") as raised:
            rollback(store, f"{name}_hubnes")
        assert str(raised.value).count(" -> ") == 3
    finally:
        for other in others:
            ledger.forget(other)


def test_a_copy_after_a_rollback_is_not_called_unfinished(small, backend):
    store, name, bank = small
    backend.made.append("live")
    target = migrate(
        store, plan_correction(store, name, Recipe(bank, estimator=NNN(4))), ALONE
    ).target
    cutover(store, target, alias="live", options=ALONE)
    rollback(store, "live", options=ALONE)
    with pytest.raises(ResumeRefused, match="from before a rollback") as raised:
        migrate(store, plan_correction(store, name, Recipe(bank, estimator=NNN(5))), ALONE)
    assert "unfinished" not in str(raised.value)
    assert "--restart" in str(raised.value)


def test_messages_name_commands(small, backend):
    store, name, bank = small
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    target = migrate(store, plan, ALONE).target
    backend.client.delete_collection(target)
    with pytest.raises(
        StoreError, match=r": milvus-hubness migrate run .* --bank FILE --restart begins again"
    ):
        migrate(store, plan, ALONE)


def test_commands_print_words(quick_folder, monkeypatch, command):
    data, rng = quick_folder / "data", np.random.default_rng(0)
    client = QdrantClient(path=str(data))
    client.create_collection(
        "items", vectors_config=models.VectorParams(size=DIM, distance="Cosine")
    )
    rows = vectors(rng, 60, DIM)
    rows[7] = 0
    client.upload_collection("items", rows, ids=range(60))
    client.close()
    for bank in ("bank", "other"):
        np.save(quick_folder / f"{bank}.npy", vectors(rng, 40, DIM))
    monkeypatch.setenv("MILVUS_HUBNESS_URI", f"qdrant+file://{data}")
    bank, other = str(quick_folder / "bank.npy"), str(quick_folder / "other.npy")
    fitted = ("items", "--bank", bank, "--param", "k=4", "--force")

    def run(*words):
        done = command(*words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found = PYTHON.search(done.output)
        assert not found, f"{' '.join(words)}: {done.output}"
        return done.output

    run("status", "items")
    run("migrate", "run", "--plan", *fitted, "--alias", "live")
    run("migrate", "run", "--rehearse", *fitted)
    assert "bias 0" in run("migrate", "status", "items")
    run("migrate", "cutover", "items", "--alias", "live")
    assert "rows without bias" in run("status", "live")
    run("refresh", "live", "--bank", other, "--force", "--plan")
    run("refresh", "live", "--bank", other, "--force")
    run("refresh", "live")
    # The refresh goes back first, and then the migration.
    run("migrate", "rollback", "live")
    run("migrate", "rollback", "live")
    assert "already" in run("migrate", "rollback", "live")
    assert "Would be removed for good" in run("sweep", "items")
    assert "items_hubness" in run("sweep", "items", "--yes")
    assert "no leftovers" in run("sweep", "items")
    run("enable", *fitted, "--plan")
    run("enable", *fitted)
    run("status", "items")
    run("disable", "items")
    assert "hubness_bias of 60 rows" in run("sweep", "items", "--yes")


def texts_of(path):
    """Yield the strings of a module, without docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


def test_every_option_that_a_message_advises_exists():
    def options(command):
        yield from (name for parameter in command.params for name in parameter.opts)
        for inner in getattr(command, "commands", {}).values():
            yield from options(inner)

    paths = [
        *Path(qdrant_hubness.__file__).parent.rglob("*.py"),
        *Path(milvus_hubness.__file__).parent.rglob("*.py"),
    ]
    advised = {
        option
        for path in paths
        for text in texts_of(path)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }
    assert {"--restart", "--field", "--bank"} <= advised
    # Most commands have one that is none of their parameters.
    of_pip = advised - set(options(get_command(cli.app))) - {"--help-all"}
    assert of_pip == {"--force-reinstall", "--no-deps"}, "those of pip alone"
