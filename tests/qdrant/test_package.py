"""The arrows between the rooms of qdrant_hubness, and its public names."""

import ast
from pathlib import Path

import pytest

import qdrant_hubness

PACKAGE = Path(qdrant_hubness.__file__).parent
MAY_IMPORT = {"store": set(), "client": {"store"}}
WITHOUT_IO = ("known.py", "rewrite.py", "points.py")


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_down_only(path):
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for module in imports(path):
        assert not module.startswith("pymilvus"), f"{room} imports {module}"
        if module.startswith("qdrant_hubness."):
            other = module.split(".")[1]
            assert other == room or other in MAY_IMPORT[room], f"{room} imports {module}"
    if room == "client" and path.name in WITHOUT_IO:
        allowed = ("qdrant_client.models", "qdrant_client")
        reached = {
            each
            for each in imports(path)
            if each.split(".")[0] in ("qdrant_client", "asyncio", "grpc")
        }
        assert reached <= set(allowed), f"{path.name} imports {reached}"


def test_public_names_are_documented():
    for name in qdrant_hubness.__all__:
        assert getattr(qdrant_hubness, name).__doc__, f"{name} has no docstring"
