"""The commands as a user runs them: what they print, how they end, what they leave behind."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType

import milvus_hubness
from milvus_hubness import connect
from milvus_hubness.basics.files.writing import check_writable
from milvus_hubness.basics.texts import describe, rounded_shares
from milvus_hubness.cli.verdicts import _mixed
from milvus_hubness.errors import UnreadableFile
from tests.cli.conftest import DIM, assert_fails, collections
from tests.support.galleries import half_known, plain_collection, vectors

"""Nobody writes."""


def test_an_unknown_collection_is_one_line_of_a_process(started):
    """pymilvus, which a command imports late, logs no traceback."""
    connect("empty.db", create=True).close()
    server_manager_instance.release_server("empty.db")
    process = started("status", "nothing", "--uri", "empty.db")
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message.strip().splitlines() == ["milvus-hubness: no collection or alias 'nothing'"]


def test_a_migrated_collection_tells_of_itself_and_is_refreshed(run, files):
    asked = ("--bank", "bank.npy", "--param", "k=8", "--alias", "live", "--no-writers")
    done = run("migrate", "run", "products", *asked)
    assert done.returncode == 0, done.stderr

    status = run("status", "live")
    assert status.returncode == 0, status.stderr
    for fact in (
        "products_hubness",
        "corrected",
        "yes",
        "products__bank, 40 queries",
        "NNN(k=8",
        "epoch 1",
    ):
        assert fact in status.stdout
    told = json.loads(run("status", "products_hubness", "--json").stdout)["status"]
    assert (told["corrected"], told["pending"], told["epoch"]) == (True, 0, 1)

    asked = ("refresh", "live", "--bank", "bank.parquet", "--param", "alpha=1")
    shown = " ".join(run(*asked, "--plan").stdout.split())
    for fact in (
        "copy products_hubness_r2, 60 rows",
        "names that move live",
        "MiB now,",
        "MiB for the copy",
        "less than a minute, and 0 s until clients follow",
    ):
        assert fact in shown
    refreshed = run(*asked, "--json")
    assert refreshed.returncode == 0, refreshed.stderr
    told = json.loads(refreshed.stdout)["refresh"]
    assert (told["action"], told["scanned"]) == ("full", 60)
    assert told["former_copy"] == "products_hubness"
    assert told["reason"].startswith("the parameters changed from ")
    assert run("migrate", "rollback", "live").returncode == 0
    told = json.loads(run("status", "live", "--json").stdout)["status"]
    assert (told["estimator"]["alpha"], told["epoch"]) == (0.75, 1)


@pytest.mark.parametrize(
    ("bank", "column"),
    [
        ("bank.npy", None),
        ("bank.npz", "queries"),
        ("bank.parquet", None),
        ("bank.arrow", "embedding"),
        ("collection:products", None),
    ],
)
def test_banks_of_every_kind(run, files, bank, column):
    chosen = ["--bank-column", column] if column else []
    done = run(
        "migrate", "run", "--plan", "products", "--bank", bank, *chosen, "--param", "k=8", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["bank"]["queries"] == (
        60 if bank.startswith("coll") else 40
    )


def test_a_plan_shows_its_gate_and_its_target_bank(run, files):
    asked = [
        "run",
        "products",
        "--bank",
        "bank.npz",
        "--bank-column",
        "queries",
        "--gate",
        "1",
        "--no-writers",
    ]
    done = run("migrate", *asked, "--target-bank", "bank.npy", "--json")
    assert done.returncode == 0, done.stderr
    plan = done.lines()[0]["facts"]
    assert (plan["gate"], plan["bank"]["targets"]) == (1, 40)


def test_tune_weighs_pairs_and_says_what_is_asked_for_most(run, files):
    queries = vectors(np.random.default_rng(4), 30, DIM)
    weights = np.r_[70, np.ones(29)]
    np.savez("pairs.npz", query=queries, key=np.arange(30), weight=weights)
    asked = ("tune", "products", "--bank", "bank.npy", "--pairs", "pairs.npz")
    human = run(*asked, "--all")
    assert human.returncode == 0, human.stderr
    assert "the 1% of items with most pairs take 71% of the pairs" in human.stdout
    told = json.loads(run(*asked, "--json").stdout)["tune"]
    assert told["demand"] == pytest.approx(70 / 99)
    raw = told["rows"][0]["value"]
    assert min(abs(raw - share) for share in np.r_[np.arange(30), 70 + np.arange(30)] / 99) < 1e-6

    # The wrong file writes no verdict.
    stored = run("status", "products", "--json").stdout
    for wrong, words in (
        (weights[:29], "weights of 30 pairs must be 30 numbers"),
        (-weights, "must be a number from 0 to 1e+20"),
        (0 * weights, "weights of all pairs are 0"),
        (np.array(["often"] * 30), "must be 30 numbers"),
    ):
        np.savez("pairs.npz", query=queries, key=np.arange(30), weight=wrong)
        assert_fails(run(*asked), 1, words)
    table = pa.table({"query": list(queries), "key": list(range(30)), "weight": [None] * 30})
    pq.write_table(table, "pairs.parquet")
    assert_fails(run(*asked[:-1], "pairs.parquet"), 1, "must be 30 numbers")
    assert run("status", "products", "--json").stdout == stored


def test_tune_then_check(run, files):
    rng = np.random.default_rng(4)
    rng.normal(size=(1, 1))
    queries = vectors(rng, 30, DIM)
    np.savez("pairs.npz", query=queries, key=np.arange(30))
    table = pa.table({"query": list(queries), "key": list(range(30))})
    pq.write_table(table, "pairs.parquet")
    told = json.loads(
        run("tune", "products", "--bank", "bank.npy", "--pairs", "pairs.npz", "--json").stdout
    )
    assert told["tune"]["verdict"] in {"apply", "apply weakly", "not proven", "leave it alone"}
    assert told["tune"]["labelled"]
    human = run("tune", "products", "--bank", "bank.npy", "--pairs", "pairs.parquet", "--all")
    assert human.returncode == 0, human.stderr
    assert f"products: {told['tune']['verdict']}" in human.stdout
    assert "as it is" in human.stdout
    shares = [
        int(line.split()[-1][:-1]) for line in human.stdout.splitlines() if line.endswith("%")
    ]
    assert sum(shares) == (0 if told["tune"]["choice"] is None else 100)
    done = run(
        "check",
        "products",
        "--pairs",
        "pairs.npz",
        "--bank",
        "bank.npy",
        "--page",
        "page.html",
    )
    assert done.returncode in (0, 3), done.stderr
    assert "<svg" in (files / "page.html").read_text()
    for figure in (
        "30 over 60 items",
        "skewness of N_10",
        " -> ",
        "R@1",
        "95% interval",
        "page.html",
    ):
        assert figure in done.stdout
    asked = (
        "check",
        "products",
        "--pairs",
        "pairs.npz",
        "--bank",
        "bank.npy",
        "--page",
        "/dev/full",
    )
    assert_fails(run(*asked), 1, "cannot write /dev/full: No space left on device")
    np.savez("short.npz", query=queries, key=np.arange(29))
    np.savez("keyless.npz", query=queries)
    for pairs, said in (
        ("short.npz", "29 keys for 30"),
        ("keyless.npz", "'key'"),
        ("missing.npz", "missing"),
    ):
        assert_fails(run("tune", "products", "--bank", "bank.npy", "--pairs", pairs), 1, said)
    assert_fails(run("tune", "products"), 1, "not corrected")
    np.save("asked.npy", queries)
    blind = run("tune", "products", "--bank", "bank.npy")
    seeing = run("tune", "products", "--bank", "bank.npy", "--queries", "asked.npy")
    assert "Measured on the bank alone" in blind.stdout
    assert "Measured on the bank alone" not in seeing.stdout
    assert "products: " in seeing.stdout
    both = run(
        "tune", "products", "--bank", "bank.npy", "--queries", "asked.npy", "--pairs", "pairs.npz"
    )
    assert both.returncode == 2


def test_tune_prints_the_gate_that_it_chose_and_migrate_follows(run, files):
    bank, items, queries = half_known()
    plain_collection(connect("shop.db"), "half", items, "IP")
    np.save("half.npy", bank)
    np.savez("half.npz", query=queries, key=np.arange(200))
    told = run("tune", "half", "--bank", "half.npy", "--pairs", "half.npz", "--all").stdout
    assert "as with --gate 1; migrate, enable and refresh follow, and --gate 0 corrects all" in told
    # Shares are whole numbers, and stand last; methods without one have their excess answers there.
    shares = [int(share) for share in re.findall(r" (\d+)% *$", told, re.MULTILINE)]
    assert sum(shares) == 100
    for options, gate in (([], 1), (["--gate", "0"], None)):
        for command in (["migrate", "run", "--plan"], ["enable", "--plan"]):
            done = run(*command, "half", "--bank", "half.npy", *options, "--json")
            plan = json.loads(done.stdout)
            assert plan.get("plan", plan)["gate"] == gate


def spoiled(files):
    np.savez(files / "two.npz", past=np.eye(40, DIM), new=np.eye(40, DIM))
    np.save(files / "narrow.npy", np.ones((40, DIM - 1), np.float32))
    np.save(files / "nan.npy", np.where(np.eye(40, DIM) == 1, np.nan, 1.0))
    np.save(files / "empty.npy", np.empty((0, DIM), np.float32))
    np.save(files / "zeros.npy", np.zeros((40, DIM), np.float32))
    np.save(files / "complex.npy", np.full((40, DIM), 1 + 1j))
    objects = np.array([*range(39), None], object)
    np.savez(files / "objects.npz", query=np.ones((40, DIM)), key=objects)
    np.savez(files / "floats.npz", query=np.ones((40, DIM)), key=np.arange(40) / 2)
    (files / "broken.npy").write_bytes(b"not a numpy file")
    (files / "bank.txt").write_text("1 2 3")


QUERY_SCALE = ("--queries", "nobody-reads-this.npy")
INDEX = ("migrate", "run", "products", "--bank", "bank.npy", "--param", "k=8", "--index-type")
README = ("Where do I get reference queries?",)
NARROW = ("narrow.npy has 7", "dimension 8")
DUALIS = ("enable", "products", "--bank", "bank.npy", "--method", "dualis")
RUN = ("migrate", "run", "products", "--bank")
FAILURES = [
    ([*RUN, "narrow.npy"], 1, ["8", "7"]),
    ([*RUN, "nan.npy"], 1, ["NaN", "0, 1, 2"]),
    ([*RUN, "empty.npy"], 1, ["bank"]),
    ([*RUN, "broken.npy"], 1, ["broken.npy"]),
    ([*RUN, "missing.npy"], 1, ["missing.npy"]),
    ([*RUN, "bank.txt"], 1, ["bank.txt"]),
    ([*RUN, "two.npz"], 1, ["past", "new", "--bank-column"]),
    ([*RUN, "bank.npy", "--param", "k=41"], 1, ["41", "40"]),
    ([*RUN, "bank.npy", "--param", "k=0"], 2, ["k"]),
    ([*RUN, "bank.npy", "--param", "alpha=-1"], 2, ["alpha must be above 0"]),
    ([*RUN, "zeros.npy"], 1, ["zeros.npy has only zero vectors"]),
    ([*RUN, "complex.npy"], 1, ["must hold real numbers, not complex128"]),
    (
        [*INDEX, "HNSW", "--index-param", "M=abc", "--plan"],
        2,
        ["M of HNSW must be a whole number", "'abc'"],
    ),
    (
        [*INDEX, "HNSW", "--index-param", "M=1.5", "--plan"],
        2,
        ["M of HNSW must be a whole number", "1.5"],
    ),
    (
        [*INDEX, "HNSW", "--index-param", "efConstruction=abc", "--plan"],
        2,
        ["efConstruction of HNSW"],
    ),
    (
        [*INDEX, "BOGUS", "--plan"],
        2,
        ["'BOGUS' is unknown to this server", "AUTOINDEX, FLAT, IVF_FLAT"],
    ),
    ([*INDEX, "BOGUS", "--rehearse"], 2, ["'BOGUS'"]),
    ([*INDEX, "BOGUS"], 2, ["'BOGUS'"]),
    (["migrate", "run", "products"], 1, ["no migration of 'products'", "--bank", *README]),
    (
        ["check", "products", "--queries", "bank.npy"],
        1,
        ["'products' is not corrected", *README],
    ),
    (["tune", "products"], 1, ["'products' is not corrected", *README]),
    (
        ["tune", "products", "--bank", "bank.npy", "--pairs", "objects.npz"],
        1,
        ["objects.npz: 'key' holds Python objects"],
    ),
    (
        ["tune", "products", "--bank", "bank.npy", "--pairs", "floats.npz"],
        1,
        ["'key' of floats.npz", "0.0"],
    ),
    (
        ["check", "products", "--page", "nowhere/page.html", *QUERY_SCALE],
        1,
        ["nowhere/page.html: No such"],
    ),
    (
        ["check", "products", "--page", "bank.npy/page.html", *QUERY_SCALE],
        1,
        ["Not a directory"],
    ),
    (
        ["check", "products", "--page", ".", *QUERY_SCALE],
        1,
        ["cannot write .: Is a directory"],
    ),
    (["proxy", "--upstream", "localhost:99999"], 2, ["the upstream must be HOST:PORT"]),
    ([*RUN, "bank.npy", "--param", "alpha=nan"], 2, ["alpha"]),
    ([*RUN, "bank.npy", "--method", "magic"], 2, ["magic"]),
    ([*RUN, "bank.npy", "--method", "is", "--param", "tau=0"], 2, ["tau"]),
    ([*RUN, "bank.npy", "--method", "is", "--param", "tau"], 2, ["NAME=VALUE"]),
    ([*RUN, "bank.npy", "--method", "blend", "--param", "k=8"], 2, ["no parameter"]),
    ([*RUN, "bank.npy", "--method", "dualis"], 1, ["target"]),
    (["migrate", "run", "nowhere", "--bank", "bank.npy", "--param", "k=8"], 1, ["nowhere"]),
    ([*RUN, "bank.npy", "--param", "k=8", "--field", "group"], 1, ["group"]),
    (["refresh", "products"], 1, ["products", "is not corrected"]),
    (["status", "nowhere"], 1, ["nowhere"]),
    (["migrate", "rollback", "products"], 1, ["no migration", "products"]),
    (["status", "products", "--field", "nope"], 1, ["'nope'", "choose one of vector"]),
    (["disable", "products", "--field", "nope"], 1, ["'nope'", "choose one of vector"]),
    (
        ["refresh", "products", "--field", "nope", "--param", "k=3"],
        1,
        ["'nope'", "choose one of vector"],
    ),
    (["disable", "nowhere"], 1, ["nowhere"]),
    (["tune", "nowhere", "--bank", "bank.npy"], 1, ["nowhere"]),
    (["tune", "products", "--bank", "bank.npy", "--queries", "missing.npy"], 1, ["missing.npy"]),
    (["tune", "products", "--bank", "bank.npy", "--queries", "nan.npy"], 1, ["nan.npy", "NaN"]),
    (["tune", "products", "--bank", "bank.npy", "--queries", "narrow.npy"], 1, [*NARROW]),
    (["tune", "products", "--bank", "bank.npy", "--target-bank", "narrow.npy"], 1, [*NARROW]),
    (["enable", "products", "--bank", "nan.npy"], 1, ["nan.npy", "NaN"]),
    (["enable", "products", "--bank", "narrow.npy"], 1, [*NARROW]),
    (["enable", "products", "--bank", "bank.npy", "--queries", "narrow.npy"], 1, [*NARROW]),
    ([*DUALIS, "--target-bank", "narrow.npy"], 1, [*NARROW]),
    (["enable", "products", "--bank", "bank.npy", "--gate", "-1"], 2, ["gate", "-1"]),
    (["enable", "products", "--bank", "bank.npy", "--bank-name", "products"], 1, ["--bank-name"]),
    ([*RUN, "bank.npy", "--gate", "-1"], 2, ["gate", "-1"]),
]


def test_what_is_wrong_is_told_in_one_line_and_nothing_is_left(run, files):
    spoiled(files)
    for arguments, code, said in FAILURES:
        assert_fails(run(*arguments), code, *said)
    assert collections(files) == {"products", "hubness_ledger"}


def test_profiles_that_cannot_be_leave_those_that_are(run, files):
    spoiled(files)
    asked = (
        "migrate",
        "run",
        "products",
        "--bank",
        "bank.npy",
        "--param",
        "k=8",
        "--alias",
        "live",
        "--no-writers",
    )
    assert run(*asked).returncode == 0
    before = connect("shop.db").describe_collection("products_hubness")["properties"]
    for arguments, code, said in (
        (["--profile", "image"], 1, ["pass --bank FILE"]),
        (["--profile", "image", "--bank", "missing.npy"], 1, ["missing.npy"]),
        (["--profile", "image", "--bank", "nan.npy"], 1, ["nan.npy", "NaN"]),
        (["--profile", "image", "--bank", "narrow.npy"], 1, [*NARROW]),
        (["--profile", "image", "--bank", "bank.npy", "--param", "k=41"], 1, ["41", "40"]),
        (["--profile", "", "--bank", "bank.npy"], 2, ["name"]),
        (["--field", "nope"], 1, ["'nope'", "choose one of vector"]),
    ):
        assert_fails(run("refresh", "products_hubness", *arguments), code, *said)
    assert_fails(run("disable", "products_hubness"), 1, "migrate rollback")
    assert_fails(run("tune", "products__bank", "--bank", "bank.npy"), 1, "is a query bank")
    assert_fails(run("enable", "products__bank", "--bank", "bank.npy"), 1, "is a query bank")
    assert connect("shop.db").describe_collection("products_hubness")["properties"] == before
    bank = connect("shop.db").query("products__bank", filter="", output_fields=["count(*)"])
    assert bank[0]["count(*)"] == 40


@pytest.mark.parametrize(
    "arguments",
    [
        ["migrate"],
        ["migrate", "run", "--plan", "products"],
        ["migrate", "run", "--bank", "bank.npy"],
        ["migrate", "run", "products", "--alias", "live", "--rename"],
        [*RUN, "bank.npy", "--rows-per-second", "0"],
        ["migrate", "clean", "products"],
        ["check"],
        ["nonsense"],
        ["status", "--nonsense"],
        ["demo", "--keep"],
        ["proxy", "--upstream", "localhost:19530", "--port", "99999"],
        ["proxy", "--upstream", "localhost:19530", "--port", "-1"],
        ["enable", "products"],
    ],
)
def test_wrong_usage_ends_with_two(run, arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("enable products", name) for name in ("products", "live", "products__bias_a")),
        *(("migrate run products --alias other", name) for name in ("products", "live", "other")),
        ("migrate run products", "products_hubness"),
        ("migrate run products --rename", "products__before_hubness"),
        *((command, "others__bank") for command in ("enable products", "migrate run products")),
    ],
)
def test_a_plan_knows_where_no_bank_can_be_stored(run, files, command, name):
    """The run noticed it after it had begun a copy, which stayed."""
    client = connect("shop.db")
    client.create_alias("products", "live")
    plain_collection(client, "others", vectors(np.random.default_rng(1), 60, 2 * DIM), "COSINE")
    np.save("wide.npy", vectors(np.random.default_rng(2), 40, 2 * DIM))
    settings = ("--force", "--method", "nnn", "--param", "k=8")
    assert run("enable", "others", "--bank", "wide.npy", *settings).returncode == 0
    before = collections(files)
    for plan in (("--plan",), ()):
        done = run(*command.split(), "--bank", "bank.npy", *settings, "--bank-name", name, *plan)
        assert_fails(done, 1, name, "--bank-name")
    assert collections(files) == before


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check products --bank bank.npy --metric L2", "--metric"),
        ("check products --bank bank.npy --key-column sku", "--key-column"),
        ("tune products --bank bank.npy --key-column sku", "--key-column"),
        ("enable products --bank bank.npy --key-column sku", "--key-column"),
        ("migrate run products --bank bank.npy --key-column sku --plan", "--key-column"),
        ("refresh products --key-column sku", "--key-column"),
        ("refresh products --bank-column queries", "--bank-column"),
        ("enable products --bank samples --bank-column queries", "--bank-column"),
        ("check products --queries bank.npy --bank-column queries", "--bank-column"),
        ("hubs products --bank bank.npy --alert-budget 0.5", "--alert-budget"),
        ("hubs products --bank bank.npy --suspicious --queries bank.npy", "--queries"),
        ("hubs products --bank bank.npy --suspicious --method nnn", "--method"),
        ("hubs products --bank bank.npy --suspicious --param k=8", "--param"),
        ("hubs products --on-hub refuse --bank bank.npy", "--bank"),
        ("hubs products --on-hub refuse --top 3", "--top"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(run, files, command, option):
    """Who names it takes the figures for those of the option."""
    done = run(*command.split())
    assert done.returncode == 2, done.stdout
    assert option in done.stderr.splitlines()[-1]
    assert collections(files) == {"products"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["disable"],
        ["refresh", "--profile", "image"],
        ["enable", "--bank", "bank.npy"],
        ["tune", "--queries", "bank.npy"],
        ["migrate run", "--bank", "bank.npy"],
        ["migrate cutover", "--rename"],
        ["migrate status"],
    ],
    ids=" ".join,
)
def test_a_dead_server_is_told(run, arguments):
    secret, command = "s3cret-token", [*arguments[0].split(), "products", *arguments[1:]]
    done = run(*command, uri="http://127.0.0.1:1", MILVUS_HUBNESS_TOKEN=secret)
    assert_fails(done, 1, "no Milvus answers at http://127.0.0.1:1")
    assert secret not in done.stdout + done.stderr


def test_a_file_that_is_no_database_is_told(run, tmp_path):
    for uri, code, said in (
        (str(tmp_path), 1, ".db"),
        ("shop.txt", 2, ".db"),
        ("nowhere/shop.db", 1, "correct the path"),
    ):
        assert_fails(run("status", "products", uri=uri), code, uri, said)


def test_an_error_is_json_too(run, files):
    done = run("status", "nowhere", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "CollectionNotFound"


def test_wrong_usage_is_json_too(run, files):
    for arguments, said in (
        (["migrate", "run", "--plan", "products"], "no reference queries: pass --bank FILE"),
        (["status"], "Missing argument"),
        (["status", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (
            ["refresh", "products", "--bank", "bank.npy", "--rows-per-second", "x"],
            "'--rows-per-second'",
        ),
    ):
        done = run(*arguments, "--json")
        assert done.returncode == 2
        assert said in json.loads(done.stdout)["error"]["message"]
        assert "Error: " in done.stderr


def test_the_version_is_told(run):
    assert run("--version").stdout == f"milvus-hubness {milvus_hubness.__version__}\n"
    assert run("--version").returncode == 0


def test_output_that_cannot_be_written_is_told_in_one_line(run, files, monkeypatch):
    for arguments in (["status", "products"], ["status", "products", "--json"]):
        with monkeypatch.context() as broken, open("/dev/full", "w", encoding="utf-8") as full:
            broken.setattr(sys, "stdout", full)
            done = run(*arguments)
        assert_fails(done, 1, "milvus-hubness: cannot write the output: No space left on device")


def test_a_page_is_not_spoiled_by_looking_whether_it_can_be_written(run, files):
    (files / "page.html").write_text("former")
    done = run("check", "products", *QUERY_SCALE, "--page", "page.html")
    assert_fails(done, 1, "nobody-reads-this.npy")
    assert (files / "page.html").read_text() == "former"
    assert_fails(
        run("check", "products", *QUERY_SCALE, "--page", "new.html"),
        1,
        "nobody-reads-this.npy",
    )
    assert not (files / "new.html").exists()


def test_a_file_without_room_for_a_page_is_told_before_the_work(files):
    (files / "page.html").write_text("former")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        for name in ("page.html", "new.html"):
            with pytest.raises(
                UnreadableFile, match=f"cannot write {name}: (No space|File too large)"
            ):
                check_writable(Path(name))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (files / "page.html").read_text() == "former"
    assert not (files / "new.html").exists()
    check_writable(Path("new.html"))
    assert not (files / "new.html").exists()


def test_the_demand_of_a_bank_is_shown_unless_it_is_even():
    biases = {"name": "NNN", "k": 8, "alpha": 0.75}
    demanded = {"name": "WithDemand", "estimators": [biases], "weight": 0.25}
    assert describe(demanded) == f"{describe(biases)}, less 0.25 log demand"
    assert describe({**demanded, "factor": 0.01}) == f"{describe(biases)}, less 0.25 log demand"
    assert describe({**demanded, "factor": 0.0}) == describe(biases)


def test_shares_add_up():
    for weights in ([1 / 3] * 3, [1 / 7] * 7, [0.005, 0.995], [0.5, 0.5], [1.0], [0.125] * 8):
        shares = rounded_shares(weights)
        assert sum(shares) == 100
        assert all(
            abs(share - 100 * weight) < 1 for share, weight in zip(shares, weights, strict=True)
        )
    parts = [{"name": "CSLS", "k": k} for k in (1, 2)]
    told = describe({"name": "Blend", "weights": [1 / 3, 2 / 3], "estimators": parts})
    assert told == "agreement (0.33 CSLS(k=1) + 0.67 CSLS(k=2))"


def test_a_mix_of_many_has_a_short_name_that_a_fit_does_not_change():
    parts = [{"name": "CSLS", "k": k} for k in (1, 2)]
    parts.append({"name": "InvertedSoftmax", "temperature": 0.5})
    mix = {"name": "Blend", "weights": [0.2, 0.3, 0.5], "estimators": parts, "strength": 1.0}
    name = describe(mix)
    assert re.fullmatch("mix of 3 methods, id [0-9a-f]{4}", name)
    fitted = {**mix, "estimators": [*parts[:2], {**parts[2], "tau": 0.017, "mean_bias": 0.3}]}
    assert describe(fitted) == name
    assert describe({**mix, "strength": "agreement", "agreement": 0.83}).startswith(
        "0.83 (mix of 3"
    )
    assert describe({**mix, "weights": [0.3, 0.2, 0.5]}) != name
    other = {**mix, "estimators": [*parts[:2], {**parts[2], "temperature": 0.25}]}
    assert describe(other) != name
    of_tau = {**mix, "estimators": [*parts[:2], {"name": "InvertedSoftmax", "tau": 0.017}]}
    assert describe(of_tau) != name
    demanded = {"name": "WithDemand", "estimators": [mix], "weight": 0.25}
    assert describe(demanded) == f"{name}, less 0.25 log demand"


def test_a_mix_less_the_demand_shows_the_shares_of_the_mix():
    parts = [{"name": "CSLS", "k": k} for k in (1, 2)]
    mix = {"name": "Blend", "weights": [0.25, 0.75], "estimators": parts}
    for choice in (mix, {"name": "WithDemand", "weight": 0.25, "estimators": [mix]}):
        assert _mixed(choice, is_mix=True) == {"CSLS(k=1)": 25, "CSLS(k=2)": 75}
        assert list(_mixed(choice, is_mix=False).values()) == [100]
    alone = {"name": "WithDemand", "weight": 0.25, "estimators": parts[:1]}
    assert _mixed(alone, is_mix=True) == {"CSLS(k=1)": 100}


@pytest.mark.parametrize(
    ("strength", "text"),
    [
        ({}, "CSLS(k=3)"),
        ({"strength": 0.5}, "0.5 CSLS(k=3)"),
        ({"strength": "agreement"}, "agreement CSLS(k=3)"),
        ({"strength": "agreement", "agreement": 0.8312}, "0.83 CSLS(k=3)"),
    ],
)
def test_an_estimator_is_shown_with_its_factor(strength, text):
    assert describe({"name": "CSLS", "k": 3, **strength}) == text


def test_refresh_says_what_it_would_write_and_what_k_is_of(run, files):
    assert run("migrate", "run", "products", "--bank", "bank.npy", "--no-writers").returncode == 0
    asked = (
        "refresh",
        "products_hubness",
        "--bank",
        "bank.npy",
        "--method",
        "nnn",
        "--param",
        "k=4",
    )
    assert_fails(
        run(*asked, "--plan"), 1, "no alias leads there", "--rename", "enable keeps biases"
    )
    planned = run(*asked, "--plan", "--rename")
    assert planned.returncode == 0, planned.stderr
    assert "products_hubness__before_hubness" in "".join(planned.stdout.split())
    assert "rows to write" in planned.stdout
    assert "rows written" not in planned.stdout
    for value in ("k=0", "k=4", "alpha=0.5"):
        name = value.partition("=")[0]
        said = (f"--param {name} needs --method nnn", "(0.5 RelativeNNN(k=8) + ")
        assert_fails(run("refresh", "products_hubness", "--param", value), 2, *said)


def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "milvus_hubness", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    for name in ("demo", "migrate", "refresh", "status"):
        assert name in done.stdout


def test_enable_plans_then_does_and_disable_takes_it_back(files, run):
    before = collections(files)
    planned = run(
        "enable", "products", "--bank", "bank.npy", "--method", "nnn", "--param", "k=4", "--plan"
    )
    assert planned.returncode == 0
    for said in ("products__bias", "60", "NNN(k=4", "candidates", "missed", "without --plan"):
        assert said in planned.stdout
    assert collections(files) == before
    asked = ["enable", "products", "--bank", "bank.npy", "--json"]
    done = json.loads(run(*asked).stdout)
    assert done["enable"]["rows"] == 60
    assert done["plan"]["missed"]["50"] == pytest.approx(done["enable"]["missed"])
    assert collections(files) == {
        *before,
        "products__bias_a",
        "products__bias_b",
        "products__bank",
        "hubness_ledger",
    }
    told = json.loads(run("status", "products", "--json").stdout)["status"]
    assert (told["corrected"], told["where"], told["pending"]) == (True, "beside", 0)
    assert "in the side collection products__bias_a" in run("status", "products").stdout
    assert "none (bank and parameters" in run("refresh", "products").stdout
    assert_fails(run(*asked[:-1]), 1, "products", "refresh it instead")
    assert run("disable", "products").returncode == 0
    assert collections(files) == {*before, "products__bank", "hubness_ledger"}
    assert_fails(run("disable", "products"), 1, "is not corrected")


def test_enable_refuses_what_it_cannot_do(files, run):
    assert_fails(
        run("enable", "products", "--bank", "bank.npy", "--max-miss-rate", "2"),
        2,
        "max_miss_rate",
        "2",
    )
    assert_fails(run("enable", "nothing", "--bank", "bank.npy"), 1, "nothing")
    assert run("enable", "products").returncode == 2


def test_status_shows_of_which_field_a_verdict_is(run, files):
    """One bank may be judged for each of several fields, and be in use for one."""
    client = connect("shop.db")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field in ("image", "title"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
        index.add_index(field, index_type="FLAT", metric_type="IP")
    client.create_collection("both", schema=schema, index_params=index)
    items = vectors(np.random.default_rng(3), 60, DIM)
    client.insert("both", [{"id": i, "image": row, "title": row} for i, row in enumerate(items)])
    assert run("tune", "both", "--bank", "bank.npy", "--field", "image").returncode == 0
    assert "verdicts" not in run("status", "both", "--field", "title").stdout
    assert "verdicts" in run("status", "both", "--field", "image").stdout

    enabled = run("enable", "both", "--bank", "bank.npy", "--field", "title", "--force")
    assert enabled.returncode == 0, enabled.stderr
    # A narrow terminal folds a row: the words of each verdict, from the second on.
    verdicts = " ".join(run("status", "both").stdout.split()).split("UTC on sha256:")[1:]
    heads = [verdict.split(":")[0].split(", ")[1:] for verdict in verdicts]
    [image] = [head for head in heads if "field image" in head]
    [title] = [head for head in heads if "field title" in head]
    assert "the bank in use" in title
    assert "the bank in use" not in image
    of_image = json.loads(run("status", "both", "--field", "image", "--json").stdout)["status"]
    assert [verdict["field"] for verdict in of_image["verdicts"]] == ["image"]


def test_status_and_plans_show_the_verdict_on_their_bank(run, files):
    assert run("tune", "products", "--bank", "bank.npy").returncode == 0
    told = run("status", "products")
    assert " UTC on sha256:" in told.stdout
    for command in (["migrate", "run", "--plan", "products"], ["enable", "products", "--plan"]):
        of_this = run(*command, "--bank", "bank.npy", "--force")
        assert " verdict " in of_this.stdout, of_this.stderr
        np.save("other.npy", np.load("bank.npy")[:30])
        of_none = run(*command, "--bank", "other.npy")
        assert "there is no verdict on this bank, but on 1 other bank" in of_none.stdout.replace(
            "\n", " "
        )
