"""The file of a trained network: safetensors, with metadata as JSON in the header."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from milvus_hubness.errors import EncoderMismatch, InvalidParameter, UnreadableFile
from milvus_hubness.quari.model import Quari, QuariConfig
from milvus_hubness.quari.pairs import TrainingSettings

FORMAT = 1
HEADER = "quari"
WEIGHTS, LAST, FIRST_MOMENT, SECOND_MOMENT = "weights.", "last.", "exp_avg.", "exp_avg_sq."
RNG, CUDA_RNG = "rng", "cuda_rng"

Tensors = Mapping[str, torch.Tensor]


class Epoch(NamedTuple):
    """One epoch of a training. loss: the mean of its steps; None for epoch 0, before the first step. r1, mrr:
    of the validation pairs."""

    epoch: int
    loss: float | None
    r1: float
    mrr: float


@dataclass(frozen=True, eq=False)
class Resumption:
    """The state that a training needs to continue: the last weights, both moments of AdamW and its steps, by
    parameter, and the state of torch's generators, including that of CUDA if it trained there."""

    last: Tensors
    first: Tensors
    second: Tensors
    steps: Mapping[str, int]
    rng: torch.Tensor
    cuda_rng: torch.Tensor | None = None

    @classmethod
    def of(cls, network: Quari, optimizer: torch.optim.Optimizer, device: torch.device) -> Resumption:
        """Return a copy of the current state."""
        named = {name: optimizer.state[each] for name, each in network.named_parameters()}
        moved = {name: state for name, state in named.items() if state}
        return cls(
            {name: each.detach().cpu().clone() for name, each in network.state_dict().items()},
            {name: state["exp_avg"].cpu().clone() for name, state in moved.items()},
            {name: state["exp_avg_sq"].cpu().clone() for name, state in moved.items()},
            {name: int(state["step"]) for name, state in moved.items()},
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, network: Quari, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Restore the network, its optimizer and torch's generators."""
        network.load_state_dict(dict(self.last))
        for name, each in network.named_parameters():
            if name in self.first:
                optimizer.state[each] = {
                    "step": torch.tensor(float(self.steps[name])),
                    "exp_avg": self.first[name].to(device, copy=True),
                    "exp_avg_sq": self.second[name].to(device, copy=True),
                }
        torch.set_rng_state(self.rng)
        if self.cuda_rng is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, device)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A network and the record of its training.

    encoder: name of the encoder of the vectors, if given. trained_on: fingerprint of the pairs. pairs: number
    of pairs. history: all epochs, 0 first. weights: those of the best epoch. resumption: the state to
    continue the training.
    """

    config: QuariConfig
    settings: TrainingSettings
    encoder: str | None
    trained_on: str
    pairs: int
    history: tuple[Epoch, ...] = ()
    weights: Tensors = field(default_factory=dict, repr=False)
    resumption: Resumption | None = field(default=None, repr=False)

    @property
    def best_epoch(self) -> int:
        """Return the first epoch with the highest validation MRR."""
        return max(self.history, key=lambda each: (each.mrr, -each.epoch)).epoch

    def network(self, device: str | torch.device = "cpu") -> Quari:
        """Return the network with the best weights, in evaluation mode. Raises UnreadableFile if the weights
        do not belong to a network of these sizes."""
        with torch.random.fork_rng([]):
            made = Quari(self.config)
        try:
            made.load_state_dict(dict(self.weights))
        except RuntimeError as error:
            raise UnreadableFile(f"no weights of a network of these sizes: {error}") from None
        return made.to(device).eval()

    def expect_encoder(self, encoder: str | None) -> None:
        """Check the encoder. Raises EncoderMismatch if both sides name different encoders, or only the caller
        names one."""
        if encoder is not None and encoder != self.encoder:
            result = "does not say for which" if self.encoder is None else f"was trained for {self.encoder!r}"
            raise EncoderMismatch(f"the network {result}, and is to be used with vectors of {encoder!r}")

    def facts(self) -> dict[str, Any]:
        """Return the facts about the network, for people and JSON."""
        return {
            "format": FORMAT,
            "config": self.config.to_dict(),
            "settings": self.settings.to_dict(),
            "encoder": self.encoder,
            "trained_on": self.trained_on,
            "pairs": self.pairs,
            "history": [each._asdict() for each in self.history],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: an earlier file stays until the new one is complete. Raises
        UnreadableFile if it cannot be written."""
        tensors = {f"{WEIGHTS}{name}": each for name, each in self.weights.items()}
        facts = self.facts()
        if self.resumption is not None:
            parts = ((LAST, self.resumption.last), (FIRST_MOMENT, self.resumption.first))
            for prefix, part in (*parts, (SECOND_MOMENT, self.resumption.second)):
                tensors |= {f"{prefix}{name}": each for name, each in part.items()}
            tensors[RNG] = self.resumption.rng
            if self.resumption.cuda_rng is not None:
                tensors[CUDA_RNG] = self.resumption.cuda_rng
            facts["optimizer_steps"] = dict(self.resumption.steps)
        tensors = {name: each.contiguous() for name, each in tensors.items()}
        facts["digest"] = _digest(facts, tensors)
        temporary = Path(f"{os.fspath(path)}.partial")
        try:
            save_file(tensors, temporary, {HEADER: json.dumps(facts)})
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise UnreadableFile(f"cannot write {path}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read a file that `save` wrote. Raises UnreadableFile for other files, and for a file that has
        changed since."""
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                header = (file.metadata() or {}).get(HEADER)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise UnreadableFile(f"{path} is no readable safetensors file: {error}") from None
        try:
            facts = json.loads(header or "")
            if facts["format"] != FORMAT:
                raise UnreadableFile(f"{path} is of format {facts['format']}, this version reads {FORMAT}")
            if facts.pop("digest") != _digest(facts, tensors):
                raise UnreadableFile(f"{path} is damaged: it is not as it was written")
            made = cls(
                QuariConfig.from_dict(facts["config"]),
                TrainingSettings.from_dict(facts["settings"]),
                facts["encoder"],
                facts["trained_on"],
                facts["pairs"],
                tuple(Epoch(**each) for each in facts["history"]),
                _part(tensors, WEIGHTS),
                _resumption(tensors, facts),
            )
        except (json.JSONDecodeError, KeyError, TypeError, InvalidParameter) as error:
            raise UnreadableFile(f"{path} holds no QuARI network: {error}") from None
        made.network()
        return made


def _resumption(tensors: Tensors, facts: Mapping[str, Any]) -> Resumption | None:
    if RNG not in tensors:
        return None
    return Resumption(
        _part(tensors, LAST),
        _part(tensors, FIRST_MOMENT),
        _part(tensors, SECOND_MOMENT),
        facts["optimizer_steps"],
        tensors[RNG],
        tensors.get(CUDA_RNG),
    )


def _part(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


def _digest(facts: Mapping[str, Any], tensors: Tensors) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
