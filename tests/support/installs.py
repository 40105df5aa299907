"""Environments that lack some modules, made of the packages that the tests run with."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

OF_JOBS_ALONE = (
    "torch",
    "functorch",
    "torchgen",
    "safetensors",
    "sklearn",
    "scikit_learn",
    "scipy",
)
"""What milvus-hubness[jobs] installs and milvus-hubness[check] does not."""


def packages_without(folder, *names):
    """Return a folder with links to all installed packages but those of these names."""
    folder.mkdir()
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        name = package.name.partition("-")[0].partition(".")[0].lower()
        # The editable install of this package is in a .pth file, which only `site` reads.
        if name not in names and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    return folder


def run_with(packages, *arguments, cwd, **variables):
    """Run Python with these packages and this repository alone, and return how it ended."""
    repository = Path(__file__).parents[2]
    return subprocess.run(
        # -S leaves the packages out that this Python would find by itself.
        [sys.executable, "-S", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{repository}{os.pathsep}{packages}", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
