"""What is shipped: the public names, the arrows between the storeys, and a wheel that runs by itself."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

import milvus_hubness
from tests.support.storeys import (
    MODULES,
    PACKAGE,
    ROOT,
    STOREYS,
    dotted,
    files,
    imports,
    storey_of,
)

WITHOUT_PYMILVUS = {
    "errors",
    "basics",
    "correction",
    "quality",
    "jobs",
    "clients",
    "reports",
    "extras",
    "serve",
}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_down_only(path):
    storey = storey_of(path)
    for module in imports(path):
        if module.startswith("milvus_hubness."):
            other = module.split(".")[1]
            assert STOREYS.index(other) <= STOREYS.index(storey), f"{storey} imports {module}"
        if storey in WITHOUT_PYMILVUS:
            assert not module.startswith("pymilvus"), f"{storey} imports {module}"


def test_no_files_import_each_other():
    """Neither two files nor more of them, in a circle."""
    circles = {
        dotted(path): MODULES.intersection(imports(path)) - {dotted(path)} for path in files()
    }
    while True:
        used = set().union(*circles.values())
        inner = {
            module: found & circles.keys() for module, found in circles.items() if module in used
        }
        inner = {module: found for module, found in inner.items() if found}
        if inner == circles:
            break
        circles = inner
    assert not circles


TEST_FILES = sorted(
    path
    for folder in (ROOT / "tests", *ROOT.glob("integrations/*/tests"), ROOT / "benchmarks")
    for path in folder.rglob("*.py")
)


def imported_test_modules(source):
    """Yield the test modules, and what is in them, that a file imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As import_module takes it.
            names = re.findall(r"^tests\.[\w.]+$", node.value)
        else:
            names = []
        yield from (name for name in names if re.search(r"(^|\.)test_", name))


def test_no_file_imports_a_test_module():
    """What several test modules need is in tests/support, or beside them: see tests/README.md."""
    assert len(TEST_FILES) > 200
    imported = {path: list(imported_test_modules(path.read_text("utf-8"))) for path in TEST_FILES}
    assert {path: names for path, names in imported.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from tests.cli.test_bank import bank",
        "from tests.cli import test_bank",
        "from .test_bank import bank",
        "import tests.cli.test_bank as bank",
        "def rows():\n    from test_bank import bank",
        "import_module('tests.cli.test_bank')",
    ],
)
def test_an_import_of_a_test_module_is_found(source):
    assert len(list(imported_test_modules(source))) == 1


def test_rewriting_does_no_io():
    stores = ("milvus_hubness.jobs.store", "milvus_hubness.milvus.store")
    for module in imports(PACKAGE / "milvus" / "client" / "rewrite.py"):
        assert not module.startswith(("pymilvus", "grpc", "asyncio", *stores, "time", "os"))


def test_only_the_codec_and_enable_tell_the_bias_locations_apart():
    allowed = ("correction/codec/", "correction/state.py", "jobs/enable/")
    for path in files():
        name = path.relative_to(PACKAGE).as_posix()
        attributes = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        if not name.startswith(allowed):
            assert "reranking" not in attributes, path


def test_each_name_of_the_stub_can_be_imported():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    named = {
        alias.asname
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert {"DistributionNormalization", "NNN", "compare"} <= named
    assert named <= set(dir(milvus_hubness)) == set(milvus_hubness.__all__)


def test_public_names_are_all_there_and_documented():
    names = set(dir(milvus_hubness)) - {"__version__"}
    assert {"HubnessClient", "Correction", "LeaseHeld", "migrate", "refresh"} < names
    for name in names:
        assert getattr(milvus_hubness, name).__doc__, f"{name} has no docstring"


def commands(group, name="milvus-hubness"):
    """Each command and group of commands under `group`, by the words that call it."""
    for word, command in group.commands.items():
        yield f"{name} {word}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")


def test_every_command_and_option_is_explained():
    from typer.main import get_command

    from milvus_hubness.cli import app

    found = dict(commands(get_command(app)))
    assert "milvus-hubness quari import-weights" in found
    for name, command in found.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_every_error_of_the_package_has_one_base():
    from milvus_hubness import errors

    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 20
    for kind in kinds:
        assert issubclass(kind, errors.HubnessError)


@pytest.mark.slow
@pytest.mark.long
def test_a_wheel_in_an_empty_environment_runs_the_demo(tmp_path):
    dist, venv = tmp_path / "dist", tmp_path / "venv"
    quiet = ["-q", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *quiet, "--no-deps", "-w", dist, ROOT],
        check=True,
        cwd=tmp_path,
    )
    [wheel] = dist.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"milvus_hubness"}
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "install", *quiet, "--no-compile"]
    subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", f"{wheel}[jobs,lite]"], check=True, cwd=tmp_path
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [venv / "bin" / "milvus-hubness", "demo", "--json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["corrected"]["r1"] >= told["raw"]["r1"] + 5
