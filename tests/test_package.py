"""What is shipped: the public names, the arrows between the rooms, and a wheel that runs by itself."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import milvus_hubness

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "milvus_hubness"

STOREYS = (
    "errors",
    "basics",
    "correction",
    "quality",
    "jobs",
    "milvus",
    "reports",
    "extras",
    "serve",
    "demo",
    "cli",
)
"""From the ground up. A file imports files of its own storey and of those below it."""
WITHOUT_PYMILVUS = {
    "errors",
    "basics",
    "correction",
    "quality",
    "jobs",
    "reports",
    "extras",
    "serve",
}


def storey_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def files():
    return sorted(
        path for path in PACKAGE.rglob("*.py") if storey_of(path) not in {"__init__", "__main__"}
    )


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path) for path in PACKAGE.rglob("*.py")}


def imports(path):
    """The modules that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_down_only(path):
    storey = storey_of(path)
    for module in imports(path):
        if module.startswith("milvus_hubness."):
            other = module.split(".")[1]
            assert STOREYS.index(other) <= STOREYS.index(storey), f"{storey} imports {module}"
        if storey in WITHOUT_PYMILVUS:
            assert not module.startswith("pymilvus"), f"{storey} imports {module}"


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
            # What `status` reports has a field of that name, which the command line shows.
            is_shown = name.startswith("cli/")
            assert not attributes & (
                {"reranking"} if is_shown else {"reranking", "second_vector"}
            ), path


def test_each_name_of_the_stub_can_be_imported():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    named = {
        alias.asname
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert "DistributionNormalization" in named
    assert named <= set(dir(milvus_hubness))


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
