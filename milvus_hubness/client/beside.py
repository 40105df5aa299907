"""Requests and responses of collections whose biases lie beside their vectors. No I/O."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pymilvus.function_chain import FunctionChain, FunctionChainStage, col, fn

from milvus_hubness.client.hits import hide, keep, rerank, rescore
from milvus_hubness.client.rewrite import RANGE_BOUNDS, Asked, FieldRequest, Rewrite, Row
from milvus_hubness.layout import Floats
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import EPOCH_FIELD, SIDE_FIELD, SLOT_FIELDS, CollectionState

MEASURED_DEPTH = 10
MAX_CANDIDATES = 16_384
"""What Milvus answers a search with at most."""


@dataclass(frozen=True)
class BesideRewrite(Rewrite):
    """For vectors that are stored as the user gave them: candidates are fetched and their scores corrected.

    chains: the server runs function chains, which correct where the biases are fields; elsewhere
    `Asked.answer` does.
    """

    chains: bool = False

    @property
    def side(self) -> str | None:
        """The collection that holds the biases, None where fields do."""
        return self.state.beside.side if self.state.beside else None

    # -- rows in --------------------------------------------------------------------------------------

    def rows_in(
        self, rows: Sequence[Row], vectors: Floats, biases: Floats, epoch: int
    ) -> list[dict[str, Any]]:
        """The rows with their biases (n,) in both slots, where these are fields; else as they are."""
        if self.side:
            return [dict(row) for row in rows]
        columns = np.asarray(biases, np.float32).tolist()
        return [
            {**row, **dict.fromkeys(SLOT_FIELDS, bias), EPOCH_FIELD: epoch}
            for row, bias in zip(rows, columns, strict=True)
        ]

    def side_rows(
        self, key_field: str, keys: Sequence[Any], biases: Floats, epoch: int
    ) -> list[dict[str, Any]]:
        """What goes into the side collection for rows of these keys."""
        return [
            {key_field: key, SIDE_FIELD: [bias, bias], EPOCH_FIELD: epoch}
            for key, bias in zip(keys, np.asarray(biases, np.float32).tolist(), strict=True)
        ]

    # -- questions --------------------------------------------------------------------------------------

    def ask(
        self,
        data: npt.ArrayLike,
        search_params: dict[str, Any] | None,
        output_fields: list[str] | None,
        *,
        strength: float | None,
        limit: int,
        offset: int = 0,
        round_decimal: int = -1,
        rerank: GloballyCorrected | None = None,
        bank: Floats | None = None,
        activated: AbstractSet[Any] = frozenset(),
    ) -> Asked:
        """The request for the candidates, or for the answer itself where no correction is asked for or the
        server applies it. Raises as `search` does."""
        weight = self.strength(strength)
        queries = self.state.layout.require_finite(data, "query")
        params = copy.deepcopy(search_params or {})
        fields = self.fields(output_fields)
        page = slice(offset, offset + limit)
        if rerank is not None and bank is not None:
            return self._reranked(queries, params, fields, page, round_decimal, rerank, bank)
        if weight == 0:
            options = {"round_decimal": round_decimal} if round_decimal >= 0 else {}
            return Asked(
                list(queries),
                limit,
                offset,
                params,
                fields.requested,
                lambda results: self._uncovered(results, fields),
                options,
            )
        bounds = _without_bounds(params)
        if self.chains and not self.side and not bounds and not self.is_gated(strength):
            return self._chained(queries, params, fields, page, round_decimal, weight)

        def answer(results: Any, biases: Mapping[Any, Sequence[float]] | None = None) -> Any:
            for hits in results:
                self._correct(hits, biases, weight, bounds, activated if self.is_gated(strength) else None)
                keep(hits, hits[page])
                rescore(hits, hits.distances, round_decimal)
            return self._uncovered(results, fields)

        return Asked(
            list(queries),
            self._candidates(page),
            0,
            params,
            fields.requested if self.side else self._with_slot(fields),
            answer,
            biases_of=self.side,
        )

    def _chained(
        self,
        queries: Floats,
        params: dict[str, Any],
        fields: FieldRequest,
        page: slice,
        round_decimal: int,
        weight: float,
    ) -> Asked:
        corrected = fn.num_combine(
            col("$score"),
            col(SLOT_FIELDS[self.state.profile.slot]),
            mode="weighted",
            weights=[1.0, self._sign * weight],
        )
        chain = (
            FunctionChain(FunctionChainStage.L2_RERANK)
            .map("$score", corrected)
            .sort(col("$score"), desc=self.state.metric != "L2")
            .limit(page.stop - page.start, page.start)
        )
        options = {"function_chains": chain}
        return Asked(
            list(queries),
            self._candidates(page),
            0,
            params,
            fields.requested,
            lambda results: self._uncovered(results, fields),
            {**options, "round_decimal": round_decimal} if round_decimal >= 0 else options,
        )

    def _reranked(
        self,
        queries: Floats,
        params: dict[str, Any],
        fields: FieldRequest,
        page: slice,
        round_decimal: int,
        how: GloballyCorrected,
        bank: Floats,
    ) -> Asked:
        wanted = fields.requested or []
        shown = self.state.field in wanted or "*" in wanted
        hidden = fields.hidden if shown else (*fields.hidden, self.state.field)

        def vectors_of(hits: list[Any]) -> Floats:
            found = np.array([hit["entity"][self.state.field] for hit in hits], np.float32)
            return found.reshape(-1, self.state.dim)

        def answer(results: Any) -> Any:
            rerank(results, queries, self.state.layout, how, bank, page, vectors_of)
            for hits in results:
                rescore(hits, hits.distances, round_decimal)
            return self._uncovered(results, FieldRequest(fields.requested, hidden))

        return Asked(
            list(queries),
            max(how.candidates, page.stop),
            0,
            params,
            wanted if shown else [*wanted, self.state.field],
            answer,
        )

    def _candidates(self, page: slice) -> int:
        """As many for each result asked for as were measured to do for ten."""
        measured = self.state.beside.candidates if self.state.beside else 0
        last = int(page.stop)
        return max(measured, min(measured * last // MEASURED_DEPTH, MAX_CANDIDATES), last)

    def _with_slot(self, fields: FieldRequest) -> list[str]:
        wanted = fields.requested or []
        slot = SLOT_FIELDS[self.state.profile.slot]
        return wanted if slot in wanted or "*" in wanted else [*wanted, slot]

    @property
    def _sign(self) -> float:
        """What a bias counts in the user's metric: scores fall by it, squared distances grow by twice it."""
        return 2.0 if self.state.metric == "L2" else -1.0

    # -- answers ----------------------------------------------------------------------------------------

    def _correct(
        self,
        hits: Any,
        biases: Mapping[Any, Sequence[float]] | None,
        weight: float,
        bounds: Mapping[str, float],
        activated: AbstractSet[Any] | None,
    ) -> None:
        """Raw candidates with corrected scores in their order, in place. Rows without a bias have the mean's.

        biases: the slots of each key; None where hits bring their own. activated: where the search is gated,
        the keys that open the gate.
        """
        if activated is not None and (not hits or hits[0].id not in activated):
            weight = 0.0
        slot = self.state.profile.slot
        if biases is None:
            own = [hit["entity"].get(SLOT_FIELDS[slot]) or 0.0 for hit in hits]
        else:
            own = [biases[hit.id][slot] if hit.id in biases else 0.0 for hit in hits]
        raw = np.array([hit["distance"] for hit in hits], np.float64)
        scores = raw + self._sign * weight * np.array(own, np.float64)
        order = np.argsort(scores if self.state.metric == "L2" else -scores, kind="stable")
        rescore(hits, scores)
        keep(hits, [hits[i] for i in order if _within(scores[i], bounds, self.state.metric)])

    def _uncovered(self, results: Any, fields: FieldRequest) -> Any:
        for hits in results:
            hide((hit["entity"] for hit in hits), fields.hidden)
        return results

    def entities_out(self, entities: Any, fields: FieldRequest) -> None:
        """Rows as the user knows them, changed in place."""
        hide(entities, fields.hidden)


def rewrite_of(state: CollectionState, *, chains: bool = False) -> Rewrite:
    """The rewrite for where this state says that the biases lie."""
    return Rewrite(state) if state.beside is None else BesideRewrite(state, chains)


def _without_bounds(params: dict[str, Any]) -> dict[str, float]:
    """The bounds of a range search, taken out of its parameters: they hold for corrected scores."""
    bounds: dict[str, float] = {}
    for place in (params, params.get("params") or {}):
        for name in RANGE_BOUNDS:
            if place.get(name) is not None:
                bounds[name] = float(place.pop(name))
    return bounds


def _within(score: float, bounds: Mapping[str, float], metric: str) -> bool:
    """As Milvus takes them: radius is the far bound and excluded, range_filter the near one."""
    sign = -1.0 if metric == "L2" else 1.0
    far, near = bounds.get("radius"), bounds.get("range_filter")
    beyond = far is not None and sign * score <= sign * far
    return not beyond and not (near is not None and sign * score > sign * near)
