"""The packages of this repository, and what their pyproject.toml files say."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def pyproject(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def project(folder):
    return pyproject(folder)["project"]


def package_folders():
    files = [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
    return [str(file.parent.relative_to(ROOT)) for file in files]
