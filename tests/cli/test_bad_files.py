"""Commands refuse files that are none in one line with an exit code, and do not wait for them."""

import os

import numpy as np
import pytest

from tests.cli.conftest import DIM, assert_fails

COMMANDS = {
    "bank": (1, "hubs products --method nnn --bank {}.npy"),
    "pairs": (1, "tune products --bank bank.npy --pairs {}.npz"),
    "queries": (1, "hubs products --bank bank.npy --query {}.parquet"),
    "configuration": (2, "serve --check --config {}"),
    "certificate": (2, "proxy --upstream localhost:1 --tls-cert {} --tls-key {}"),
    "network": (1, "quari eval {} --pairs pairs.npz"),
    "weights": (1, "quari import-weights {}.pt --out out"),
    "page": (1, "check products --bank bank.npy --page {}"),
    "matches": (1, "match products --queries bank.npy --out {}.npz"),
}


@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_pipe_or_a_folder_in_place_of_a_file(files, run, command, place):
    code, words = command
    for suffix in ("", ".npy", ".npz", ".parquet", ".pt"):
        place(f"named{suffix}")
    assert_fails(run(*words.format("named", "named").split()), code, "named")


def test_a_token_file_with_something_else(files, run):
    for content, words in (
        (b"", "token: is empty: write the token into it"),
        (b" \n", "token: is empty: write the token into it"),
        (b"root:\nMilvus", "token: has several lines or control characters"),
        (b"\x89PNG\xff", "token: is not a text in UTF-8"),
        (np.zeros((9, DIM)).tobytes(), "token: has several lines or control characters"),
        (b"a" * (1 << 17), "token: has more than 65,536 bytes"),
    ):
        (files / "token").write_bytes(content)
        assert_fails(run("status", "products", MILVUS_HUBNESS_TOKEN_FILE="token"), 1, words)
    (files / "token").write_bytes(b"root:Milvus\r\n")
    assert run("status", "products").returncode == 0


@pytest.mark.parametrize("place", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_a_folder_in_place_of_a_token(files, run, place):
    place("named")
    assert_fails(run("status", "products", MILVUS_HUBNESS_TOKEN_FILE="named"), 1, "named")


@pytest.mark.parametrize("variable", ["MILVUS_HUBNESS_TOKEN", "MILVUS_HUBNESS_APPLICATION_TOKEN"])
def test_a_token_has_one_source(files, run, variable):
    (files / "token").write_text("root:Milvus")
    rehearse = "migrate run products --bank bank.npy --rehearse"
    done = run(*rehearse.split(), **{variable: "root:Milvus", f"{variable}_FILE": "token"})
    assert_fails(done, 2, f"${variable} and ${variable}_FILE are both set: unset one of them")
