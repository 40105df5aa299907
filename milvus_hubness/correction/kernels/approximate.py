"""Approximate top-k means: an index of the bank in FAISS, tuned on a sample of the gallery.

The index has inverted lists, on a CPU or with faiss-gpu on a CUDA device, where a FAISS with cuVS builds graphs (CAGRA)
too. The exact means, by the kernel of the device or by FAISS's flat index on a GPU, are used where they are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import sqrt
from timeit import timeit
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from milvus_hubness.correction.kernels import topk, topk_mean
from milvus_hubness.correction.kernels.checks import Array, Matrix, positive_number, validate_k
from milvus_hubness.correction.kernels.libraries import faiss_runs_on_gpus, import_faiss
from milvus_hubness.correction.kernels.operands import Operands, as_tensor
from milvus_hubness.correction.kernels.policy import resolve_device
from milvus_hubness.errors import InvalidInput

ERROR = 0.01
SAMPLE = 1024
LEAST_SAMPLE = 32
TIMED = 8192
LEAST_BANK = 2_000
"""Smallest bank that is divided into lists."""
ROWS_AT_ONCE = 1 << 16
TRAINING_ROWS_PER_LIST = 25
GPU_LIMIT = 2048
"""Largest k, and number of lists to read, of FAISS on a GPU."""
GRAPH_WIDTHS, GRAPH_STARTS = (64, 128, 256, 512), 8
"""Sizes of CAGRA's list of candidates, which must hold the k; and its draws of nodes to start from: of one, the search
may miss a part of a large bank."""
FLAT_SIZES, MOST_FLAT_ERROR = (2048, 1 << 16), 1e-4
"""Rows and bank by which FAISS's flat index is timed, and its largest mean error over the standard deviation of the
means: products in TF32 exceed it."""


class Tuned(NamedTuple):
    """The chosen kernel, and its results on the half of the sample that it was not chosen on.

    kind: "exact" if no index was both accurate enough and faster. width: nprobe, the number of
    lists to read, or the itopk_size of CAGRA; 0 for "exact". recall: share of the k nearest that
    the index finds. mean_error, max_error: of the means, in units of the score; share: mean_error
    over the standard deviation of the exact means. speedup: over the exact means, on up to 8,192
    rows.
    """

    kind: Literal["exact", "ivf", "cagra"] = "exact"
    width: int = 0
    recall: float = 1.0
    mean_error: float = 0.0
    max_error: float = 0.0
    share: float = 0.0
    speedup: float = 1.0


def index_types(k: int, *, on_gpu: bool) -> list[Literal["ivf", "cagra"]]:
    """Return the types of index that the installed FAISS has for the k nearest, on a GPU or on the
    CPU.
    """
    faiss = import_faiss()
    if on_gpu and (k > GPU_LIMIT or not faiss_runs_on_gpus()):
        return []
    return (
        ["cagra", "ivf"]
        if on_gpu and k <= GRAPH_WIDTHS[-1] and hasattr(faiss, "GpuIndexCagra")
        else ["ivf"]
    )


class BankIndex:
    """An index in FAISS of a bank (m, d), a contiguous tensor of float32 on the device of the
    index. kind: one of `index_types`, or on a GPU "flat", which is exact.
    """

    def __init__(
        self, kind: Literal["ivf", "cagra", "flat"], bank: torch.Tensor, k: int, *, on_gpu: bool
    ) -> None:
        self._faiss = import_faiss()
        self._kind = kind
        self._k = k
        self._on_gpu = on_gpu
        m, d = bank.shape
        self._count = max(1, min(int(8 * sqrt(m)), m // TRAINING_ROWS_PER_LIST))
        self._index = self._empty(d, bank.device.index or 0)
        if kind == "ivf":
            training = self._index.cp
            training.seed = 0
            training.min_points_per_centroid = 1
            training.max_points_per_centroid = TRAINING_ROWS_PER_LIST
        # CAGRA reads a bank on the device in place, for which its rows must be multiples of 16 bytes.
        self._bank = bank.cpu() if kind == "cagra" and d % 4 else bank
        self._index.train_c(m, self._floats(self._bank))
        if kind != "cagra":
            self._index.add_c(m, self._floats(self._bank))

    def widths(self) -> Iterator[int]:
        """Yield numbers of lists to read, which grow by half, or sizes of the list of candidates,
        up to the limits.
        """
        if self._kind == "cagra":
            yield from (width for width in GRAPH_WIDTHS if width >= self._k)
            return
        width = 1
        last = min(self._count, GPU_LIMIT) if self._on_gpu else self._count
        while width < last:
            yield width
            width = max(width + 1, width * 3 // 2)
        yield last

    def search(self, x: torch.Tensor, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k largest products of rows x (n, d) that a search of this width finds, and
        their rows of the bank or −1, (n, k), on the device of x.
        """
        x = x.contiguous()
        params = None
        scores, rows = (
            x.new_empty(len(x), self._k, dtype=dtype) for dtype in (torch.float32, torch.int64)
        )
        if self._kind == "ivf":
            params = self._faiss.SearchParametersIVF(nprobe=width)
        elif self._kind == "cagra":
            params = self._faiss.SearchParametersCagra(
                itopk_size=width, num_random_samplings=GRAPH_STARTS
            )
        places = self._faiss.cast_integer_to_idx_t_ptr(rows.data_ptr())
        self._index.search_c(len(x), self._floats(x), self._k, self._floats(scores), places, params)
        return scores, rows

    def means(self, x: torch.Tensor, width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means for rows x (n, d), float64 (n,), and whether the search finds k rows, (n,)."""
        scores, rows = self.search(x, width)
        return scores.mean(1, dtype=torch.float64), (rows >= 0).all(1)

    def recall(self, x: torch.Tensor, width: int, nearest: torch.Tensor) -> float:
        """Return the share of the nearest rows (n, k) that a search of this width finds."""
        pairs = zip(nearest.cpu().numpy(), self.search(x, width)[1].cpu().numpy(), strict=True)
        return float(np.mean([np.isin(a, b).mean() for a, b in pairs]))

    def _empty(self, d: int, device: int) -> Any:
        metric = self._faiss.METRIC_INNER_PRODUCT
        lists = [self._count] if self._kind == "ivf" else []
        if not self._on_gpu:
            return self._faiss.IndexIVFFlat(self._faiss.IndexFlatIP(d), d, *lists, metric)
        name = {"ivf": "GpuIndexIVFFlat", "cagra": "GpuIndexCagra", "flat": "GpuIndexFlat"}[
            self._kind
        ]
        config = getattr(self._faiss, f"{name}Config")()
        config.device = device
        self._resources = self._faiss.StandardGpuResources()
        return getattr(self._faiss, name)(self._resources, d, *lists, metric, config)

    def _floats(self, rows: torch.Tensor) -> Any:
        """Return a pointer for FAISS, which works in torch's stream: torch has written the rows
        that it reads.
        """
        if rows.is_cuda:
            stream = torch.cuda.current_stream(rows.device).cuda_stream
            self._resources.setDefaultStream(
                rows.device.index, self._faiss.cast_integer_to_cudastream_t(stream)
            )
        return self._faiss.cast_integer_to_float_ptr(rows.data_ptr())


@cache
def flat_is_faster(
    device: str, place: torch.device, d: int, k: int, sizes: tuple[int, int] = FLAT_SIZES
) -> bool:
    """Return whether FAISS's flat index on a GPU computes exact means faster than the kernel of the
    device, by two runs of each on random vectors, once in a process.
    """
    X, B = (
        torch.randn(size, d, generator=torch.Generator().manual_seed(size)).to(place)
        for size in sizes
    )
    index = BankIndex("flat", B, k, on_gpu=True)
    runs: list[Callable[[], torch.Tensor]] = [
        lambda: index.means(X)[0],
        lambda: topk_mean(X, B, k, device=device),
    ]
    (flat, by_flat), (exact, by_kernel) = ((run(), seconds_of(run)) for run in runs)
    return (
        by_flat < by_kernel and float((flat - exact).abs().mean() / exact.std()) <= MOST_FLAT_ERROR
    )


def seconds_of(run: Callable[[], torch.Tensor]) -> float:
    """Return the seconds until the result is on the CPU, in the faster of two runs."""
    return min(timeit(lambda: run().cpu(), number=1) for _ in range(2))


class ApproximateBank:
    """Means of the k largest inner products with a bank B (m, d), for many rows similar to those of
    X (n, d).

    error: largest acceptable mean |Δ| of the means, as a share of their standard deviation. device:
    as for `topk_mean`; on CUDA an index needs faiss-gpu and k ≤ 2,048, else the means are exact.
    measured: how many rows the reported errors were measured on. Raises as `topk_mean` does,
    InvalidInput for fewer than 32 rows of X, FaissConflict.
    """

    def __init__(
        self, B: Matrix, X: Matrix, k: int, *, error: float = ERROR, device: str = "auto"
    ) -> None:
        bank = Operands.of(X, B, device).bank.float().contiguous()
        self.k = validate_k(k, B)
        self._bank = bank
        self._device = device
        self._on_gpu = resolve_device(device).type == "cuda"
        self._exact: Callable[[torch.Tensor], torch.Tensor] = lambda rows: topk_mean(
            rows, bank, k, device=device
        )
        if X.shape[0] < LEAST_SAMPLE:
            raise InvalidInput(
                f"an approximate bank needs at least {LEAST_SAMPLE} items to tune on, not {X.shape[0]}"
            )
        rng = np.random.default_rng(0)
        sample, timed = (
            as_tensor(
                X[rng.choice(X.shape[0], min(size, X.shape[0]), replace=False)],
                torch.float32,
                bank.device,
            )
            for size in (SAMPLE, TIMED)
        )
        self.measured = len(sample) - len(sample) // 2
        self._index: BankIndex | None = None
        self._width = 0
        self.tuned = self._tune(sample, timed, positive_number("error", error))

    def values(self, X: Matrix) -> Array:
        """Return means of the k largest products for rows X (n, d), float32 (n,).

        A row whose mean is not reliable is computed exactly. Raises DimensionMismatch,
        InvalidInput.
        """
        values = np.empty(X.shape[0], np.float32)
        for part, x in Operands.of(X, self._bank, str(self._bank.device)).rows(ROWS_AT_ONCE):
            values[part] = self._means(x).cpu()
        return values

    def _tune(self, sample: torch.Tensor, timed: torch.Tensor, error: float) -> Tuned:
        """Choose the fastest of the narrowest searches that are accurate enough on the first half
        of the sample.
        """
        types = index_types(self.k, on_gpu=self._on_gpu)
        if (
            self._on_gpu
            and types
            and flat_is_faster(self._device, self._bank.device, self._bank.shape[1], self.k)
        ):
            flat = BankIndex("flat", self._bank, self.k, on_gpu=True)
            self._exact = lambda rows: flat.means(rows)[0]
        if len(self._bank) < LEAST_BANK or not types:
            return Tuned()
        scores, nearest = topk(sample, self._bank, self.k, device=self._device)
        means = scores.mean(1, dtype=torch.float64)
        half = len(sample) // 2
        spread = float(means.std(correction=0))
        exact_seconds = seconds_of(lambda: self._means(timed))
        best = Tuned()
        chosen = None
        for kind in types:
            self._index = index = BankIndex(kind, self._bank, self.k, on_gpu=self._on_gpu)
            for width in index.widths():
                self._width = width
                off = (self._means(sample) - means).abs()
                if off[:half].mean() > error * spread:
                    continue
                speedup = exact_seconds / seconds_of(lambda: self._means(timed))
                if speedup > best.speedup:
                    recall = index.recall(sample[half:], width, nearest[half:])
                    mean = float(off[half:].mean())
                    best = Tuned(
                        kind, width, recall, mean, float(off[half:].max()), mean / spread, speedup
                    )
                    chosen = index
                break
        self._index = chosen
        self._width = best.width
        return best

    def _means(self, rows: torch.Tensor) -> torch.Tensor:
        if self._index is None:
            return self._exact(rows).double()
        means, reliable = self._index.means(rows, self._width)
        if not reliable.all():
            means[~reliable] = self._exact(rows[~reliable]).double()
        return means
