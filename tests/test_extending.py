"""The way in for extensions: what it names, and that integrations/ use nothing else of milvus_hubness."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import milvus_hubness
from milvus_hubness import extending
from milvus_hubness.jobs.store import protocols
from tests.docs import pages

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "integrations").rglob("*.py"))
MODULES = {"milvus_hubness": milvus_hubness, "milvus_hubness.extending": extending}
"""The modules from which an extension may import."""


def internals_in(source):
    """What a source uses of milvus_hubness beside the public names and those for extensions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            names = {alias.name for alias in node.names}
            module = MODULES.get(node.module)
            allowed = {"extending", "__version__", *dir(module)} if module else set()
            yield from (f"{node.module}.{name}" for name in names - allowed)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if _is_ours(alias.name) and alias.name not in MODULES
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in MODULES:
            module = MODULES[ast.unparse(node.value)]
            if node.attr not in {"extending", "__version__", *dir(module)}:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"milvus_hubness(\.\w+)+", str(node.value)
        ):
            # As import_module and monkeypatch.setattr take it.
            yield node.value


def _is_ours(module):
    return (module or "").partition(".")[0] == "milvus_hubness"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_integrations_use_public_names_and_those_for_extensions(path):
    assert sorted(internals_in(path.read_text())) == []


def test_the_files_of_all_integrations_are_examined():
    packages = {path.relative_to(ROOT).parts[1] for path in FILES}
    assert packages == {"haystack", "langchain", "llamaindex", "qdrant"}


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from milvus_hubness.jobs.store.protocols import Store", ["Store"]),
        ("def late():\n    from milvus_hubness.basics import logs", ["logs"]),
        ("import milvus_hubness.jobs.common.lease as leases", ["lease"]),
        ("from milvus_hubness import jobs", ["jobs"]),
        ("from milvus_hubness.extending import nothing", ["nothing"]),
        ("import milvus_hubness\nmilvus_hubness.errors.redacted('')", ["errors"]),
        ("import_module('milvus_hubness.correction.state')", ["state"]),
    ],
)
def test_each_way_to_an_internal_name_is_noticed(source, used):
    assert [name.rpartition(".")[2] for name in internals_in(source)] == used


def test_names_that_are_allowed_are_not_noticed():
    source = """
from milvus_hubness import HubnessClient, LeaseHeld, extending
from milvus_hubness.extending import Store
import milvus_hubness
milvus_hubness.QueryBank
"""
    assert list(internals_in(source)) == []


LISTED = Path(extending.__file__).with_suffix(".pyi").read_text().partition("__all__ = [")[2]
"""The list of the names in the stub, with their reasons."""


def test_every_name_of_the_stub_is_there():
    assert dir(extending) == sorted(re.findall(r'^    "(\w+)",$', LISTED, re.MULTILINE))
    for name in dir(extending):
        assert getattr(extending, name) is not None, name
    with pytest.raises(
        AttributeError, match=r"'milvus_hubness\.extending' has no attribute 'Lesae'"
    ):
        extending.Lesae  # noqa: B018


def test_each_name_has_a_reason_of_its_own():
    reasons = re.findall(r'^    # (.+\.)\n    "(\w+)",$', LISTED, re.MULTILINE)
    assert sorted(name for _, name in reasons) == dir(extending)
    assert len({reason for reason, _ in reasons}) == len(reasons)


def test_there_are_no_more_names_than_needed():
    """A method of a class is better than a function more, and a public name needs no second home."""
    assert len(dir(extending)) <= 70
    assert set(dir(extending)).isdisjoint(dir(milvus_hubness))


WITHOUT_A_USER = {
    "Store", "Renaming", "BiasKeys", "SideCollections", "ClientFeatures",
    "Made", "Compute", "FitInputs", "Vectors", "Reranker", "Event", "Events", "Progress",
}  # fmt: skip
"""The names that an extension needs, and that no integration uses: those of estimators, re-rankers and listeners,
and the types that a type checker asks for."""


def test_each_other_name_is_used_by_an_integration():
    used = {
        alias.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "milvus_hubness.extending"
        for alias in node.names
    }
    assert set(dir(extending)) - used == WITHOUT_A_USER


def test_the_protocol_of_a_store_can_be_typed_by_names_for_extensions_alone():
    """Each class of the package in the signatures of Store, its bases and its capabilities is named."""
    modules = (extending, milvus_hubness)
    offered = {id(getattr(module, name)) for module in modules for name in dir(module)}
    kinds = [*extending.Store.__mro__, extending.Renaming]
    kinds += [extending.SideCollections, extending.BiasKeys]
    missing = set()
    for kind in kinds:
        for _, method in inspect.getmembers(kind, inspect.isfunction):
            if not method.__module__.startswith("milvus_hubness"):
                continue
            for hint in typing.get_type_hints(method, vars(protocols)).values():
                for part in _classes_in(hint):
                    if part.__module__.startswith("milvus_hubness") and id(part) not in offered:
                        missing.add(part.__name__)
    assert missing == set()


def _classes_in(hint):
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for part in typing.get_args(hint):
        if not isinstance(part, str | list):
            yield from _classes_in(part)


def test_an_import_loads_only_what_it_names():
    code = """
import json, sys
from milvus_hubness.extending import Progress, log
import milvus_hubness.extending
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"numpy", "pymilvus", "pydantic", "torch"}.isdisjoint(json.loads(done.stdout))


def test_a_package_for_another_database_loads_no_pymilvus():
    """By any name but those that the page lists."""
    names = sorted(set(dir(extending)) - {"DemoPair", "RowForm", "demo_pairs"})
    code = f"""
import sys
from milvus_hubness.extending import {", ".join(names)}
assert "pymilvus" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_explains_every_name():
    tables = pages.hooks().extending_reference()
    first_cells = re.findall(r"^\| `(\w+)` \| \S", tables, re.MULTILINE)
    assert sorted(first_cells) == dir(extending)


def test_the_package_of_the_page_installs_and_its_estimator_is_found(tmp_path):
    """As it stands there: pip makes the entry point, by which commands know the class."""
    page = (pages.DOCS / "concepts" / "extending.md").read_text()
    files = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', page, re.DOTALL))
    assert files.keys() == {"meanshift.py", "pyproject.toml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--target", packages]
    subprocess.run([*pip, *offline, tmp_path], check=True, capture_output=True, text=True)

    code = (
        "from milvus_hubness.cli.options import EstimatorOptions\n"
        "estimator = EstimatorOptions(method='meanshift', param=['share=1']).estimator()\n"
        "print(*estimator.fit([[1.0, 3.0], [3.0, 1.0]]).bias([[1.0, 2.0]]))\n"
    )
    path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "6.0\n", done.stderr
