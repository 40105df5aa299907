"""Top-k means from the nearest lists of a bank, estimated without finding the k.

For any t the mean of the k largest of some scores s is at most t + A(t)/k, where A(t) = Σ max(0, s − t), with
equality if t is the k-th largest (Rockafellar and Uryasev, Optimization of Conditional Value-at-Risk, 2000,
theorem 1); around it the error is of second order. So A is summed at a few t near the expected k-th largest
score, and assumed to fall exponentially between them: the minimum of t + A(t)/k then has a closed form. The expected
score comes from a row's products with the centroids of all lists, then from the nearest hundredth of the bank. The mean
effect of the lists that are left out is learned from a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from milvus_hubness.kernels.operands import share_out
from milvus_hubness.kernels.primitives import POLICY, Array, import_faiss, multiplies_bfloat16

ROWS_PER_LIST = 40
TRAINING_POINTS_PER_LIST, ROUNDS = 20, 6
WHOLE_ROWS, WHOLE_COLUMNS, WHOLE_DIM = 64, 16, 32
"""Sizes are rounded up to multiples of these, so that products have few different shapes."""
FIRST_SHARE = 0.01
FIRST_STEPS, STEPS = (-1.2, 0.0, 1.2), (-1.0, 1.0)
"""Points at which A is summed, relative to the expected k-th largest score, in standard deviations of its error."""
FARTHEST = 2.0
"""How many of these the estimated k-th largest score may be outside the points; other rows use the exact kernel."""
FAR = -8.0
SHARPNESS = (1, 2, 4)
LEAST_LEARNED, LEAST_SPREAD = 16, 1e-5


class Pass(NamedTuple):
    """One pass over the lists whose centroid scores at most `reach` below the expected k-th largest of a row.

    steps: points around that score at which A is summed. weights: (4,) of 1, the estimated score, the width of its fall
    and the expected score; together they give the result.
    """

    reach: float
    steps: tuple[float, ...]
    weights: torch.Tensor


class Routing(NamedTuple):
    """The routing learned for one k.

    weights: of `_features`, which predict the k-th largest score; apart: the standard deviation of the prediction's
    error. first: the pass that estimates the k-th largest score; last: the pass for the mean.
    """

    k: int
    weights: torch.Tensor
    apart: float
    first: Pass
    last: Pass


class RoutedBank:
    """Lists of a bank (m, d) float32 by k-means, of about 40 rows each. dtype: of the lists, None for the fastest."""

    def __init__(self, bank: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        faiss = import_faiss()
        m, d = bank.shape
        count = max(1, m // ROWS_PER_LIST)
        means = faiss.Kmeans(
            d, count, niter=ROUNDS, seed=1, min_points_per_centroid=1,
            max_points_per_centroid=TRAINING_POINTS_PER_LIST,
        )  # fmt: skip
        rows = bank.numpy()
        means.train(rows)
        own = torch.from_numpy(means.index.search(rows, 1)[1][:, 0])
        self._own, sizes = own, own.bincount(minlength=count)
        self._dtype = dtype or (torch.bfloat16 if multiplies_bfloat16() else torch.float32)
        self._dim = -(-(d + 3) // WHOLE_DIM) * WHOLE_DIM
        self._lists = []
        for part in torch.split(own.argsort(stable=True), sizes.tolist()):
            wide = torch.zeros(-(-len(part) // WHOLE_COLUMNS) * WHOLE_COLUMNS, self._dim)
            wide[: len(part), :d] = bank[part]
            wide[:, d : d + 2] = 1
            wide[len(part) :, d + 2] = FAR
            self._lists.append(wide.to(self._dtype))
        centroids = torch.zeros(count, d).index_add_(0, own, bank) / sizes.clamp_min(1)[:, None]
        self._centroids = centroids.to(self._dtype)
        self._share = sizes / m
        scale = self._centroids.float().std(0).norm()
        self._sharpness = 2 / float(scale) if scale > 0 else 1.0

    def routings(
        self, x: torch.Tensor, k: int, nearest: torch.Tensor, shares: Iterable[float]
    ) -> Iterator[tuple[float, Routing]]:
        """Yield a routing for each share of the bank that rows read on average. It is learned from rows x (n, d) with
        their k largest products, `nearest` (n, k)."""
        last, means = nearest[:, -1].double(), nearest.mean(1, dtype=torch.float64)
        near = torch.cat([self._near(part) for part in torch.split(x, self._routed_at_once)], 1)
        features = self._features(near)
        weights = _fitted(features, last)
        expected = features @ weights
        apart = _spread(expected - last)
        nothing = Pass(0.0, (), torch.zeros(4, dtype=torch.float64))
        routing = Routing(k, weights, apart, nothing, nothing)
        steps = tuple(step * apart for step in FIRST_STEPS)
        first = Pass(self._reach(near, expected, FIRST_SHARE), steps, nothing.weights)
        sums, inside = self._sums(x, near >= expected - first.reach, expected, first, routing)
        first = first._replace(weights=_fitted(sums[inside], last[inside]))
        place = torch.where(inside, sums @ first.weights, expected)
        steps = tuple(step * _spread((place - last)[inside]) for step in STEPS)
        for share in shares:
            step = Pass(self._reach(near, place, share), steps, nothing.weights)
            sums, inside = self._sums(x, near >= place - step.reach, place, step, routing)
            if inside.sum() >= LEAST_LEARNED:
                step = step._replace(weights=_fitted(sums[inside], means[inside]))
                yield share, routing._replace(first=first, last=step)

    def means(self, x: torch.Tensor, routing: Routing) -> tuple[Array, Array]:
        """Return means for rows x (n, d) float32, float64 (n,), and whether they are reliable, (n,)."""
        threads = torch.get_num_threads()
        most = max(WHOLE_ROWS, POLICY.get().tile_size_of("centroids") // len(self._lists))
        size = max(1, min(most, -(-len(x) // threads)))
        values, sure = np.empty(len(x)), np.empty(len(x), np.bool_)

        def work(start: int) -> None:
            part = slice(start, start + size)
            means, inside, _ = self._means(x[part], routing)
            values[part], sure[part] = means.numpy(), inside.numpy()

        share_out(work, iter(range(0, len(x), size)), min(threads, -(-len(x) // size)))
        return values, sure

    def reads(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return whether a row of x (n, d) reads the list of a row of the bank, (n, m)."""
        return self._means(x, routing)[2].T[:, self._own]

    def recall(self, x: torch.Tensor, routing: Routing, nearest: torch.Tensor) -> float:
        """Return the share of the nearest rows (n, k) of the bank whose lists the rows x (n, d) read."""
        return float(self.reads(x, routing).gather(1, nearest).float().mean())

    @property
    def _routed_at_once(self) -> int:
        return max(WHOLE_ROWS, POLICY.get().tile_size_of("centroids") // 16 // len(self._lists))

    def _near(self, x: torch.Tensor) -> torch.Tensor:
        """Return products of x (n, d) with the centroids, float32 (lists, n)."""
        return (self._centroids @ x.to(self._dtype).T).float()

    def _features(self, near: torch.Tensor) -> torch.Tensor:
        """Return mean, spread, largest and soft maxima of products with the centroids (lists, n), float64 (n, p)."""
        share = self._share
        mean = share @ near
        spread = (share @ near.square() - mean.square()).clamp_min(0).sqrt()
        largest = near.amax(0)
        grown = ((near - largest) * self._sharpness).exp_()
        soft = []
        for power in SHARPNESS:
            soft.append(largest + (share @ grown).clamp_min(1e-30).log() / (power * self._sharpness))
            grown.square_()
        features = [torch.ones_like(mean), mean, spread, largest, *soft, mean * spread, spread.square()]
        return torch.stack(features, 1).double()

    def _reach(self, near: torch.Tensor, place: torch.Tensor, share: float) -> float:
        """Return the reach at which rows with these products and expected scores read this share of the bank."""
        below = (place - near).flatten()
        order = below.argsort()
        read = (self._share[:, None] / near.shape[1]).expand_as(near).flatten()[order].cumsum(0)
        return float(below[order[min(int(torch.searchsorted(read, share)), len(order) - 1)]])

    def _means(self, x: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return means, float64 (n,); whether they are reliable, (n,); and which lists were read, (lists, n)."""
        near = torch.empty(len(self._lists), len(x), dtype=self._dtype)
        expected = torch.empty(len(x), dtype=torch.float64)
        for start in range(0, len(x), self._routed_at_once):
            part = slice(start, start + self._routed_at_once)
            own = self._near(x[part])
            expected[part] = self._features(own) @ routing.weights
            near[:, part] = own
        reached = near >= (expected - routing.first.reach).to(self._dtype)
        sums, inside = self._sums(x, reached, expected, routing.first, routing)
        place = torch.where(inside, sums @ routing.first.weights, expected)
        reached = near >= (place - routing.last.reach).to(self._dtype)
        sums, inside = self._sums(x, reached, place, routing.last, routing)
        return sums @ routing.last.weights, inside, reached

    def _sums(
        self, x: torch.Tensor, reached: torch.Tensor, expected: torch.Tensor, step: Pass, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pass's weight factors, (n, 4), and whether the k-th largest score is near the steps, (n,)."""
        n, d = x.shape
        at = expected.float()
        rows = torch.zeros(n + 1, self._dim, dtype=self._dtype)
        rows[:n, :d] = x
        rows[:n, d] = -at
        rows[:n, d + 1] = -at - rows[:n, d].float()
        rows[:, d + 2] = 1
        readers = torch.split(reached.nonzero()[:, 1], reached.sum(1).tolist())
        above = torch.zeros(n + 1, len(step.steps))
        for part, wide in zip(readers, self._lists, strict=True):
            if not len(part):
                continue
            padded = torch.nn.functional.pad(part, (0, -len(part) % WHOLE_ROWS), value=n)
            scores = wide @ rows.index_select(0, padded).T
            sums = [(scores - point).relu_().sum(0) for point in step.steps]
            above.index_add_(0, padded, torch.stack(sums, 1).float())
        place, width, inside = _fall(above[:n].double(), step.steps, routing)
        return torch.stack([torch.ones_like(place), expected + place, width, expected], 1), inside


def _fall(
    above: torch.Tensor, steps: tuple[float, ...], routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where t + A(t)/k is least, the width of the fall at that place, and whether it is near the steps, (n,). A
    is `above` (n, steps) at the steps and falls as exp(−t/width) between them."""
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


def _fitted(features: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return weights (p,) of features (n, p) that predict the truth (n,) with the least squared error."""
    weights: torch.Tensor = torch.linalg.lstsq(features, truth[:, None], driver="gelsd").solution[:, 0]
    return weights


def _spread(errors: torch.Tensor) -> float:
    return max(float(errors.std()), LEAST_SPREAD)
