"""Top-k means from the nearest lists of a bank, estimated without finding the k.

For any t the mean of the k largest of some scores s is at most t + A(t)/k, where A(t) = Σ max(0, s − t), and
it is that where t is the k-th largest (Rockafellar and Uryasev, Optimization of Conditional Value-at-Risk,
2000, theorem 1); around it the error is of second order. So A is summed up at a few t near the place where
the k-th largest is expected, and taken to fall exponentially between: the least of t + A(t)/k has a closed
form there. The place is told by a row's products with the centres of all lists, and then by the nearest
hundredth of the bank. All rows that look into a list are multiplied with it at once, which is many times
faster than row by row, and nothing is sorted. What the lists left out are short of on average is learned from
a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from milvus_hubness.kernels.operands import Array, import_faiss, multiplies_bfloat16, share_out

ROWS_PER_LIST = 40
TRAINING_POINTS_PER_LIST, ROUNDS = 20, 6
WHOLE_ROWS, WHOLE_COLUMNS, WHOLE_DIM = 64, 16, 32
"""Sizes are rounded up to multiples of these, so that few different products are asked for."""

MOST_AT_ONCE, ROUTED_AT_ONCE = 1 << 24, 1 << 20
"""Products with the centres that are kept as marks, and those that are held as numbers."""

FIRST_SHARE = 0.01
FIRST_STEPS, STEPS = (-1.2, 0.0, 1.2), (-1.0, 1.0)
"""Where A is summed up, in standard deviations of the expected k-th largest from the true one."""

FARTHEST = 2.0
"""Rows whose k-th largest seems to lie so many of the first of these outside are left to the exact kernel."""

FAR = -8.0
SHARPNESS = (1, 2, 4)
LEAST_LEARNED, LEAST_SPREAD = 16, 1e-5


class Look(NamedTuple):
    """Into lists whose centroid lies no farther than `reach` below the place (a score) expected of a row's
    k-th largest. steps: around it, where A is summed up. weights: (4,) of 1, the place found, the width of
    the fall there and the place expected, which give what is looked for."""

    reach: float
    steps: tuple[float, ...]
    weights: torch.Tensor


class Routing(NamedTuple):
    """What was learned of one k. weights: of `_facts`, which tell the k-th largest; apart: the standard
    deviation of that from the true one. first: a look for the place of the k-th largest; last: for the mean.
    """

    k: int
    weights: torch.Tensor
    apart: float
    first: Look
    last: Look


class RoutedBank:
    """Lists of a bank (m, d) float32 by k-means, of about 40 rows each."""

    def __init__(self, bank: torch.Tensor, seed: int) -> None:
        faiss = import_faiss()
        m, d = bank.shape
        count = max(1, m // ROWS_PER_LIST)
        means = faiss.Kmeans(
            d, count, niter=ROUNDS, seed=seed + 1, min_points_per_centroid=1,
            max_points_per_centroid=TRAINING_POINTS_PER_LIST,
        )  # fmt: skip
        rows = bank.numpy()
        means.train(rows)
        own = torch.from_numpy(means.index.search(rows, 1)[1][:, 0])
        self._own, sizes = own, own.bincount(minlength=count)
        self._dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
        self._dim = -(-(d + 3) // WHOLE_DIM) * WHOLE_DIM
        self._lists = []
        for part in torch.split(own.argsort(stable=True), sizes.tolist()):
            wide = torch.zeros(-(-len(part) // WHOLE_COLUMNS) * WHOLE_COLUMNS, self._dim)
            wide[: len(part), :d] = bank[part]
            wide[:, d : d + 2] = 1
            wide[len(part) :, d + 2] = FAR
            self._lists.append(wide.to(self._dtype))
        centroids = torch.zeros(count, d).index_add_(0, own, bank) / sizes.clamp_min(1)[:, None]
        self._centres = centroids.to(self._dtype)
        self._share = sizes / m
        scale = self._centres.float().std(0).norm()
        self._sharpness = 2 / float(scale) if scale > 0 else 1.0

    def routings(
        self, x: torch.Tensor, k: int, nearest: torch.Tensor, shares: Iterable[float]
    ) -> Iterator[tuple[float, Routing]]:
        """Learned from rows x (n, d) whose k largest products are known, `nearest` (n, k): for each share of
        the bank, one with which rows look at so much of it on average."""
        last, means = nearest[:, -1].double(), nearest.mean(1, dtype=torch.float64)
        near = torch.cat([self._near(part) for part in torch.split(x, self._routed_at_once)], 1)
        facts = self._facts(near)
        weights = _fitted(facts, last)
        expected = facts @ weights
        apart = _spread(expected - last)
        nothing = Look(0.0, (), torch.zeros(4, dtype=torch.float64))
        routing = Routing(k, weights, apart, nothing, nothing)
        steps = tuple(step * apart for step in FIRST_STEPS)
        first = Look(self._reach(near, expected, FIRST_SHARE), steps, nothing.weights)
        found, inside = self._look(x, near >= expected - first.reach, expected, first, routing)
        first = first._replace(weights=_fitted(found[inside], last[inside]))
        place = torch.where(inside, found @ first.weights, expected)
        steps = tuple(step * _spread((place - last)[inside]) for step in STEPS)
        for share in shares:
            look = Look(self._reach(near, place, share), steps, nothing.weights)
            found, inside = self._look(x, near >= place - look.reach, place, look, routing)
            if inside.sum() >= LEAST_LEARNED:
                look = look._replace(weights=_fitted(found[inside], means[inside]))
                yield share, routing._replace(first=first, last=look)

    def means(self, x: torch.Tensor, routing: Routing) -> tuple[Array, Array]:
        """(n,) float64 means for rows x (n, d) float32, and (n,) whether they can be believed."""
        threads = torch.get_num_threads()
        most = max(WHOLE_ROWS, MOST_AT_ONCE // len(self._lists))
        size = max(1, min(most, -(-len(x) // threads)))
        found, sure = np.empty(len(x)), np.empty(len(x), np.bool_)

        def work(start: int) -> None:
            part = slice(start, start + size)
            means, inside, _ = self._means(x[part], routing)
            found[part], sure[part] = means.numpy(), inside.numpy()

        share_out(work, iter(range(0, len(x), size)), min(threads, -(-len(x) // size)))
        return found, sure

    def looked_into(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """(n, m) whether a row of x (n, d) looks into the list that a row of the bank is in."""
        return self._means(x, routing)[2].T[:, self._own]

    @property
    def _routed_at_once(self) -> int:
        return max(WHOLE_ROWS, ROUTED_AT_ONCE // len(self._lists))

    def _near(self, x: torch.Tensor) -> torch.Tensor:
        """(lists, n) float32 products of x (n, d) with the centres."""
        return (self._centres @ x.to(self._dtype).T).float()

    def _facts(self, near: torch.Tensor) -> torch.Tensor:
        """(n, p) float64: of the products with the centres (lists, n) mean, spread, largest, soft maxima."""
        share = self._share
        mean = share @ near
        spread = (share @ near.square() - mean.square()).clamp_min(0).sqrt()
        largest = near.amax(0)
        grown = ((near - largest) * self._sharpness).exp_()
        soft = []
        for power in SHARPNESS:
            soft.append(largest + (share @ grown).clamp_min(1e-30).log() / (power * self._sharpness))
            grown.square_()
        facts = [torch.ones_like(mean), mean, spread, largest, *soft, mean * spread, spread.square()]
        return torch.stack(facts, 1).double()

    def _reach(self, near: torch.Tensor, place: torch.Tensor, share: float) -> float:
        """So far that rows with these products and places look at this share of the bank on average."""
        below = (place - near).flatten()
        order = below.argsort()
        looked = (self._share[:, None] / near.shape[1]).expand_as(near).flatten()[order].cumsum(0)
        return float(below[order[min(int(torch.searchsorted(looked, share)), len(order) - 1)]])

    def _means(self, x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(n,) float64 means; (n,) whether they can be believed; (lists, n) which lists were looked into.

        The products with the centres are kept in half precision between the looks."""
        near = torch.empty(len(self._lists), len(x), dtype=self._dtype)
        expected = torch.empty(len(x), dtype=torch.float64)
        for start in range(0, len(x), self._routed_at_once):
            part = slice(start, start + self._routed_at_once)
            own = self._near(x[part])
            expected[part] = self._facts(own) @ routing.weights
            near[:, part] = own
        reached = near >= (expected - routing.first.reach).to(self._dtype)
        found, inside = self._look(x, reached, expected, routing.first, routing)
        place = torch.where(inside, found @ routing.first.weights, expected)
        reached = near >= (place - routing.last.reach).to(self._dtype)
        found, inside = self._look(x, reached, place, routing.last, routing)
        return found @ routing.last.weights, inside, reached

    def _look(
        self, x: torch.Tensor, reached: torch.Tensor, expected: torch.Tensor, look: Look, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, 4) what the weights of a look are for, and (n,) whether the k-th largest lies about there."""
        n, d = x.shape
        at = expected.float()
        rows = torch.zeros(n + 1, self._dim, dtype=self._dtype)
        rows[:n, :d] = x
        rows[:n, d] = -at
        rows[:n, d + 1] = -at - rows[:n, d].float()
        rows[:, d + 2] = 1
        looking = torch.split(reached.nonzero()[:, 1], reached.sum(1).tolist())
        above = torch.zeros(n + 1, len(look.steps))
        for part, wide in zip(looking, self._lists, strict=True):
            if not len(part):
                continue
            padded = torch.nn.functional.pad(part, (0, -len(part) % WHOLE_ROWS), value=n)
            scores = wide @ rows.index_select(0, padded).T
            sums = [(scores - step).relu_().sum(0) for step in look.steps]
            above.index_add_(0, padded, torch.stack(sums, 1).float())
        place, width, inside = _fall(above[:n].double(), look.steps, routing)
        return torch.stack([torch.ones_like(place), expected + place, width, expected], 1), inside


def _fall(
    above: torch.Tensor, steps: tuple[float, ...], routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n,) where t + A(t)/k is least, A at the steps being `above` (n, steps) and falling as exp(−t/width)
    between; (n,) that width; and (n,) whether the place lies near the steps."""
    at = torch.tensor(steps, dtype=torch.float64)
    seen = above > 0
    above = above.clamp_min(1e-30)
    width = (at[1:] - at[:-1]) / (above[:, :-1] / above[:, 1:]).clamp_min(1 + 1e-9).log()
    place = at[:-1] + width * (above[:, :-1] / (routing.k * width)).log()
    which = (place[:, :-1] > at[1:-1]).sum(1, keepdim=True)
    width, place = width.gather(1, which)[:, 0], place.gather(1, which)[:, 0]
    edge = FARTHEST * routing.apart
    inside = seen.gather(1, which + 1)[:, 0] & (place > at[0] - edge) & (place < at[-1] + edge)
    return place, width, inside


def _fitted(facts: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """(p,) weights of facts (n, p) that tell the truth (n,) with the least squared error."""
    weights: torch.Tensor = torch.linalg.lstsq(facts, truth[:, None], driver="gelsd").solution[:, 0]
    return weights


def _spread(errors: torch.Tensor) -> float:
    return max(float(errors.std()), LEAST_SPREAD)
