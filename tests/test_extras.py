"""Calls and commands that need an extra name it."""

import json
import re
import signal
import sys
from collections import defaultdict
from importlib.metadata import distributions
from pathlib import Path

import pytest
import typer

from milvus_hubness import connect
from milvus_hubness.basics import requirements
from milvus_hubness.basics.requirements import (
    EXTRAS,
    install_line,
    install_line_of,
    naming_extras,
)
from milvus_hubness.cli import COMMANDS, main
from milvus_hubness.cli.console import run
from milvus_hubness.cli.extras import OF_COMMANDS, with_all_extras
from milvus_hubness.errors import MissingExtra
from tests.support.projects import project


def test_a_missing_module_of_an_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra) as raised, naming_extras():
        import torch.nn  # noqa: F401
    assert str(raised.value) == f"torch is not installed: {install_line('jobs')}"


def installed_from(monkeypatch, origin):
    """As if the package had been installed from there; None is a package index."""

    class Installed:
        @staticmethod
        def read_text(name):
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(requirements, "distribution", lambda name: Installed)


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, 'pip install "milvus-hubness[check]"'),
        (
            {"url": "file:///home/me/my%20clone", "dir_info": {}},
            'pip install "/home/me/my clone[check]"',
        ),
        (
            {"url": "file:///home/me/clone", "dir_info": {"editable": True}},
            'pip install -e "/home/me/clone[check]"',
        ),
        (
            {"url": "file:///tmp/m-0.1-py3-none-any.whl", "archive_info": {}},
            'pip install "milvus-hubness[check] @ file:///tmp/m-0.1-py3-none-any.whl"',
        ),
        (
            {"url": "https://git.example/m.git", "vcs_info": {"vcs": "git"}},
            'pip install "milvus-hubness[check] @ git+https://git.example/m.git"',
        ),
    ],
    ids=["index", "clone", "editable", "wheel", "repository"],
)
def test_a_missing_extra_comes_from_where_the_package_came_from(monkeypatch, origin, line):
    installed_from(monkeypatch, origin)
    assert install_line("check") == line


def test_the_packages_of_databases_come_from_the_clone_too(monkeypatch):
    root = Path(__file__).parents[1]
    installed_from(monkeypatch, {"url": root.as_uri(), "dir_info": {}})
    line = install_line_of("qdrant-hubness", "integrations/qdrant")
    assert line == f'pip install "{root}/integrations/qdrant"'
    assert install_line_of("qdrant-hubness", "no") == "pip install qdrant-hubness"
    installed_from(monkeypatch, None)
    line = install_line_of("qdrant-hubness", "integrations/qdrant")
    assert line == "pip install qdrant-hubness"


def test_other_missing_modules_stay_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), naming_extras():
        import no_such_module  # noqa: F401


def test_a_file_without_milvus_lite(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "milvus_lite", None)
    with pytest.raises(
        MissingExtra, match=r"^milvus_lite is not installed: pip install .*\[lite\]"
    ):
        connect(str(tmp_path / "shop.db"))


def test_a_command_names_the_extra_in_one_line(monkeypatch, capsys):
    app = typer.Typer()

    @app.command()
    def fit() -> None:
        import cronsim  # noqa: F401

    monkeypatch.setitem(sys.modules, "cronsim", None)
    monkeypatch.setattr(sys, "argv", ["milvus-hubness"])
    with pytest.raises(SystemExit) as raised:
        run(app)
    assert raised.value.code == 1
    assert (
        capsys.readouterr().err
        == f"milvus-hubness: cronsim is not installed: {install_line('serve')}\n"
    )


CHECK = "faiss, jinja2, pyarrow, tenacity"
JOBS = "faiss, jinja2, pyarrow, safetensors, scipy, sklearn, tenacity, torch"
SERVE = (
    "cronsim, faiss, jinja2, prometheus_client, pyarrow, safetensors, scipy, sklearn, starlette, tenacity, "
    "torch, uvicorn"
)


@pytest.mark.parametrize(
    ("line", "uri", "modules", "extras"),
    [
        ("serve --config hubness.toml", "http://localhost:19530", SERVE, "serve"),
        ("serve --config hubness.toml", "shop.db", SERVE, "lite,serve"),
        ("tune products --bank b.npy", "http://localhost:19530", CHECK, "check"),
        ("check --items i.npy --queries b.npy", "http://localhost:19530", CHECK, "check"),
        ("check products --bank b.npy", "shop.db", CHECK, "check,lite"),
        ("migrate run --plan products --bank b.npy --uri shop.db", "", JOBS, "jobs,lite"),
        ("demo", "http://localhost:19530", JOBS, "jobs,lite"),
        ("quari train --pairs p.npz --out x", "http://localhost:19530", JOBS, "jobs"),
    ],
)
def test_a_base_install_is_told_of_all_extras_of_a_command_at_once(
    monkeypatch, line, uri, modules, extras
):
    """serve sent its users to [jobs] first, and then to [serve]; a .db file to [lite] last."""
    for module in EXTRAS:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra) as first, naming_extras():
        import tenacity  # noqa: F401
    arguments = line.split()
    told = with_all_extras(first.value, arguments, arguments[-1] if "--uri" in arguments else uri)
    names = sorted([*modules.split(", "), *(["milvus_lite"] if "lite" in extras else [])])
    if sys.version_info < (3, 11) and "serve" in extras:
        names = sorted([*names, "tomli"])
    assert str(told) == f"{', '.join(names)} are not installed: {install_line(extras)}"


def test_the_command_itself_names_all_of_them(monkeypatch, capsys):
    for module in ("prometheus_client", "cronsim", "milvus_lite"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("milvus_hubness.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["milvus-hubness", "serve", "--config", "hubness.toml"])
    monkeypatch.setenv("MILVUS_HUBNESS_URI", "shop.db")
    on_terminate = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main()
    signal.signal(signal.SIGTERM, on_terminate)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "milvus-hubness: cronsim, milvus_lite, prometheus_client are not installed: "
        f"{install_line('lite,serve')}\n"
    )


def test_each_command_has_its_extras():
    """A command without an entry runs on a base install."""
    assert {*COMMANDS} - {*OF_COMMANDS} == {"adopt", "grants", "proxy", "status"}


@pytest.fixture(scope="module")
def distributions_of():
    """Return the names of the distributions that have files of each module.

    From the lists of their files: before Python 3.11, packages_distributions() reads no other than
    top_level.txt, which many wheels lack.
    """
    names = defaultdict(set)
    for distribution in distributions():
        name = distribution.metadata["Name"]
        modules = {path.parts[0].removesuffix(".py") for path in distribution.files or ()}
        for module in modules:
            names[module].add(name)
    return names


@pytest.mark.parametrize("module", sorted(set(EXTRAS) - {"tomli"}))
def test_the_extra_that_is_named_installs_the_module(module, distributions_of):
    lines = project(".")["optional-dependencies"][EXTRAS[module]]
    [distribution] = distributions_of[module]
    asked = {re.match(r"[\w-]+(\[[\w-]+\])?", line)[0].lower() for line in lines}
    assert {distribution.lower().replace("_", "-"), f"pymilvus[{distribution}]"} & asked
