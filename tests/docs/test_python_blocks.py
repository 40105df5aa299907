"""The Python blocks of the pages run, page by page; names in those that are not run exist."""

import re

import numpy as np
import pytest
from pymilvus import DataType

import milvus_hubness
from milvus_hubness import (
    NNN,
    CorrectionConfig,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    check,
    connect,
    errors,
)
from tests.docs import pages
from tests.support.names import problems

BLOCKS = [
    block for page in pages.PAGES for block in pages.blocks(page) if block.language == "python"
]
RUN = [
    page
    for page in pages.PAGES
    if any(block.page == page and block.check == "run" and not block.title for block in BLOCKS)
]
DIM, ITEMS = 32, 60
MAKES_LIVE = ("README.md",)
"""The pages whose blocks make the alias `live` themselves."""


def vectors(seed, count):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return str(tmp_path_factory.mktemp("docs") / "docs.db")


@pytest.fixture
def reader(tmp_path, monkeypatch, database, request):
    """What readers of the pages have: files of past queries, a collection `products`, and a corrected one, `live`."""
    monkeypatch.chdir(tmp_path)
    np.save("past_queries.npy", vectors(0, 200))
    np.save("newer_queries.npy", vectors(1, 200))
    np.save("query.npy", vectors(2, 1)[0])
    client = HubnessClient(database)
    rows = [
        {"id": i, "vector": row, "name": f"item {i}"} for i, row in enumerate(vectors(3, ITEMS))
    ]
    client.create_collection("products", DIM, metric_type="COSINE")
    client.insert("products", rows)
    if pages.name_of(request.param) not in MAKES_LIVE:
        config = CorrectionConfig(Recipe(QueryBank(vectors(0, 200)), estimator=NNN(k=8)))
        client.create_collection("gallery", DIM, metric_type="COSINE", hubness=config)
        client.insert("gallery", rows)
        client.create_alias("gallery", "live")
    yield request.param
    for name in client.list_collections(include_internal=True):
        for alias in client.list_aliases(name)["aliases"]:
            client.drop_alias(alias)
    for name in client.list_collections(include_internal=True):
        if client.has_collection(name):
            client.drop_collection(name)
    client.close()


@pytest.mark.parametrize("reader", RUN, ids=pages.name_of, indirect=True)
def test_the_blocks_of_a_page_run_in_order(reader, database):
    namespace = {"__name__": "page"}
    ran = 0
    for block in pages.blocks(reader):
        if block.language == "python" and block.check == "run" and not block.title:
            text = "\n" * block.line + block.text.replace(pages.SERVER, database)
            exec(compile(text, pages.name_of(reader), "exec"), namespace)
            ran += 1
    assert ran


def test_check_sees_what_the_faq_says_of_a_collection_as_it_is(database):
    """Of one that no process has loaded, whose vector field has a name of its own."""
    client = HubnessClient(database)
    schema = client.create_schema()
    schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=20)
    schema.add_field("image", DataType.FLOAT_VECTOR, dim=DIM)
    for metric, name in (("IP", "photos"), ("COSINE", "drawings")):
        index = client.prepare_index_params("image", index_type="FLAT", metric_type=metric)
        client.create_collection(name, schema=schema, index_params=index)
        rows = [{"key": f"k{i}", "image": row} for i, row in enumerate(vectors(4, 80))]
        rows[3]["image"] = rows[5]["image"] = np.zeros(DIM, np.float32)
        client.insert(name, rows)
        client.release_collection(name)
        found = check(MilvusStore(connect(database)), name, vectors(5, 60))
        assert [fault.text for fault in found.faults] == ["2 of 80 rows have a zero vector"]


CHECKED = {
    "python": "this file",
    "sh": "test_shell_blocks.py",
    "toml": "test_reference.py",
    "javascript": "../proxy/test_node.py",
    "dockerfile": "../docker/test_docker.py",
    "text": "output of commands, which are in sh",
}
"""Where the blocks of a language are run or checked."""


def test_every_block_is_of_a_language_that_a_test_checks():
    assert {
        block.language for page in pages.PAGES for block in pages.blocks(page)
    } <= CHECKED.keys()


SHOWN_ELSEWHERE = {
    "Correction",
    "Estimator",
    "FittedBias",
    "Layout",
    "MultiVectorLayout",
    "MilvusStore",
    "RefreshResult",
}
"""Names for those who build on the package."""


def test_every_public_name_is_shown_in_a_block():
    public = {
        name for name in dir(milvus_hubness) if not hasattr(errors, name) and name != "__version__"
    }
    shown = set(re.findall(r"\w+", "".join(block.text for block in BLOCKS)))
    table = {
        code.partition("(")[0]
        for code in pages.INLINE.findall((pages.DOCS / "how-to/choose-a-method.md").read_text())
    }
    assert public - SHOWN_ELSEWHERE - shown - table == set()


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.check == "names" or block.title],
    ids=lambda block: block.place,
)
def test_names_in_blocks_that_are_not_run_exist(block):
    assert problems(block.text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from milvus_hubness import Nothing", "milvus_hubness has no Nothing"),
        ("from milvus_hubness import NNN\nNNN(kk=3)", "NNN has no kk"),
        (
            "from milvus_hubness import QueryBank\nbank = QueryBank.load('a')\nbank.nothing()",
            "bank.nothing does not exist",
        ),
    ],
)
def test_names_that_do_not_exist_are_noticed(text, problem):
    assert problems(text) == [problem]
