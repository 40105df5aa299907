"""The rows of a gallery with their biases, stored or computed, as reports take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.bank import BankLike, QueryBank
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.codec.quantisation import with_spread
from milvus_hubness.correction.estimators import Estimator
from milvus_hubness.correction.fitted import Correction, gallery_kinds, grouped
from milvus_hubness.correction.kinds import GalleryKinds
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.choice import Choice, choice_of, default_estimator
from milvus_hubness.jobs.common.gallery import Gallery, only_field, read_gallery
from milvus_hubness.jobs.common.kinds import ChosenKinds, chosen_kinds
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.common.samples import missing_bank
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord
from milvus_hubness.quality.trials import activated_by

Flags = npt.NDArray[np.bool_]

LACKS_TARGETS = (
    "tune chose a method for this bank that needs reference items, which are not stored for %r: the biases "
    "shown are those of the default method"
)
"""What is said where a reader has no reference items."""


@dataclass(frozen=True, eq=False)
class Biased:
    """The rows of a gallery with their biases."""

    gallery: Gallery

    biases: Floats
    """(n,), which searches subtract or, if the collection is not corrected, would subtract."""

    strength: float
    """The factor with which they are subtracted."""

    bank: QueryBank
    """The reference queries, reduced to inner products."""

    activated: Flags | None
    """(n,) whether a gate corrects queries whose best item without biases is this one; None without a gate."""

    kinds: GalleryKinds | None
    """The kinds of the rows, by whose means corrected searches compare; None for none."""

    @property
    def title(self) -> str:
        """The name of the collection, or what the items are called."""
        return self.gallery.title

    @cached_property
    def reduced(self) -> Floats:
        """The rows, reduced to inner products, (n, d)."""
        return self.gallery.layout.reduce_items(self.gallery.vectors)

    @cached_property
    def items(self) -> Floats:
        """The rows for inner products with what `sent` and `raw` return, (n, w)."""
        return self.reduced if self.kinds is None else self.kinds.item_table(self.reduced)

    def raw(self, queries: Floats) -> Floats:
        """Return reduced queries (m, d) as raw searches send them, (m, w)."""
        return queries if self.kinds is None else self.kinds.query_table(queries, 0.0)

    def sent(self, queries: Floats) -> Floats:
        """Return reduced queries (m, d) as corrected searches send them, without biases, (m, w)."""
        return queries if self.kinds is None else self.kinds.query_table(queries)


@dataclass(frozen=True, eq=False)
class BiasedGallery(Biased):
    """The rows of a collection with their biases."""

    info: CollectionInfo

    verdict: TuningRecord | None
    """The verdict of tuning on this bank; None if there is none."""


def read_biased(
    store: Store,
    collection: str,
    recipe: Recipe | BankLike | str | None = None,
    *,
    field: str | None = None,
    gallery: Gallery | None = None,
    progress: Progress = silent,
) -> BiasedGallery:
    """Read the rows of a collection and their biases.

    If it is not corrected, they are those of the recipe, or of a bank alone: by default of the
    choice of tuning, else the default. A corrected one has its own kinds. gallery: its rows, if
    they are read already. Raises as `diagnose` does.
    """
    recipe = Recipe.of(recipe).read(store, collection, field)
    bank = recipe.named_bank
    target_bank = recipe.named_targets
    kind = recipe.kind
    info = store.info(collection)
    gallery = gallery or read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    state = info.state_of(field)
    kinds = None
    if gallery.biases is not None and state is not None:
        profile = state.profile
        if recipe.estimator is not None:
            raise InvalidInput(
                f"{info.name!r} is corrected, and its biases are those of {describe(profile.estimator)}: "
                "leave out the method (--method, --param)"
            )
        biases = gallery.biases
        kinds = _kinds_in_use(info, state, gallery, kind)
        strength = profile.strength
        activated = None
        # The bank is many rows to load: only if something in it is needed.
        if bank is None or profile.gate is not None:
            stored = store.load_bank(profile.bank)
            bank = bank or stored.queries
            if profile.gate is not None:
                activated = np.array([key in stored.activated for key in gallery.keys])
    elif bank is None:
        where_from = missing_bank(store, info.name, field)
        raise InvalidInput(f"{info.name!r} is not corrected: {where_from}")
    else:
        searched = field or only_field(info)
        kinds, _ = kinds_to_try(store, info, searched, gallery, recipe)
        source = kinds.kinds.rule.source if kinds is not None else ""
        verdict = info.verdicts.of(searched, bank.fingerprint, source)
        # As jobs follow the verdict.
        default = Choice(default_estimator(by_kind=kinds is not None))
        choice = choice_of(Recipe(bank, estimator=recipe.estimator), verdict, default)
        if recipe.estimator is None and target_bank is None and choice.estimator.needs_target_bank:
            log.warning(LACKS_TARGETS, info.name)
            choice = default
        strength = choice.strength
        biases, activated = computed_biases(
            gallery, bank, target_bank, choice.estimator, choice.gate, kinds
        )

    bank.expect_dim(layout.dim, "the field")
    reduced = replace(bank, vectors=layout.reduce_queries(bank.vectors))
    source = kinds.kinds.rule.source if kinds is not None else ""
    verdict = info.verdicts.of(field or only_field(info), bank.fingerprint, source)
    return BiasedGallery(gallery, biases, strength, reduced, activated, kinds, info, verdict)


def _kinds_in_use(
    info: CollectionInfo, state: CollectionState, gallery: Gallery, kind: str | None
) -> GalleryKinds | None:
    """Return the kinds of a corrected collection. kind: what the caller names. Raises InvalidInput."""
    if kind is not None and kind != state.kind:
        present = f"with the kinds of {state.kind!r}" if state.kind else "without kinds"
        raise InvalidInput(
            f"{info.name!r} is corrected {present}: leave --kind out, or migrate it with other kinds"
        )
    kinds = state.kinds_of(state.profile)
    if kinds is None:
        return None
    return GalleryKinds(kinds, kinds.rule.numbers_of(gallery.vectors, gallery.items))


def kinds_to_try(
    store: Store, info: CollectionInfo, field: str, gallery: Gallery, recipe: Recipe
) -> tuple[GalleryKinds | None, tuple[str, ...]]:
    """Return the kinds that a recipe names, as a migration would choose them, with remarks.

    recipe: with its bank. Raises as `plan_correction` does.
    """
    request = recipe.kind_request
    if request.name is None:
        return None, ()
    bank = recipe.required_bank(info.name)
    layout = gallery.layout
    spread = store.column_needs(info, field).spread
    request.expect_possible(with_spread(replace(layout, kinds=None), spread), field)
    state = info.states.get(field)
    if state is not None and state.kind == request.name:
        chosen = ChosenKinds(state.kinds)
    else:
        hidden = frozenset(
            name for other in info.states.values() for name in other.codec.hidden_fields
        )
        chosen = chosen_kinds(store, info, request, layout, gallery.vectors, bank, hidden=hidden)
    if chosen.rule is None:
        return None, chosen.remarks
    numbers = chosen.rule.numbers_of(gallery.vectors, gallery.items)
    # As a job measures them: near copies of a query count once.
    bank = grouped(layout, bank, gallery.vectors)
    kinds = gallery_kinds(layout, chosen.rule, gallery.vectors, numbers, bank)
    return kinds, chosen.remarks


def computed_biases(
    gallery: Gallery,
    bank: QueryBank,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    gate: int | None,
    kinds: GalleryKinds | None,
) -> tuple[Floats, Flags | None]:
    """Return the biases (n,) that a migration with this bank would write, with mean 0.

    estimator: by default that of jobs. The second value is (n,) which items the gate activates; None
    without one.
    """
    layout = gallery.layout
    numbers = None if kinds is None else kinds.numbers
    default = default_estimator(by_kind=kinds is not None)
    correction = Correction.fit(
        layout,
        estimator or default,
        grouped(layout, bank, gallery.vectors),
        gallery=gallery.vectors,
        target_bank=target_bank,
        kinds=None if kinds is None else kinds.kinds,
        gallery_kinds=numbers,
    )
    items = correction.items_of(gallery.vectors, numbers)
    activated = activated_by(gate, correction.fitted.bank.vectors, items)
    biases = correction.centred(gallery.vectors, kinds=numbers)
    return biases - np.float32(biases.mean()), activated
