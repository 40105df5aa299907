"""The Node SDK through the proxy: it inserts and searches, and gets what Python gets."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from milvus_hubness import NNN
from tests.support.born import born
from tests.support.galleries import vectors

SDK, VERSION = "@zilliz/milvus2-sdk-node", "3.0.6"
SCRIPT = Path(__file__).with_name("foreign.js")
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "proxy.md"


@pytest.fixture(scope="session")
def node_modules():
    """Where the SDK is installed, once for all runs."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = Path(tempfile.gettempdir()) / f"milvus-hubness-node-sdk-{VERSION}"
    if not (folder / "node_modules" / SDK).exists():
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder]
        done = subprocess.run(
            ["npm", "install", *quiet, f"{SDK}@{VERSION}"], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"npm cannot install {SDK}: {done.stderr.decode()[-200:]}")
    return folder / "node_modules"


def corrected_collection(lite, rng):
    items, bank = vectors(rng, 60, 12), vectors(rng, 30, 12)
    return born(lite, items, bank, "COSINE", estimator=NNN(4))


def run_node(arguments, node_modules, text):
    done = subprocess.run(
        ["node", *arguments],
        input=text.encode(),
        env={**os.environ, "NODE_PATH": str(node_modules)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_the_block_of_the_page_searches(lite, node_modules):
    rng = np.random.default_rng(6)
    corrected, [query] = corrected_collection(lite, rng), vectors(rng, 1, 12).tolist()
    python = lite.hubness_client()
    address = python.behind and lite.proxies.uri(lite.uri).removeprefix("http://")
    [block] = re.findall(r"^ *```javascript\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "localhost:19540" in block
    assert '"live"' in block
    block = block.replace("localhost:19540", address).replace('"live"', json.dumps(corrected))
    script = f"""(async () => {{
        const query = {json.dumps(query)};
        {block}
        process.stdout.write(JSON.stringify(hits.results));
        await client.closeConnection();
    }})()"""
    got = run_node(["-e", script], node_modules, "")
    [hits] = python.behind.search(corrected, data=[query], limit=10)
    assert [int(hit["id"]) for hit in got] == hits.ids


def test_node_gets_what_python_gets(lite, node_modules):
    rng = np.random.default_rng(5)
    corrected, fresh = corrected_collection(lite, rng), vectors(rng, 3, 12)
    rows = [{"id": 1_000 + i, "vector": row.tolist(), "group": i} for i, row in enumerate(fresh)]
    query = fresh[0].tolist()
    python = lite.hubness_client()
    address = python.behind and lite.proxies.uri(lite.uri).removeprefix("http://")
    told = {"address": address, "collection": corrected, "rows": rows, "query": query}
    got = run_node([SCRIPT], node_modules, json.dumps(told))
    assert got["fields"] == ["id", "vector", "group"]
    assert got["dim"] == 12
    assert got["inserted"] == 3
    asked = {"data": [query], "limit": 8, "output_fields": ["*"]}
    for found, strength in ((got["found"], None), (got["raw"], 0)):
        [hits] = python.behind.search(corrected, strength=strength, **asked)
        assert [int(hit["id"]) for hit in found] == hits.ids
        np.testing.assert_allclose([hit["score"] for hit in found], hits.distances, atol=1e-5)
        np.testing.assert_allclose(
            [hit["vector"] for hit in found], [hit["entity"]["vector"] for hit in hits], rtol=1e-6
        )
        assert not any(field.startswith("hubness") for hit in found for field in hit)
    [row] = got["read"]
    np.testing.assert_allclose(row["vector"], rows[0]["vector"], rtol=1e-6)
    assert "ZeroVectors" in got["refused"]["reason"]
