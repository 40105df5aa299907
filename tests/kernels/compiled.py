"""Compiles every kernel for capability 9.0 and exits with an error where one would run badly there."""

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from milvus_hubness.kernels import fused
from milvus_hubness.kernels import fused as kernels

SHARED_MEMORY = 227 * 1024
TYPES = {"index_ptr": "*i32", "count_ptr": "*i32", "mean_ptr": "*fp64", "scale": "fp32"}
SCORES = ("sum_products", "keep_survivors")
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def check(name, dtype, constants, num_warps=4, num_stages=3):
    kernel = getattr(kernels, name)
    signature = {}
    for argument in kernel.arg_names:
        pointer = "*fp32" if argument.endswith("_ptr") else "i32"
        signature[argument] = TYPES.get(argument, pointer)
        if argument in ("x_ptr", "b_ptr", "s_ptr"):
            signature[argument] = f"*{dtype}"
        if argument in constants:
            signature[argument] = "constexpr"
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, argument in enumerate(kernel.arg_names)
        if argument.endswith("_ptr") or argument == "d"
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    stack = stack_bytes(compiled.asm["cubin"])
    result = f"{name} {dtype}: {compiled.metadata.shared} bytes shared, {stack} bytes spilled"
    if compiled.metadata.shared > SHARED_MEMORY or stack:
        sys.exit(result)
    if name in SCORES and "wgmma" not in compiled.asm["ptx"]:
        sys.exit(f"{name} {dtype} uses no tensor cores")


def stack_bytes(binary):
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        result = subprocess.run([dump, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", result)))


for name in SCORES:
    tiles = fused.KEEPING if name == "keep_survivors" else fused.SUMMING
    for dtype, tile in tiles.items():
        short = str(dtype).removeprefix("torch.")
        if short == "float16":
            continue
        constants = {
            "EVEN": True,
            "PRECISION": "tf32x3" if short == "float32" else "tf32",
            "BM": tile.BM,
            "BN": tile.BN,
            "BK": tile.BK,
        }
        if name == "keep_survivors":
            constants["INDICES"] = True
        check(name, NAMES[short], constants, tile.num_warps, tile.num_stages)
BM, BN = fused.CACHED_TILE
check("sum_cached", "fp16", {"BM": BM, "BN": BN, "column_stride": 1})
check("sum_cached", "fp16", {"BM": BN, "BN": BM, "row_stride": 1})
check("mean_of_largest", "fp32", {"WIDTH": 4096})
