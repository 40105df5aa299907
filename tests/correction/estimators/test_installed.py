"""Estimators of other packages, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODULE = '''
from dataclasses import dataclass
from milvus_hubness.correction.estimators.base import Estimator

@dataclass(frozen=True)
class Halved(Estimator, alias="halved"):
    """b(r) = ½ · mean of the bank · r."""

    def _fit(self, bank, inputs):
        return self._fitted(bank, lambda items: 0.5 * items @ bank.vectors.mean(0))
'''


@pytest.fixture
def run(tmp_path):
    """Run Python code in a process in which the package is installed."""

    def run_with(code, module=MODULE, entry_point="halved = others:Halved"):
        (tmp_path / "others.py").write_text(module)
        info = tmp_path / "others-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[milvus_hubness.estimators]\n{entry_point}\n")
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr.strip().split("\n")[-1]

    return run_with


USE = """
from milvus_hubness.correction.estimators import from_dict, to_dict
from milvus_hubness.correction.estimators.base import class_name
import sys
assert "others" not in sys.modules
estimator = from_dict({"name": class_name("HALVED"), "strength": 0.5})
assert to_dict(estimator) == {"name": "Halved", "strength": 0.5}
print(*estimator.fit([[1.0, 3.0], [3.0, 1.0]]).bias([[1.0, 2.0]]))
"""


def test_it_is_known_by_alias_and_by_name_once_it_is_asked_for(run):
    assert run(USE) == "1.5\n"
    stored = "from milvus_hubness.correction.estimators import from_dict as f; print(f({'name': 'Halved'}))"
    assert run(stored) == "Halved()\n"


def test_the_shell_completes_it(run):
    code = "from milvus_hubness.cli.options import _complete_method; print(_complete_method('h'))"
    assert run(code) == "['halved']\n"


@pytest.mark.parametrize(
    ("module", "entry_point", "said"),
    [
        (
            "import none_such",
            "halved = others:Halved",
            "'others' cannot be loaded: No module named",
        ),
        (MODULE, "half = others:Halved", "is no Estimator with alias='half'"),
        ("Halved = 3", "halved = others:Halved", "is no Estimator with alias='halved'"),
        (MODULE.replace('"halved"', '"nnn"'), "nnn = others:Halved", "is taken by"),
    ],
)
def test_a_package_that_is_at_fault_is_named(run, module, entry_point, said):
    told = run(USE, module, entry_point)
    assert told.startswith("milvus_hubness.errors.InvalidParameter: the estimator"), told
    assert "of the installed package 'others'" in told
    assert said in told
