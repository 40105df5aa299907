"""Threads of OpenMP leave their cores to others while they wait, in jobs and nowhere else."""

import os
import subprocess
import sys

import pytest

JOB = "from milvus_hubness.correction.kernels.policy import prefer_torch; prefer_torch()"
CLIENT = "from milvus_hubness import HubnessClient"


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [(JOB, None, "passive"), (JOB, "active", "active"), (CLIENT, None, "None")],
    ids=["a job", "as the user sets it", "a client"],
)
def test_who_waits_how(code, before, after):
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if before is not None:
        environ["OMP_WAIT_POLICY"] = before
    read = (
        f"{code}; import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", read], env=environ, capture_output=True, text=True, check=True
    )
    # OpenMP reads it when torch is imported.
    assert done.stdout.split() == [after, "False"]
