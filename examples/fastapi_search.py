"""A search service in FastAPI. HubnessClient needs no torch: the base install is enough.

pip install ".[lite]" "fastapi[standard]"  # in a clone: nothing is on PyPI yet
python fastapi_search.py         # starts the service, asks one question, and ends
fastapi dev fastapi_search.py    # serves http://127.0.0.1:8000/search?text=wrap+long+lines
"""

import os
import re
import tempfile
import zlib
from contextlib import asynccontextmanager
from importlib import import_module
from inspect import getmembers, getsource, isfunction

import numpy as np
from fastapi import FastAPI, Query, Request
from fastapi.testclient import TestClient

from milvus_hubness import CorrectionConfig, HubnessClient

MODULES = (
    "calendar",
    "fractions",
    "heapq",
    "inspect",
    "random",
    "shutil",
    "statistics",
    "textwrap",
)


def embed(text):
    """Return hashed word counts (256,): replace it by your text model."""
    places = [zlib.crc32(word.encode()) % 256 for word in re.findall("[a-z]+", text.lower())]
    return np.bincount(places, minlength=256).astype(np.float32)


@asynccontextmanager
async def lifespan(app):
    """Open the client, and fill a corrected collection with functions of Python's standard library."""
    functions = dict(
        pair for module in MODULES for pair in getmembers(import_module(module), isfunction)
    )
    rows = [
        {"id": i, "name": name, "vector": embed(getsource(functions[name]))}
        for i, name in enumerate(functions)
    ]
    bank = CorrectionConfig(
        [embed(function.__doc__) for function in functions.values() if function.__doc__]
    )
    with tempfile.TemporaryDirectory() as folder:
        client = HubnessClient(os.environ.get("MILVUS_URI", f"{folder}/search.db"))
        if not client.has_collection("functions"):
            client.create_collection(
                "functions", 256, metric_type="COSINE", hubness=bank, consistency_level="Strong"
            )
            client.insert("functions", rows)
        yield {"client": client}


app = FastAPI(lifespan=lifespan)


@app.get("/search")
def search(
    request: Request, text: str = Query(pattern="[A-Za-z]"), limit: int = 5, strength: float = 1
):
    """Return the best functions: strength 1 takes the corrected ranking, 0 the raw one."""
    options = {"limit": limit, "output_fields": ["name"], "strength": strength}
    [hits] = request.state.client.search("functions", [embed(text)], **options)
    return [{"name": hit["name"], "score": hit["distance"]} for hit in hits]


if __name__ == "__main__":
    with TestClient(app) as service:
        for hit in service.get("/search?text=wrap long lines of text to a given width").json():
            print(f"{hit['score']:6.3f}  {hit['name']}")
