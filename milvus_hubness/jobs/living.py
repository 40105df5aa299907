"""Banks that live: live queries, sampled by clients, taken into the bank that biases come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from milvus_hubness.banks import Origins, QueryBank
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.operations.lease import leasing
from milvus_hubness.reservoir import Terms, merge
from milvus_hubness.state import CollectionState, Living, require_state
from milvus_hubness.stores.base import CollectionInfo, Store, StoredBank

DEFAULT_RATE = 0.01
DEFAULT_SEED_SHARE = 0.25
DEFAULT_HALF_LIFE = 7 * 86_400.0
DEFAULT_DUPLICATE_COSINE = 0.99


@dataclass(frozen=True)
class LivingStatus:
    """living: the terms. seed, live: how many queries of the bank it began with, and how many were sampled.
    waiting: samples not yet taken in."""

    living: Living
    seed: int
    live: int
    waiting: int

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return {**asdict(self), "living": self.living.model_dump()}


@dataclass(frozen=True, eq=False)
class Absorbed:
    """What the samples of live queries make of a bank.

    bank: the new one, None where nothing changed. traffic, samples: the collection and the numbers of all
    samples that were looked at. seed, live: of the bank as it then is, the queries it began with and those
    that were sampled. taken, duplicates, dropped: samples that come in, that are like one the bank holds, and
    that lose the draw.
    """

    bank: QueryBank | None
    traffic: str
    samples: tuple[int, ...]
    seed: int
    live: int
    taken: int
    duplicates: int
    dropped: int


def start_living(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    rate: float | None = None,
    size: int | None = None,
    seed_share: float | None = None,
    half_life_seconds: float | None = None,
    duplicate_cosine: float | None = None,
) -> LivingStatus:
    """Have clients sample the profile's queries for its bank, or do so on other terms.

    field, profile: as `refresh` has them. rate, size and so on: of `Living`; without them as they are, at
    first 0.01, the bank's own size, 0.25, a week and 0.99. Raises NotCorrected, InvalidInput,
    InvalidParameter, and CollectionExists where the name <collection>__traffic is taken.
    """
    given = {
        "rate": rate,
        "size": size,
        "seed_share": seed_share,
        "half_life_seconds": half_life_seconds,
        "duplicate_cosine": duplicate_cosine,
    }
    with leasing(store, collection) as (lease, _):
        store = lease.store
        return _started(store, *_found(store, collection, field, profile), given)


def _started(
    store: Store, info: CollectionInfo, state: CollectionState, name: str, given: dict[str, Any]
) -> LivingStatus:
    before = info.living_of(state.field, name)
    terms = _defaults(state, name) if before is None else before.model_dump()
    terms |= {option: value for option, value in given.items() if value is not None}
    _check(terms)
    living = Living(
        field=state.field,
        profile=name,
        traffic=before.traffic if before else f"{info.name}__traffic{state.suffix}",
        **{option: terms[option] for option in given},
    )
    store.create_traffic(living.traffic, state.dim)
    store.write_living(info.name, [*_others(info, living), living])
    return _status(store, state, living)


def stop_living(
    store: Store, collection: str, *, field: str | None = None, profile: str | None = None
) -> Living | None:
    """Have clients sample no more of the profile's queries; those that wait are dropped, those that the bank
    holds stay. The terms it lived on, None where it did not. Raises NotCorrected, InvalidInput."""
    with leasing(store, collection) as (lease, _):
        return _stopped(lease.store, *_found(lease.store, collection, field, profile))


def _stopped(store: Store, info: CollectionInfo, state: CollectionState, name: str) -> Living | None:
    living = info.living_of(state.field, name)
    if living is None:
        return None
    others = _others(info, living)
    store.write_living(info.name, others)
    if any(each.traffic == living.traffic for each in others):
        store.drop_samples(living.traffic, store.read_traffic(living.traffic, name).origins.numbers.tolist())
    elif store.exists(living.traffic):
        store.drop(living.traffic)
    return living


def living(store: Store, collection: str) -> list[LivingStatus]:
    """The collection's banks that live. Raises CollectionNotFound."""
    info = store.info(collection)
    return [
        _status(store, info.states[each.field], each)
        for each in info.living
        if each.field in info.states and each.profile in info.states[each.field].profiles
    ]


def absorbed(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    seed: int = 0,
) -> Absorbed | None:
    """What the samples make of the profile's bank, see `reservoir.merge`; None where it does not live.

    Nothing is written: give `bank` to a refresh, and what is returned to `settled` once that is done. Looked
    at again before that, after a crash for one, the same samples change nothing twice. seed: of the draws,
    the same at every call. Raises NotCorrected, InvalidInput, DimensionMismatch.
    """
    info, state, name = _found(store, collection, field, profile)
    living = info.living_of(state.field, name)
    if living is None:
        return None
    stored = store.load_bank(state.profiles[name].bank, checked=False)
    traffic = store.read_traffic(living.traffic, name)
    origins = origins_of(stored)
    if not len(traffic.origins):
        seeds = int(origins.are_seeds.sum())
        return Absorbed(None, living.traffic, (), seeds, len(origins) - seeds, 0, 0, 0)
    stored.queries.expect_dim(traffic.vectors.shape[1], f"a sample in {living.traffic!r}")
    merged = merge(stored.queries, origins, traffic.vectors, traffic.origins, terms_of(living, seed))
    now = origins if merged.bank is None else merged.bank.origins or origins
    seeds = int(now.are_seeds.sum())
    return Absorbed(
        bank=merged.bank,
        traffic=living.traffic,
        samples=tuple(traffic.origins.numbers.tolist()),
        seed=seeds,
        live=len(now) - seeds,
        taken=merged.taken,
        duplicates=merged.duplicates,
        dropped=merged.lost,
    )


def terms_of(living: Living, seed: int) -> Terms:
    """As `reservoir` has them."""
    return Terms(living.size, living.seed_share, living.half_life_seconds, living.duplicate_cosine, seed)


def origins_of(bank: StoredBank) -> Origins:
    """Where its queries came from; a bank that does not say began with all of them."""
    return bank.queries.origins or Origins.seeds(len(bank.queries), 0)


def settled(store: Store, done: Absorbed) -> None:
    """Drop the samples that were looked at; to be called once searches read the biases of the new bank, or
    where there is none."""
    store.drop_samples(done.traffic, done.samples)


def _found(
    store: Store, collection: str, field: str | None, profile: str | None
) -> tuple[CollectionInfo, CollectionState, str]:
    info = store.info(collection)
    state = require_state(info.state_of(field), info.name)
    state.profile_of(profile)
    return info, state, profile or state.active


def _others(info: CollectionInfo, living: Living) -> list[Living]:
    own = (living.field, living.profile)
    return [each for each in info.living if (each.field, each.profile) != own]


def _status(store: Store, state: CollectionState, living: Living) -> LivingStatus:
    origins = origins_of(store.load_bank(state.profiles[living.profile].bank, checked=False))
    seeds = int(origins.are_seeds.sum())
    waiting = len(store.read_traffic(living.traffic, living.profile).origins)
    return LivingStatus(living, seeds, len(origins) - seeds, waiting)


def _defaults(state: CollectionState, profile: str) -> dict[str, Any]:
    return {
        "rate": DEFAULT_RATE,
        "size": state.profiles[profile].bank.count,
        "seed_share": DEFAULT_SEED_SHARE,
        "half_life_seconds": DEFAULT_HALF_LIFE,
        "duplicate_cosine": DEFAULT_DUPLICATE_COSINE,
    }


def _check(terms: dict[str, Any]) -> None:
    """Raises InvalidParameter."""
    wanted = {
        "rate": (
            0 < terms["rate"] <= 1,
            "a share above 0 and up to 1; to sample none, let the bank live no more",
        ),
        "size": (terms["size"] >= 1, "a number of queries from 1 up"),
        "seed_share": (0 <= terms["seed_share"] <= 1, "a share from 0 to 1"),
        "half_life_seconds": (0 < terms["half_life_seconds"] < float("inf"), "a number of seconds above 0"),
        "duplicate_cosine": (0 < terms["duplicate_cosine"] <= 1, "a cosine above 0 and up to 1"),
    }
    for name, (holds, what) in wanted.items():
        if not holds:
            raise InvalidParameter(f"{name} is {what}, got {terms[name]}")
