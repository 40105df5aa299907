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
from milvus_hubness.stores.protocols import Store

Engine = Literal["local", "server", "ray"]
WINDOW = 16_384


@dataclass(frozen=True)
class Served(Correction):
    """As exact as the index that the bank has there. scores: (m, k) of vectors (m, d), falling."""

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
    """workers: (n,) biases of items (n, d) as the layout's metric sees them."""

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
    """Raises InvalidParameter as `on_engine` does."""
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
    """targets: the target bank that the database keeps with the bank. Raises InvalidParameter where the
    server cannot tell the biases: it can those of NNN and CSLS, whose k does not exceed the 16,384 hits that
    it gives at most; and MissingExtra for "ray" where Ray is not installed."""
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
        scores=lambda rows, k: store.bank_scores(bank, rows, k),
    )


Banks = Mapping[BankReference, StoredBank]
"""Those that were read already."""
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
    """Without the gallery: the potentials are kept with the bank. checked: as `load_bank` has it. Raises as
    that and `on_engine` do."""
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
    """By the slot that its biases lie in: every profile's, and those of biases on their way
    in or out. unchecked: profiles whose bank is used as it is, though it was edited by hand."""
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
