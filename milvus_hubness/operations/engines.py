"""Engines that compute biases (this process, a database search, Ray), and restored corrections."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks.bank import QueryBank
from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.correction import Correction, reduced_targets
from milvus_hubness.distributed.ray_gallery import RayBiases
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.estimators import CSLS, NNN, Estimator, from_dict
from milvus_hubness.estimators.nearest import Nearest
from milvus_hubness.state import BankReference, CollectionState, Profile
from milvus_hubness.stores.protocols import BankSearch, Store, capability

Engine = Literal["local", "server", "ray"]
WINDOW = 16_384


@dataclass(frozen=True)
class Served(Correction):
    """A correction that reads the scores of bank queries from the bank's index in the database. It is as
    exact as that index.

    scores: maps vectors (m, d) to their k best scores (m, k), in descending order.
    """

    scores: Callable[[Floats, int], Floats] = field(kw_only=True)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        estimator = self.fitted.estimator
        if valid.any() and isinstance(estimator, NNN | CSLS):
            found = self.scores(rows[valid], estimator.k).astype(np.float64)
            none = np.empty(0)
            near = Nearest(found, 0, none, np.empty((*found.shape, 0)), none)
            biases[valid] = estimator.from_nearest(near).biases - self.mean_bias
        return biases


@dataclass(frozen=True)
class Spread(Correction):
    """A correction whose biases Ray workers compute. workers: maps items (n, d), in the form that the
    layout's metric uses, to their biases (n,)."""

    workers: Callable[[Floats], Floats] = field(kw_only=True)

    def centred(self, vectors: npt.ArrayLike) -> Floats:
        if self.are_new:
            return super().centred(vectors)
        rows = np.asarray(vectors, np.float32)
        valid = ~self.layout.invalid(rows)
        biases = np.zeros(len(rows), np.float32)
        if valid.any():
            result = self.workers(self.layout.reduce_items(rows[valid]))
            biases[valid] = result - np.float32(self.mean_bias)
        return biases


def require_engine(engine: Engine, estimator: Estimator) -> None:
    """Check that the engine can compute this estimator. Raises InvalidParameter as `on_engine` does."""
    if engine not in get_args(Engine):
        raise InvalidParameter(f'engine is "local", "server" or "ray", not {engine!r}')
    result = isinstance(estimator, NNN | CSLS) and estimator.k <= WINDOW
    if engine == "server" and not result:
        raise InvalidParameter(
            f"the server tells biases of NNN and CSLS with k up to {WINDOW:,}, not of {estimator!r}"
        )


def on_engine(
    correction: Correction,
    engine: Engine,
    store: Store,
    bank: BankReference,
    targets: QueryBank | None = None,
) -> Correction:
    """Return the correction with its biases computed by this engine.

    targets: the target bank that the database keeps with the bank. Raises InvalidParameter if the server
    cannot compute the biases: it computes those of NNN and CSLS with a k of at most 16,384, its limit for
    hits. Raises MissingExtra for "ray" if Ray is not installed.
    """
    require_engine(engine, correction.fitted.estimator)
    if engine == "local":
        return correction
    if engine == "ray":
        reduced = None if targets is None else reduced_targets(correction.layout, targets)
        workers = RayBiases(correction.fitted, target_bank=reduced)
        return Spread(correction.layout, correction.fitted, correction.mean_bias, workers=workers)
    return Served(
        correction.layout,
        correction.fitted,
        correction.mean_bias,
        scores=lambda rows, k: capability(store, BankSearch).bank_scores(bank, rows, k),
    )


Banks = Mapping[BankReference, StoredBank]
"""Banks that the caller has read already."""
NONE_READ: Banks = MappingProxyType({})


def load_correction(
    store: Store,
    state: CollectionState,
    profile: Profile,
    engine: Engine = "local",
    banks: Banks = NONE_READ,
    *,
    checked: bool = True,
) -> Correction:
    """Return the correction of a profile, without a read of the gallery: the potentials are stored with the
    bank. checked: as in `load_bank`. Raises as `load_bank` and `on_engine` do."""
    kept = banks.get(profile.bank) or store.load_bank(profile.bank, checked=checked)
    correction = Correction.restore(
        state.layout,
        from_dict(profile.estimator),
        kept.queries,
        kept.potentials,
        target_bank=kept.targets,
        mean_bias=profile.mean_bias,
    )
    return on_engine(correction, engine, store, profile.bank, kept.targets)


def load_corrections(
    store: Store,
    state: CollectionState,
    engine: Engine = "local",
    banks: Banks = NONE_READ,
    *,
    unchecked: Container[str] = (),
) -> dict[int, Correction]:
    """Return the corrections of all profiles and of biases that are being added or removed, by bias slot.
    unchecked: profiles whose bank is used even if it was edited by hand."""
    corrections: dict[int, Correction] = {}
    for name, profile in state.profiles.items():
        correction = load_correction(store, state, profile, engine, banks, checked=name not in unchecked)
        corrections |= {profile.slot: correction, profile.standby: correction}
    if leaving := state.outgoing:
        checked = leaving.name not in unchecked
        corrections[leaving.profile.slot] = load_correction(
            store, state, leaving.profile, engine, banks, checked=checked
        )
    if coming := state.incoming:
        corrections[coming.profile.slot] = load_correction(store, state, coming.profile, engine, banks)
    return corrections
