"""The kernels of Triton compiled for an H100 or H200, without one: what a thread and a block take.

    python -m benchmarks.compiled_kernels

One line for each kernel: registers of a thread, bytes of its stack, to which registers are spilled, and bytes of shared
memory of a block. Each is compiled for sizes that are multiples of 16, and for any. Needs triton; exits with 1 if a
kernel spills.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CAPABILITY, LANES = 90, 32
POINTERS = {
    "tile": "*bf16",
    "scores": "*bf16",
    "columns": "*i32",
    "counts": "*i32",
    "thresholds": "*fp32",
    "cuts": "*fp32",
    "x": "*fp32",
    "bank": "*fp32",
    "products": "*fp32",
}
NEVER_ALIGNED = ["tile_columns", "width", "first", "step"]
"""Sizes whose alignment Triton is told not to look at."""


def compiled(kernel: Any, constants: dict[str, int], warps: int, are_aligned: bool) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: POINTERS.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [
        place
        for place, name in enumerate(names)
        if name in POINTERS or (are_aligned and name not in [*NEVER_ALIGNED, *constants])
    ]
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs=constants,
            attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
        ),
        target=GPUTarget("cuda", CAPABILITY, LANES),
        options={"num_warps": warps},
    )


def resources(binary: bytes) -> tuple[int, int]:
    """The registers and the bytes of stack of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        command = [str(tool), "-res-usage", str(path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [registers] = re.findall(r"REG:(\d+)", printed)
    [stack] = re.findall(r"STACK:(\d+)", printed)
    return int(registers), int(stack)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    from milvus_hubness.correction.kernels import on_triton

    kernels = [
        (on_triton._append_reaching, {"BLOCK": on_triton.SCORES}),
        (
            on_triton._products_of_candidates,
            {"BLOCK": on_triton.CANDIDATES, "PART": on_triton.DIMENSIONS},
        ),
    ]
    has_spilled = False
    for kernel, constants in kernels:
        for are_aligned in (True, False):
            result = compiled(kernel, constants, on_triton.WARPS, are_aligned)
            registers, stack = resources(result.asm["cubin"])
            has_spilled |= stack > 0
            print(
                f"{kernel.__name__}, {'multiples of 16' if are_aligned else 'any sizes'}: "
                f"{registers} registers, {stack} bytes of stack, {result.metadata.shared} bytes shared"
            )
    return int(has_spilled)


if __name__ == "__main__":
    sys.exit(main())
