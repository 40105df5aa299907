"""The training of a QuARI network (Xing et al., 2025, section 3 and implementation details)."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.kernels.policy import resolve_device
from milvus_hubness.errors import DimensionMismatch, InvalidInput, NonFiniteVectors
from milvus_hubness.extras.quari.checkpoint import (
    Checkpoint,
    Epoch,
    restore_training,
    training_state,
    weights_of,
)
from milvus_hubness.extras.quari.model import STRENGTHS, TEMPERATURES, Quari, cosines
from milvus_hubness.extras.quari.pairs import Pairs, mine
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings


def contrastive_loss(
    cosines: torch.Tensor, items: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss of a batch, a scalar.

    cosines (m, m·(1+s)): of each query with the batch's answers, then with their semi-positives,
    those of answer 0 first. items (m, 1+s): gallery numbers of each query's answer and
    semi-positives. weights (m, s): of the semi-positives. With ω = 1 for an answer and its weight
    for a semi-positive,

        queries → items   mean over queries i of  −Σ_j ω_j log softmax_j(cos_ij / τ) / Σ_j ω_j,  j of i's own
        items → queries   mean over items j, weighted by ω_j, of  −log softmax_i(cos_ij / τ) at j's own query

    and the loss is the mean of both. The paper leaves two details open: here semi-positives count
    in both directions, and an item that occurs twice in a batch is no wrong answer to a query of
    which it is a right one.
    """
    count, own = items.shape
    columns = torch.cat([items[:, 0], items[:, 1:].reshape(-1)])
    owner = torch.arange(count, device=items.device)
    owners = torch.cat([owner, owner.repeat_interleave(own - 1)])
    is_own = owners == owner[:, None]
    is_right = (columns[None, :, None] == items[:, None, :]).any(2)
    logits = (cosines / temperature).masked_fill(is_right & ~is_own, -torch.inf)
    pairs = owners, torch.arange(len(columns), device=items.device)
    share = torch.cat([weights.new_ones(count), weights.reshape(-1)])
    total = share.new_zeros(count).index_add(0, owners, share)
    forward = -(functional.log_softmax(logits, 1)[pairs] * share / total[owners]).sum() / count
    backward = -(functional.log_softmax(logits, 0)[pairs] * share).sum() / share.sum()

    return (forward + backward) / 2


def published_loss(
    cosines: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss of their network by the authors (the paper's equation 10), a scalar;
    arguments as in `contrastive_loss`.

        queries → items   mean over i of −Σ_j ω_j log softmax_j(cos_ij / τ), not divided by Σ_j ω_j, where the softmax
                          is over the answers of the batch and i's own semi-positives
        items → queries   mean over answers j of −log softmax_i(cos_ij / τ) at j's own query, without semi-positives

    In the authors' code q_i sees the answers of other queries by these queries' maps; here by its
    own, as in a search.
    """
    count = len(cosines)
    own = torch.arange(count, device=cosines.device)
    semi_positives = cosines[:, count:].view(count, count, weights.shape[1])[own, own]
    shares = functional.log_softmax(
        torch.cat([cosines[:, :count], semi_positives], 1) / temperature, 1
    )
    forward = -(shares[own, own] + (weights * shares[:, count:]).sum(1)).mean()
    return (forward + functional.cross_entropy(cosines[:, :count].T / temperature, own)) / 2


VALIDATION_SHARE = 0.1
QUERIES_AT_ONCE = 64


def train(
    pairs: Pairs,
    config: QuariConfig,
    settings: TrainingSettings,
    *,
    validation: Pairs | None = None,
    path: str | os.PathLike[str] | None = None,
    resume: bool = False,
    encoder: str | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Checkpoint:
    """Train linear maps or a network on these pairs; return the weights of the epoch with the best
    validation MRR.

    Without validation a tenth of the items, with their queries, is held out. Epoch 0 is the network
    before its first step: it wins if no epoch is better. path: the file, saved after every epoch,
    so that an interrupted training continues with `resume`, on the CPU with identical bits.
    encoder: a name for the encoder of the vectors, compared when the file is loaded.

    Equal pairs, settings and seed give equal weights on the CPU of one machine with the same number
    of threads. Noise on queries follows the paper, u·N(0, 1) with u from U[0, 1] for each query. A
    last batch with fewer pairs is left out, unless it is the only one; every epoch draws another
    order.

    The memory of linear maps is filled in one more epoch, for the best maps, with pairs drawn by
    the seed, and with the strength and temperature that are best on the validation pairs.

    Raises DimensionMismatch, BankTooSmall; with `resume` UnreadableFile, and InvalidInput if the
    file has other pairs, sizes or settings; NonFiniteVectors if the loss is not finite.
    """
    if validation is None:
        pairs, validation = pairs.split(VALIDATION_SHARE, settings.seed)

    config = replace(config, memory=min(config.memory, len(pairs)))
    for dim in (pairs.dim, validation.dim):
        if dim != config.dim:
            raise DimensionMismatch(
                f"the pairs have dimension {dim}, the network is for {config.dim}"
            )

    fingerprint = f"{pairs.fingerprint}/{validation.fingerprint}"
    checkpoint = Checkpoint(config, settings, encoder, fingerprint, len(pairs))
    if resume:
        if path is None:
            raise InvalidInput("resume needs the file of the training: pass its path")
        earlier = Checkpoint.load(path)
        _expect_same(earlier, checkpoint)
        checkpoint = earlier

    target = resolve_device(device)
    with torch.random.fork_rng([target] if target.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        run = _Run(checkpoint, pairs, validation, target)
        if not resume:
            run.judge(None)

        while not run.is_over:
            run.judge(run.epoch(progress))
            if path is not None:
                run.resumable().save(path)

        return run.resumable()


def validate(network: Quari, pairs: Pairs) -> npt.NDArray[np.int64]:
    """Return (n,) the rank, from 1, of each query's answer by cos(q', T r), after items with the
    same score. The network is left in evaluation mode.
    """
    device = next(network.parameters()).device
    gallery = torch.from_numpy(pairs.gallery).to(device)
    network.eval()
    ranks = np.empty(len(pairs), np.int64)

    with torch.inference_mode():
        for start in range(0, len(pairs), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            scores = cosines(network(torch.from_numpy(pairs.queries[part]).to(device)), gallery)
            answers = torch.from_numpy(pairs.answers[part]).to(device)
            ranks[part] = (scores >= scores.gather(1, answers[:, None])).sum(1).cpu().numpy()

    return ranks


class _Run:
    """A training in progress. checkpoint: its record, with the best weights so far."""

    def __init__(
        self, checkpoint: Checkpoint, pairs: Pairs, validation: Pairs, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.validation = validation
        self.device = device
        self.settings = settings = checkpoint.settings
        self.queries = torch.from_numpy(pairs.queries)
        self.gallery = torch.from_numpy(pairs.gallery).to(device)
        self.answers = torch.from_numpy(pairs.answers)
        self.semi_items, self.semi_weights = map(
            torch.from_numpy, mine(pairs.gallery, settings, str(device))
        )
        self.network = Quari(checkpoint.config).to(device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.batch = min(settings.batch, len(pairs))
        self.steps_per_epoch = len(pairs) // self.batch
        if checkpoint.resumption is not None:
            restore_training(checkpoint.resumption, self.network, self.optimizer, device)

    @property
    def done(self) -> int:
        """The number of finished epochs."""
        return self.checkpoint.history[-1].epoch

    @property
    def has_learned(self) -> bool:
        since = self.done - self.checkpoint.best_epoch
        return self.done >= self.settings.epochs or since >= self.settings.patience

    @property
    def is_over(self) -> bool:
        has_memory = self.done > 0 and self.checkpoint.history[-1].loss is None
        return has_memory or (self.has_learned and not self.checkpoint.config.memory)

    def epoch(self, progress: Progress) -> float | None:
        """Run one pass over the pairs; return the mean loss of its steps.

        After the last one, fill the memory.
        """
        if self.has_learned:
            self._fill_memory()
            return None

        settings = self.settings
        losses = []
        self.network.train()
        order = torch.randperm(len(self.queries))

        for number in range(self.steps_per_epoch):
            step = self.done * self.steps_per_epoch + number
            for group in self.optimizer.param_groups:
                group["lr"] = settings.rate(step, self.steps_per_epoch)

            losses.append(self._step(order[number * self.batch : (number + 1) * self.batch]))
            progress("training", step + 1, self.steps_per_epoch * settings.epochs)

        return float(np.mean(losses))

    def _fill_memory(self) -> None:
        self.network.load_state_dict(dict(self.checkpoint.weights))
        drawn = np.random.default_rng(self.settings.seed).permutation(len(self.queries))
        chosen = torch.from_numpy(drawn[: self.checkpoint.config.memory])
        with torch.inference_mode():
            items = self.gallery[self.answers[chosen].to(self.device)]
            self.network.remember(self.queries[chosen].to(self.device), items)

        best = self.checkpoint.history[self.checkpoint.best_epoch].mrr
        recall = (0.0, 1.0)
        for tried in itertools.product(STRENGTHS, TEMPERATURES):
            self.network.memory.tune(*tried)
            mrr = float((1 / validate(self.network, self.validation)).mean())
            if mrr > best:
                best = mrr
                recall = tried

        self.network.memory.tune(*recall)

    def _step(self, batch: torch.Tensor) -> float:
        settings = self.settings
        device = self.device
        is_published = self.checkpoint.config.form == "published"
        queries = self.queries[batch]
        spread = settings.noise if is_published else settings.noise / math.sqrt(queries.shape[1])
        queries = (queries + spread * torch.rand(len(batch), 1) * torch.randn(queries.shape)).to(
            device
        )
        answers = self.answers[batch]
        items = torch.cat([answers[:, None], self.semi_items[answers]], 1).to(device)
        weights = self.semi_weights[answers].to(device)
        columns = torch.cat([items[:, 0], items[:, 1:].reshape(-1)])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            adaptation = self.network(queries)

        full = adaptation._replace(
            query=adaptation.query.float(), U=adaptation.U.float(), V=adaptation.V.float()
        )
        scores = cosines(full, self.gallery[columns])
        if is_published:
            loss = published_loss(scores, weights, settings.temperature)
        else:
            loss = contrastive_loss(scores, items, weights, settings.temperature)

        if not torch.isfinite(loss):
            raise NonFiniteVectors("the loss is no longer finite: train with a lower learning_rate")

        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

        return float(loss.detach())

    def judge(self, loss: float | None) -> Epoch:
        """Evaluate the network, and save its weights if it is the best so far."""
        ranks = validate(self.network, self.validation)
        history = self.checkpoint.history
        epoch = Epoch(
            len(history), loss, r1=float((ranks == 1).mean()), mrr=float((1 / ranks).mean())
        )
        self.checkpoint = replace(self.checkpoint, history=(*history, epoch))
        if self.checkpoint.best_epoch == epoch.epoch:
            self.checkpoint = replace(self.checkpoint, weights=weights_of(self.network))

        return epoch

    def resumable(self) -> Checkpoint:
        return replace(
            self.checkpoint, resumption=training_state(self.network, self.optimizer, self.device)
        )


def _expect_same(earlier: Checkpoint, now: Checkpoint) -> None:
    options, others = (
        {
            "pairs": run.trained_on,
            "encoder": run.encoder,
            **asdict(run.config),
            **asdict(run.settings),
        }
        for run in (earlier, now)
    )
    if changed := [name for name in options if options[name] != others[name]]:
        raise InvalidInput(
            f"the training was started with other {', '.join(changed)}: pass the same to resume it"
        )
    if earlier.resumption is None:
        raise InvalidInput("the file has only a finished network: train again without resume")
