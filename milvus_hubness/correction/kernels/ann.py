"""The index types of Milvus, built in process with FAISS.

Parameters that a collection does not set have Knowhere's defaults. AUTOINDEX, and a field without an index, are the
HNSW that milvus.yaml names (autoIndex.params.build). Index types that FAISS lacks become the most similar one, without
refinement. Product quantisers learn from at most 16 rows per centroid in 10 rounds, Knowhere's from 256 in 25.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milvus_hubness.correction.kernels.checks import whole_number
from milvus_hubness.correction.kernels.libraries import import_faiss
from milvus_hubness.errors import InvalidParameter

SearchParameter = Literal["ef", "nprobe"]

GRAPH = {"M": 30, "efConstruction": 360}
PRODUCT = {"m": 32, "nbits": 8}
DEFAULTS: dict[str, dict[str, Any]] = {
    "FLAT": {},
    "HNSW": GRAPH,
    "HNSW_SQ": {**GRAPH, "sq_type": "SQ8"},
    "HNSW_PQ": {**GRAPH, **PRODUCT},
    "IVF_FLAT": {"nlist": 128},
    "IVF_SQ8": {"nlist": 128},
    "IVF_PQ": {"nlist": 128, **PRODUCT},
}
AUTOINDEX = {"M": 18, "efConstruction": 240}
EF = 16
NPROBE = 8
PRODUCT_POINTS = 16
PRODUCT_ROUNDS = 10
SCALAR_QUANTIZERS = {
    "SQ4U": "QT_4bit_uniform", "SQ6": "QT_6bit", "SQ8": "QT_8bit", "FP16": "QT_fp16", "BF16": "QT_bf16",
}  # fmt: skip


@dataclass(frozen=True)
class IndexSpec:
    """An index to build.

    kind: a key of DEFAULTS. params: all of its build parameters, by Milvus' names.
    """

    kind: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, index_type: str, index_params: Mapping[str, Any]) -> IndexSpec:
        """Return the index to build for a Milvus index type and its parameters.

        Case does not matter; numbers may be text. Raises InvalidParameter for a parameter out of
        range.
        """
        name = index_type.upper()
        kind = name if name in DEFAULTS else _relative(name)
        defaults = {**DEFAULTS[kind], **(AUTOINDEX if name in ("", "AUTOINDEX") else {})}
        return cls(
            kind,
            {key: _checked(key, index_params.get(key, value)) for key, value in defaults.items()},
        )

    @property
    def search_parameter(self) -> SearchParameter | None:
        """The parameter that widens a search."""
        if self.kind == "FLAT":
            return None
        return "ef" if "M" in self.params else "nprobe"

    def default_value(self, k: int) -> int | None:
        """Return Milvus' default of the search parameter for k answers."""
        return {"ef": max(k, EF), "nprobe": NPROBE, None: None}[self.search_parameter]

    def for_sample(self, rows: int, rows_total: int) -> IndexSpec:
        """Return this index for `rows` out of `rows_total` rows.

        IVF cells have as many rows as in the whole, and product quantisation has no more centroids
        than rows.
        """
        params = dict(self.params)
        if "nlist" in params:
            params["nlist"] = min(rows, max(1, round(params["nlist"] * rows / rows_total)))
        if "nbits" in params:
            params["nbits"] = min(params["nbits"], max(1, rows.bit_length() - 1))
        return replace(self, params=params)


class AnnIndex:
    """A FAISS index over rows (n, width) float32; a graph is reproducible only on one OpenMP
    thread. Raises InvalidParameter if m does not divide the width, FaissConflict.
    """

    def __init__(
        self, rows: npt.NDArray[np.float32], spec: IndexSpec, *, metric: Literal["IP", "L2"]
    ) -> None:
        self._faiss = import_faiss()
        self.spec = spec
        rows = np.ascontiguousarray(rows, np.float32)
        width = rows.shape[1]
        m = spec.params.get("m", 1)
        if width % m:
            raise InvalidParameter(f"m = {m} of {spec.kind} does not divide the width {width}")
        faiss_metric = getattr(
            self._faiss, {"IP": "METRIC_INNER_PRODUCT", "L2": "METRIC_L2"}[metric]
        )
        self._index = self._empty(width, faiss_metric)
        self._index.train(rows)
        self._index.add(rows)
        if spec.kind == "HNSW_PQ":
            self._search_on_codes(rows, faiss_metric)

    def search(
        self, queries: npt.NDArray[np.float32], k: int, value: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the k best rows for queries (m, width), best first, −1 for none,
        (m, k). value: of the search parameter, by default that of Milvus; ef is at least k.
        """
        value = self.spec.default_value(k) if value is None else value
        params = None
        if value is not None and self.spec.search_parameter == "ef":
            params = self._faiss.SearchParametersHNSW(efSearch=max(k, value))
        elif value is not None:
            params = self._faiss.SearchParametersIVF(nprobe=value)
        rows: npt.NDArray[np.int64] = self._index.search(
            np.ascontiguousarray(queries, np.float32), k, params=params
        )[1]
        return rows

    def _empty(self, width: int, metric: int) -> Any:
        params = self.spec.params
        kind = self.spec.kind
        if self.spec.search_parameter is None:
            return self._faiss.IndexFlat(width, metric)
        if self.spec.search_parameter == "nprobe":
            codes = {"IVF_SQ8": "SQ8", "IVF_PQ": "PQ{m}x{nbits}"}.get(kind, "Flat").format(**params)
            index = self._faiss.index_factory(width, f"IVF{params['nlist']},{codes}", metric)
            index.cp.min_points_per_centroid = 1
            if kind == "IVF_PQ":
                _shorten_training(index.pq.cp)
                index.do_polysemous_training = (
                    False  # It orders the codes for a filter that no search here has.
                )
            return index
        if kind == "HNSW_SQ":
            quantizer = getattr(self._faiss.ScalarQuantizer, SCALAR_QUANTIZERS[params["sq_type"]])
            index = self._faiss.IndexHNSWSQ(width, quantizer, params["M"], metric)
        else:
            index = self._faiss.IndexHNSWFlat(width, params["M"], metric)
        index.hnsw.efConstruction = params["efConstruction"]
        return index

    def _search_on_codes(self, rows: npt.NDArray[np.float32], metric: int) -> None:
        """Make the graph link exact vectors but search on codes, as in Knowhere.

        FAISS's own IndexHNSWPQ links by distances between codes, which it supports for L2 only.
        """
        params = self.spec.params
        self._codes: Any = self._faiss.IndexPQ(rows.shape[1], params["m"], params["nbits"], metric)
        _shorten_training(self._codes.pq.cp)
        self._codes.train(rows)
        self._codes.add(rows)
        self._index.storage.thisown = True
        self._index.own_fields = False
        self._index.storage = self._codes


def _relative(name: str) -> str:
    """Return the kind most similar to an index type that FAISS does not have, or has under another
    name.
    """
    relatives = {
        "BRUTE_FORCE": "FLAT",
        "IVF_PQ": "IVF_PQ",
        "HNSW_P": "HNSW_PQ",
        "IVF": "IVF_FLAT",
        "SCANN": "IVF_FLAT",
    }
    return next((kind for part, kind in relatives.items() if part in name), "HNSW")


def _shorten_training(clustering: Any) -> None:
    clustering.niter = PRODUCT_ROUNDS
    clustering.min_points_per_centroid = 1
    clustering.max_points_per_centroid = PRODUCT_POINTS


def _checked(name: str, value: Any) -> Any:
    if name != "sq_type":
        return whole_number(
            name, int(value) if isinstance(value, str) and value.isdecimal() else value
        )
    quantizer = str(value).upper()
    if quantizer not in SCALAR_QUANTIZERS:
        raise InvalidParameter(f"sq_type is one of {', '.join(SCALAR_QUANTIZERS)}, not {value!r}")
    return quantizer
