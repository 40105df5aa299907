"""The training of a QuARI network (Xing et al., 2025, section 3 and implementation details)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from milvus_hubness.errors import DimensionMismatch, InvalidInput, InvalidParameter, NonFiniteVectors
from milvus_hubness.kernels.primitives import resolve_device
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.quari.checkpoint import Checkpoint, Epoch, restore_training, training_state, weights_of
from milvus_hubness.quari.model import STRENGTHS, TEMPERATURES, Adaptation, Memory, Quari, cosines
from milvus_hubness.quari.pairs import Pairs, mine
from milvus_hubness.quari.settings import QuariConfig, TrainingSettings


def contrastive_loss(
    cosines: torch.Tensor, items: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the loss of a batch, a scalar.

    cosines (m, m·(1+s)): of each query with the batch's answers, then with their semi-positives, those of
    answer 0 first. items (m, 1+s): gallery numbers of each query's answer and semi-positives. weights (m, s):
    of the semi-positives. With ω = 1 for an answer and its weight for a semi-positive,

        queries → items   mean over queries i of  −Σ_j ω_j log softmax_j(cos_ij / τ) / Σ_j ω_j,  j of i's own
        items → queries   mean over items j, weighted by ω_j, of  −log softmax_i(cos_ij / τ) at j's own query

    and the loss is the mean of both. The paper leaves two details open: here semi-positives count in both directions,
    and an item that occurs twice in a batch is no wrong answer to a query of which it is a right one.
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


def published_loss(cosines: torch.Tensor, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the authors' loss of a batch (the paper's equation 10), a scalar; arguments as in `contrastive_loss`.

        queries → items   mean over i of −Σ_j ω_j log softmax_j(cos_ij / τ), not divided by Σ_j ω_j, where the softmax
                          is over the answers of the batch and i's own semi-positives
        items → queries   mean over answers j of −log softmax_i(cos_ij / τ) at j's own query, without semi-positives

    In the authors' code q_i sees the answers of other queries by these queries' maps; here by its own, as in a search.
    """
    count = len(cosines)
    own = torch.arange(count, device=cosines.device)
    semi_positives = cosines[:, count:].view(count, count, -1)[own, own]
    shares = functional.log_softmax(torch.cat([cosines[:, :count], semi_positives], 1) / temperature, 1)
    forward = -(shares[own, own] + (weights * shares[:, count:]).sum(1)).mean()
    return (forward + functional.cross_entropy(cosines[:, :count].T / temperature, own)) / 2


VALIDATION_SHARE = 0.1
QUERIES_AT_ONCE = 64


def train(
    pairs: Pairs,
    config: QuariConfig | None = None,
    settings: TrainingSettings | None = None,
    *,
    validation: Pairs | None = None,
    path: str | os.PathLike[str] | None = None,
    resume: bool = False,
    encoder: str | None = None,
    device: str = "auto",
    progress: Progress = silent,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> Checkpoint:
    """Train a network on these pairs; return the weights of the epoch with the best validation MRR.

    Without validation a tenth of the items, with their queries, is held out. Epoch 0 is the network before its first
    step: it wins if no epoch is better. path: the file, saved after every epoch, so that an interrupted training
    continues with `resume`, on the CPU with identical bits. encoder: a name for the encoder of the vectors, compared
    when the file is loaded. on_epoch: called after every epoch.

    Equal pairs, settings and seed give equal weights on the CPU of one machine with the same number of threads. Noise
    on queries follows the paper, u·N(0, 1) with u from U[0, 1] for each query. A last batch with fewer pairs is left
    out, unless it is the only one; every epoch draws another order.

    A memory (`config.memory`, an addition to the paper) is filled with pairs drawn by the seed, after the anchor
    epochs, with the strength and temperature that are best on the validation pairs. In training, a query recalls no
    pair of its own answer. In the linear form all epochs are anchor epochs, and a memory is filled in one more.

    Raises DimensionMismatch, BankTooSmall, InvalidParameter; with `resume` UnreadableFile, and InvalidInput if the file
    has other pairs, sizes or settings; NonFiniteVectors if the loss is not finite.
    """
    settings = settings or TrainingSettings()
    if validation is None:
        pairs, validation = pairs.split(VALIDATION_SHARE, settings.seed)
    config = config or QuariConfig(pairs.dim)
    if config.form == "linear":
        to_remember = 1 if config.memory else 0
        settings = replace(settings, anchor_epochs=settings.epochs, epochs=settings.epochs + to_remember)
    for dim in (pairs.dim, validation.dim):
        if dim != config.dim:
            raise DimensionMismatch(f"the pairs have dimension {dim}, the network is for {config.dim}")
    _validate_anchors_and_memory(config, settings, pairs)
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
            last = run.judge(run.epoch(progress))
            if path is not None:
                run.resumable().save(path)
            if on_epoch is not None:
                on_epoch(last)
        return run.resumable()


def validate(
    network: Quari, pairs: Pairs, adapt: Callable[[torch.Tensor], Adaptation] | None = None
) -> npt.NDArray[np.int64]:
    """Return (n,) the rank, from 1, of each query's answer by cos(q', T r), after items with the same score. adapt: a
    part of the network to use in its place. The network is left in evaluation mode."""
    device = next(network.parameters()).device
    gallery = torch.from_numpy(pairs.gallery).to(device)
    network.eval()
    adapt = adapt or network
    ranks = np.empty(len(pairs), np.int64)
    with torch.inference_mode():
        for start in range(0, len(pairs), QUERIES_AT_ONCE):
            part = slice(start, start + QUERIES_AT_ONCE)
            scores = cosines(adapt(torch.from_numpy(pairs.queries[part]).to(device)), gallery)
            answers = torch.from_numpy(pairs.answers[part]).to(device)
            ranks[part] = (scores >= scores.gather(1, answers[:, None])).sum(1).cpu().numpy()
    return ranks


class _Run:
    """A training in progress. checkpoint: its record, with the best weights so far."""

    def __init__(self, checkpoint: Checkpoint, pairs: Pairs, validation: Pairs, device: torch.device) -> None:
        self.checkpoint, self.validation, self.device = checkpoint, validation, device
        self.settings = settings = checkpoint.settings
        self.queries = torch.from_numpy(pairs.queries)
        self.gallery = torch.from_numpy(pairs.gallery).to(device)
        self.answers = torch.from_numpy(pairs.answers)
        self.semi_items, self.semi_weights = map(torch.from_numpy, mine(pairs.gallery, settings, str(device)))
        drawn = np.random.default_rng(settings.seed).permutation(len(pairs))[: checkpoint.config.memory]
        self.remembered = torch.from_numpy(drawn)
        self.network = Quari(checkpoint.config).to(device)
        others = dict(self.network.named_parameters())
        anchors = [others.pop(name) for name in ("query_map", "item_map") if name in others]
        groups: list[dict[str, Any]] = [
            {"params": list(others.values()), "anchors": False, "weight_decay": settings.weight_decay},
            {"params": anchors, "anchors": True, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        self.batch = min(settings.batch, len(pairs))
        self.steps_per_epoch = len(pairs) // self.batch
        if checkpoint.resumption is not None:
            restore_training(checkpoint.resumption, self.network, self.optimizer, device)

    @property
    def done(self) -> int:
        """The number of finished epochs."""
        return self.checkpoint.history[-1].epoch

    @property
    def is_over(self) -> bool:
        since = self.done - max(self.checkpoint.best_epoch, self.settings.anchor_epochs)
        return self.done >= self.settings.epochs or since >= self.settings.patience

    @property
    def anchors_only(self) -> bool:
        """Whether only the anchors learn in the next epoch."""
        return self.done < self.settings.anchor_epochs

    def epoch(self, progress: Progress) -> float | None:
        """Run one pass over the pairs; return the mean loss of its steps, None if nothing is left to learn."""
        settings, losses = self.settings, []
        if self.done == settings.anchor_epochs:
            if self.done:
                self.network.load_state_dict(dict(self.checkpoint.weights))
                self.optimizer.state.clear()
            if self.network.memory is not None:
                self._remember(self.network.memory)
            if self.network.hypernetwork is None:
                return None
        self.network.train()
        order = torch.randperm(len(self.queries))
        for number in range(self.steps_per_epoch):
            step = self.done * self.steps_per_epoch + number
            for group in self.optimizer.param_groups:
                is_done = group["anchors"] and settings.anchor_epochs and not self.anchors_only
                group["lr"] = 0.0 if is_done else settings.rate(step, self.steps_per_epoch)
            losses.append(self._step(order[number * self.batch : (number + 1) * self.batch]))
            progress("training", step + 1, self.steps_per_epoch * settings.epochs)
        return float(np.mean(losses))

    def _remember(self, memory: Memory) -> None:
        queries = self.queries[self.remembered].to(self.device)
        items = self.gallery[self.answers[self.remembered].to(self.device)]
        with torch.inference_mode():
            memory.fill(queries, self.network.errors(queries, items))
        best = self.checkpoint.history[self.checkpoint.best_epoch].mrr
        chosen = (0.0, 1.0)
        for recall in itertools.product(STRENGTHS, TEMPERATURES):
            memory.tune(*recall)
            mrr = float((1 / validate(self.network, self.validation, self.network.remembering)).mean())
            if mrr > best:
                best, chosen = mrr, recall
        memory.tune(*chosen)

    def _step(self, batch: torch.Tensor) -> float:
        settings, device = self.settings, self.device
        queries = self.queries[batch]
        spread = settings.noise if settings.noise_per_coordinate else settings.noise / math.sqrt(queries.shape[1])
        queries = (queries + spread * torch.rand(len(batch), 1) * torch.randn(queries.shape)).to(device)
        answers = self.answers[batch]
        items = torch.cat([answers[:, None], self.semi_items[answers]], 1).to(device)
        weights = self.semi_weights[answers].to(device)
        columns = torch.cat([items[:, 0], items[:, 1:].reshape(-1)])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if self.anchors_only:
                adaptation = self.network.anchored(queries)
            else:
                own = (answers[:, None] == self.answers[self.remembered]).to(device)
                adaptation = self.network(queries, own)
        full = adaptation._replace(query=adaptation.query.float(), U=adaptation.U.float(), V=adaptation.V.float())
        scores = cosines(full, self.gallery[columns])
        if settings.published_loss:
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
        epoch = Epoch(len(history), loss, r1=float((ranks == 1).mean()), mrr=float((1 / ranks).mean()))
        self.checkpoint = replace(self.checkpoint, history=(*history, epoch))
        if self.checkpoint.best_epoch == epoch.epoch:
            self.checkpoint = replace(self.checkpoint, weights=weights_of(self.network))
        return epoch

    def resumable(self) -> Checkpoint:
        return replace(self.checkpoint, resumption=training_state(self.network, self.optimizer, self.device))


def _validate_anchors_and_memory(config: QuariConfig, settings: TrainingSettings, pairs: Pairs) -> None:
    if settings.anchor_epochs and config.form not in ("linear", "anchored"):
        raise InvalidParameter(f"anchor_epochs are for the anchored form: the form {config.form} has no anchors")
    if config.memory > len(pairs):
        raise InvalidParameter(f"a memory of {config.memory} pairs cannot be filled with {len(pairs)}: lower memory")
    if config.memory and settings.anchor_epochs == settings.epochs:
        raise InvalidParameter("a memory is filled after the anchor epochs: raise epochs or lower anchor_epochs")
    if config.memory and config.form == "anchored" and not settings.anchor_epochs:
        raise InvalidParameter("memory in the anchored form needs anchor_epochs: it stores the errors that these leave")


def _expect_same(earlier: Checkpoint, now: Checkpoint) -> None:
    options, others = (
        {"pairs": run.trained_on, "encoder": run.encoder, **asdict(run.config), **asdict(run.settings)}
        for run in (earlier, now)
    )
    if changed := [name for name in options if options[name] != others[name]]:
        raise InvalidInput(f"the training was started with other {', '.join(changed)}: pass the same to resume it")
    if earlier.resumption is None:
        raise InvalidInput("the file has only a finished network: train again without resume")
