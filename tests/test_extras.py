"""Calls and commands that need an extra name it."""

import re
import sys
from importlib.metadata import packages_distributions

import pytest
import typer

from milvus_hubness import connect
from milvus_hubness.cli.console import run
from milvus_hubness.errors import EXTRAS, MissingExtra, naming_extras
from tests.test_project_files import project


def test_a_missing_module_of_an_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra) as raised, naming_extras():
        import torch.nn  # noqa: F401
    assert str(raised.value) == 'torch is not installed: pip install "milvus-hubness[jobs]"'


def test_other_missing_modules_stay_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), naming_extras():
        import no_such_module  # noqa: F401


def test_a_file_without_milvus_lite(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "milvus_lite", None)
    with pytest.raises(MissingExtra, match=r'^milvus_lite is not installed: pip install "milvus-hubness\[lite\]"$'):
        connect(str(tmp_path / "shop.db"))


def test_a_command_names_the_extra_in_one_line(monkeypatch, capsys):
    app = typer.Typer()

    @app.command()
    def fit() -> None:
        import ray  # noqa: F401

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["milvus-hubness"])
    with pytest.raises(SystemExit) as raised:
        run(app)
    assert raised.value.code == 1
    assert capsys.readouterr().err == 'milvus-hubness: ray is not installed: pip install "milvus-hubness[ray]"\n'


@pytest.fixture(scope="module")
def distributions_of():
    return packages_distributions()


@pytest.mark.parametrize("module", sorted(set(EXTRAS) - {"tomli", "ray"}))
def test_the_extra_that_is_named_installs_the_module(module, distributions_of):
    lines = project(".")["optional-dependencies"][EXTRAS[module]]
    [distribution] = set(distributions_of[module])
    asked = {re.match(r"[\w-]+(\[[\w-]+\])?", line)[0].lower() for line in lines}
    assert {distribution.lower().replace("_", "-"), f"pymilvus[{distribution}]"} & asked
