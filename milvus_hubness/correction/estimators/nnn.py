"""Nearest Neighbor Normalization (Chowdhury et al., EMNLP 2024, eq. 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators.base import (
    Estimator,
    FitInputs,
    FittedBias,
    require_gallery,
)
from milvus_hubness.correction.estimators.products import Numbers, topk_mean_of
from milvus_hubness.correction.kernels import topk_mean
from milvus_hubness.correction.kernels.primitives import kernel_for
from milvus_hubness.correction.kernels.token_rows import is_token_rows

NNNKernel = Literal["dense", "approximate"]
"""How the k largest inner products are found."""


class NNNDiagnostics(NamedTuple):
    """Diagnostics of NNN."""

    bank_size: int
    dim: int
    kernel: str
    """The exact kernel of the device, or the choice of `ApproximateBank`."""
    mean_error: float
    """Mean error of the bias; 0 if exact."""
    max_error: float
    """Largest error of the bias; 0 if exact."""
    sampled: int
    """Number of vectors on which the errors were measured."""
    recall: float | None = None
    """Recall of the tuned bank search on them."""


@dataclass(frozen=True)
class NNN(Estimator, alias="nnn"):
    """b(r) = alpha · mean of the k largest inner products of r with the bank.

    The fit raises BankTooSmall if the bank has fewer than k queries. It learns nothing from the
    gallery, so new items never need a refit; an approximate kernel is tuned on at least 32 items of
    the gallery, or on the bank if there is none, and its error is in the diagnostics.
    """

    k: int = 128
    """How many bank queries count, 1 ≤ k ≤ |bank|. A small k suits a bank from another domain."""
    alpha: float = 0.75
    """Share of that mean to subtract; the paper sweeps 0.25 … 1.5."""
    kernel: NNNKernel = "dense"
    """`dense` is exact. `approximate` searches an index of the bank, tuned on the gallery until the
    mean error of the biases is 1% of their standard deviation, or is exact if that is faster."""
    device: str = field(default="auto", repr=False, compare=False)
    """Device of torch; "auto" takes a GPU if there is one. It changes no bias beyond
    rounding, so estimators compare without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A write restores the estimator, which nearly always has the default.
        if self.kernel != "dense":
            expect_word("kernel", self.kernel, NNNKernel)

    def _fit(self, bank: QueryBank, inputs: FitInputs) -> FittedBias:
        k = bank.nearest_of(self.k)
        exact_kernel = kernel_for(self.device)
        # Without torch, which `ApproximateBank` needs, all biases are exact.
        # FAISS searches vectors: the scores of tokens are exact too.
        has_vectors = not is_token_rows(bank.vectors)
        if self.kernel == "approximate" and exact_kernel != "numpy" and has_vectors:
            return self._fit_approximately(bank, inputs, k)

        diagnostics = NNNDiagnostics(
            bank_size=len(bank),
            dim=bank.dim,
            kernel=exact_kernel,
            mean_error=0.0,
            max_error=0.0,
            sampled=0,
        )
        return self._fitted(
            bank,
            lambda items: self.alpha * topk_mean(items, bank.vectors, k, device=self.device),
            diagnostics,
            of_products=lambda products: self._of_products(products, k),
        )

    def _fit_approximately(self, bank: QueryBank, inputs: FitInputs, k: int) -> FittedBias:
        # It imports FAISS and torch, which the exact kernels do without.
        from milvus_hubness.correction.kernels.approximate import ApproximateBank

        # Without a gallery, the bank's own vectors stand in for items in the tuning.
        gallery = bank.vectors if inputs.gallery is None else inputs.gallery
        items = require_gallery(bank, gallery, "NNN")
        approximate = ApproximateBank(bank.vectors, items, k, device=self.device)

        # The errors are those of the mean of products; the bias is alpha times that mean.
        share = abs(self.alpha)
        diagnostics = NNNDiagnostics(
            bank_size=len(bank),
            dim=bank.dim,
            kernel=approximate.tuned.kind,
            mean_error=share * approximate.tuned.mean_error,
            max_error=share * approximate.tuned.max_error,
            sampled=approximate.measured,
            recall=approximate.tuned.recall,
        )
        return self._fitted(
            bank,
            lambda items: self.alpha * approximate.values(items),
            diagnostics,
            of_products=lambda products: self._of_products(products, k),
        )

    def _of_products(self, products: Numbers, k: int) -> Numbers:
        """Return exact biases, with either kernel: where all products are there, none is missed."""
        return self.alpha * topk_mean_of(products, k)
