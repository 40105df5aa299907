"""The benchmark for CUDA devices runs on a CPU too."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import islice

import pytest
import torch

from benchmarks import environment, kernels_gpu
from milvus_hubness.correction.kernels import screened
from tests.support.real_data import needs_real_data

OTHERS = ["torch.topk over tiles", "FAISS flat", *["nnn-retrieval"][: find_spec("nnn") is not None]]


def run(*more):
    sizes = {"--rows": 70, "--bank": 3000, "--dim": 16, "--k": 16}
    return kernels_gpu.main(
        ["--device", "cpu", *(str(part) for pair in sizes.items() for part in pair), *more]
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the benchmark saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "RESULTS", tmp_path_factory.mktemp("results"))
        patch.delenv("TRITON_INTERPRET", raising=False)
        assert run("--save") == 0
        markdown = (environment.RESULTS / "kernels_gpu.md").read_text()
        return json.loads((environment.RESULTS / "kernels_gpu.json").read_text()), markdown


VECTORS = ["float32", "float32 on the device", "bfloat16", "L2", "cosine 0.8", "cosine 0.95"]


@pytest.mark.parametrize(
    "vectors",
    [
        *VECTORS,
        pytest.param("docstring_code", marks=needs_real_data, id="docstring_code, real_data"),
    ],
)
def test_every_kernel_is_compared_on_a_cpu(results, vectors):
    cells = results[0]["cells"][vectors]
    others = {"float32": OTHERS, "docstring_code": OTHERS[2:]}.get(vectors, [])
    assert set(cells["16"]) == {"product alone", "screened", "dense", *others}
    assert cells["16"]["screened"]["rows_left_over"] == 0
    assert ("log-sum-exp" in cells) == (vectors in ("float32 on the device", "docstring_code"))
    for row in cells.values():
        for by, cell in row.items():
            assert by == "product alone" or cell["error_over_std"] < 1e-4
            if by == "dense" and "seconds" not in cell:
                continue
            assert cell["tflops"] > 0
            assert cell["share_of_product"] == pytest.approx(
                row["product alone"]["seconds"] / cell["seconds"]
            )
    if "nnn-retrieval" in others:
        ratio = cells["16"]["nnn-retrieval"]["seconds"] / cells["16"]["screened"]["seconds"]
        assert cells["16"]["screened"]["times_as_fast_as_nnn-retrieval"] == pytest.approx(ratio)


def test_results_are_held_against_the_targets(results):
    saved, markdown = results
    assert saved["sinkhorn"]["iterations"] == 10
    assert saved["sinkhorn"]["times_as_long"] > 0
    assert [row["target"].split(":")[0] for row in saved["targets"][:-1]] == [
        "float32 on the device, 16, screened", "float32 on the device, log-sum-exp, dense",
        *["float32, 16, screened"] * ("nnn-retrieval" in OTHERS),
    ]  # fmt: skip
    for row in saved["targets"]:
        assert (
            f"| {row['target']} | {row['measured']:.2g} | {'yes' if row['reached'] else 'no'} |"
            in markdown
        )


def test_it_fails_where_the_kernel_is_wrong(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    real, all_inputs = screened.topk_mean, kernels_gpu.inputs
    monkeypatch.setattr(kernels_gpu, "inputs", lambda *sizes: islice(all_inputs(*sizes), 1))
    monkeypatch.setattr(screened, "topk_mean", lambda operands, k: (real(operands, k)[0] + 1e-3,))
    assert run() == 1


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        kernels_gpu.main(["--device", "cuda"])
    assert "pass --device cpu" in capsys.readouterr().err
