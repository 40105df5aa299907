"""Tests set no constant and no private name of the product: they pass a policy, a clock or an option."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = [ROOT / "milvus_hubness", *ROOT.glob("integrations/*/*_hubness")]
TESTS = sorted(
    path for folder in ("tests", "integrations/*/tests") for path in ROOT.glob(f"{folder}/**/*.py")
)
SETTERS = {"setattr", "delattr", "setitem", "delitem", "patch", "object", "dict"}


def imported(tree):
    """Return the full name of what each imported name stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0]: alias.asname and alias.name
                for alias in node.names
            }
    return {name: full or name for name, full in names.items()}


def is_fixed(name):
    """Return whether this is a constant of the product, or a private name of one of its modules."""
    package, _, rest = name.partition(".")
    owner, _, last = rest.rpartition(".")
    root = next((folder for folder in PRODUCT if folder.name == package), None)
    if root is None or last.endswith("__"):
        return False
    place = root.joinpath(*owner.split("."))
    is_module = place.is_dir() or place.with_suffix(".py").is_file()
    return bool(re.fullmatch("[A-Z][A-Z0-9_]*", last)) or (last.startswith("_") and is_module)


def constants_set(source):
    """Return the names of the product's constants that a source sets, by assignment or by a patch."""
    tree = ast.parse(source)
    names, found = imported(tree), []

    def full(node):
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            found.append(full(node.value if isinstance(node, ast.Subscript) else node))
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in SETTERS
        ):
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            [target] = node.args[:1] or [None]
            either = [target.body, target.orelse] if isinstance(target, ast.IfExp) else [target]
            targets = [full(each) for each in either]
            found += targets + [
                f"{owner}.{text}" if owner else str(text)
                for owner in ["", *targets]
                for text in texts
            ]
    return sorted({name for name in found if is_fixed(name)})


def test_no_constant_of_the_product_is_set():
    assert len(TESTS) > 200
    found = {str(path.relative_to(ROOT)): constants_set(path.read_text()) for path in TESTS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            'monkeypatch.setattr(screened, "MOST_SELECTED", 1)',
            "correction.kernels.screened.MOST_SELECTED",
        ),
        ('monkeypatch.setattr("milvus_hubness.errors._remembered", set())', "errors._remembered"),
        ('patch.setattr(milvus_hubness.errors, "_remembered", set())', "errors._remembered"),
        (
            'with mock.patch("milvus_hubness.correction.kernels.screened.GROUP", 1): ...',
            "correction.kernels.screened.GROUP",
        ),
        ('with mock.patch.object(screened, "GROUP", 1): ...', "correction.kernels.screened.GROUP"),
        ('setattr(screened, "GROUP", 1)', "correction.kernels.screened.GROUP"),
        (
            'monkeypatch.setitem(TILE_SIZES, "cpu", None)',
            "correction.kernels.policy.TILE_SIZES",
        ),
        (
            'monkeypatch.setitem(TILE_SIZES if TILE_SIZES else {}, "cpu", None)',
            "correction.kernels.policy.TILE_SIZES",
        ),
        ('TILE_SIZES["cpu"] = 1', "correction.kernels.policy.TILE_SIZES"),
        ("screened.GROUP = 1", "correction.kernels.screened.GROUP"),
        ("for screened.GROUP in (1, 2): ...", "correction.kernels.screened.GROUP"),
        ("screened.GROUP += 1", "correction.kernels.screened.GROUP"),
    ],
)
def test_a_constant_that_is_set_is_found(line, name):
    imports = (
        "import milvus_hubness.errors\nfrom milvus_hubness.correction.kernels import screened\n"
    )
    imports += "from milvus_hubness.correction.kernels.policy import TILE_SIZES\n"
    source = f"{imports}def test(monkeypatch):\n    {line}\n"
    assert constants_set(source) == [f"milvus_hubness.{name}"]


def test_what_is_watched_or_foreign_may_be_replaced():
    source = """
import sys, torch
from milvus_hubness import MilvusStore
from milvus_hubness.correction.kernels import dense
monkeypatch.setattr(MilvusStore, "load_bank", watched)
monkeypatch.setattr(dense, "topk", watched)
monkeypatch.setitem(sys.modules, "PIL", None)
monkeypatch.setattr(torch, "MAX", 1)
found.ROWS = dense.ROWS
"""
    assert constants_set(source) == []
