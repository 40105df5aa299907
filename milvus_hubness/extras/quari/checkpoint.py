"""The file of a trained network, and the files of the authors.

It is a file of safetensors with the record of the training as JSON in its header. The names of its
tensors begin with what they are: WEIGHTS, or what a training needs to continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from milvus_hubness.basics.files.arrays import ENCRYPTED
from milvus_hubness.basics.files.opening import open_file
from milvus_hubness.basics.files.writing import unfinished_file
from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.extras.quari.hypernetwork import INSIDE
from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings

FORMAT = 1
"""Version of the file."""
HEADER = "quari"
"""Key of the record in the header."""
IMPORTED = "the authors' weights"
"""What an imported network was trained on, in place of a fingerprint."""
HYPERNETWORK = "hypernetwork."
"""Prefix of the weights of the authors' network in a `Quari`."""
NOT_IN_WEIGHTS = ("heads", "steps", "map_scale", "query_weight")
"""Fields of QuariConfig that follow from no shape of the authors' weights."""
WEIGHTS = "weights."
"""Prefix of the weights of the best epoch."""
LAST = "last."
"""Prefix of the weights of the last epoch."""
RNG = "rng"
"""State of torch's generator."""
CUDA_RNG = "cuda_rng"
"""State of the generator of the CUDA device."""
OPTIMIZER = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW stores of each parameter."""

Tensors = Mapping[str, torch.Tensor]


class Epoch(NamedTuple):
    """An epoch of a training."""

    epoch: int
    """Its number; 0 is the network before its first step."""
    loss: float | None
    """Mean loss of its steps; None for epoch 0, before the first step."""
    r1: float
    """R@1 of the validation pairs."""
    mrr: float
    """MRR of the validation pairs."""


def weights_of(network: Quari) -> dict[str, torch.Tensor]:
    """Return a copy of the network's weights, by name, on the CPU."""
    return {name: weight.detach().cpu().clone() for name, weight in network.state_dict().items()}


def training_state(
    network: Quari, optimizer: torch.optim.Optimizer, device: torch.device
) -> Tensors:
    """Return copies of what a training needs to continue.

    They are the last weights, AdamW's state of each parameter that has moved, and the states of
    torch's generators.
    """
    tensors = {f"{LAST}{name}": weight for name, weight in weights_of(network).items()}
    for name, parameter in network.named_parameters():
        for quantity, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{quantity}.{name}"] = value.cpu().clone()

    tensors[RNG] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[CUDA_RNG] = torch.cuda.get_rng_state(device)
    return tensors


def restore_training(
    tensors: Tensors, network: Quari, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Restore the network, its optimizer and torch's generators from a `training_state`."""
    network.load_state_dict(_with_prefix(tensors, LAST))
    for name, parameter in network.named_parameters():
        # A parameter that has not moved has no state.
        if f"{OPTIMIZER[0]}.{name}" not in tensors:
            continue
        # AdamW counts its steps on the CPU.
        optimizer.state[parameter] = {
            quantity: tensors[f"{quantity}.{name}"].to(
                "cpu" if quantity == "step" else device, copy=True
            )
            for quantity in OPTIMIZER
        }

    torch.set_rng_state(tensors[RNG])
    if CUDA_RNG in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors[CUDA_RNG], device)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A network and the record of its training."""

    config: QuariConfig
    """The sizes of the network."""
    settings: TrainingSettings
    """The settings of its training."""
    encoder: str | None
    """Name of the encoder of the vectors; None if the training named none."""
    trained_on: str
    """The fingerprint of the pairs."""
    pairs: int
    """The number of pairs."""
    history: tuple[Epoch, ...] = ()
    """All epochs, epoch 0 first."""
    weights: Tensors = field(default_factory=dict, repr=False)
    """The weights of the best epoch."""
    resumption: Tensors | None = field(default=None, repr=False)
    """The `training_state` to continue from."""

    @property
    def best_epoch(self) -> int:
        """The first epoch with the highest validation MRR."""
        return max(self.history, key=lambda epoch: (epoch.mrr, -epoch.epoch)).epoch

    def network(self, device: str | torch.device = "cpu") -> Quari:
        """Return the network with the best weights, in evaluation mode.

        Raises UnreadableFile for other sizes.
        """
        for name, shape in _large_weights(self.config):
            present = tuple(self.weights[name].shape) if name in self.weights else None
            if present != shape:
                raise UnreadableFile(
                    "the weights are not those of a network of these sizes: "
                    f"{name} must have the shape {shape}, and has {present}"
                )

        # Its first weights are random and are replaced: the caller's random numbers stay.
        with torch.random.fork_rng([]):
            network = Quari(self.config)

        try:
            network.load_state_dict(dict(self.weights))
        except RuntimeError as error:
            raise UnreadableFile(
                f"the weights are not those of a network of these sizes: {error}"
            ) from None

        return network.to(device).eval()

    def facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "config": asdict(self.config),
            "settings": asdict(self.settings),
            "encoder": self.encoder,
            "trained_on": self.trained_on,
            "pairs": self.pairs,
            "history": [epoch._asdict() for epoch in self.history],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; an earlier file stays until the new one is complete.

        Raises UnreadableFile.
        """
        tensors = {f"{WEIGHTS}{name}": weight for name, weight in self.weights.items()}
        tensors |= self.resumption or {}
        # safetensors writes no other.
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}

        facts = self.facts()
        facts["digest"] = _digest(facts, tensors)
        try:
            with unfinished_file(Path(path)) as unfinished:
                save_file(tensors, unfinished, {HEADER: json.dumps(facts)})
        except (OSError, SafetensorError) as error:
            raise UnreadableFile(f"cannot write {path}: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read a file that `save` wrote.

        Raises UnreadableFile for other files, and for damaged ones.
        """
        tensors, header = _read(path)
        try:
            facts = json.loads(header or "")
            if facts["format"] != FORMAT:
                raise UnreadableFile(
                    f"{path} has format {facts['format']}, this version reads {FORMAT}"
                )
            if facts.pop("digest") != _digest(facts, tensors):
                raise UnreadableFile(
                    f"{path} is damaged: its content has changed since it was saved"
                )

            resumption = {
                name: tensor for name, tensor in tensors.items() if not name.startswith(WEIGHTS)
            }
            checkpoint = cls(
                config=QuariConfig(**facts["config"]),
                settings=TrainingSettings(**facts["settings"]),
                encoder=facts["encoder"],
                trained_on=facts["trained_on"],
                pairs=facts["pairs"],
                history=tuple(Epoch(**epoch) for epoch in facts["history"]),
                weights=_with_prefix(tensors, WEIGHTS),
                resumption=resumption or None,
            )
        except (
            json.JSONDecodeError,
            RecursionError,
            KeyError,
            TypeError,
            AttributeError,
            InvalidParameter,
        ) as error:
            raise UnreadableFile(f"{path} is not a QuARI network: {error}") from None

        # It raises if the weights do not fit the sizes: here rather than at the first search.
        checkpoint.network()
        return checkpoint

    @classmethod
    def load_published(
        cls, path: str | os.PathLike[str], *, encoder: str | None = None, **options: Any
    ) -> Checkpoint:
        """Read weights of the authors' code: safetensors, or a file of torch.

        Of a file of torch only tensors are loaded.

        options: NOT_IN_WEIGHTS, fields of QuariConfig that weights do not show, if they are not the
        authors'. Weights under "state_dict", and with the prefix "hypernetwork.", are found too.
        Raises UnreadableFile, InvalidParameter.
        """
        unknown = options.keys() - set(NOT_IN_WEIGHTS)
        if unknown:
            names = ", ".join(NOT_IN_WEIGHTS)
            raise InvalidParameter(
                f"{min(unknown)}: unknown parameter; allowed parameters: {names}"
            )

        if Path(path).suffix == ".safetensors":
            tensors, _ = _read(path)
        else:
            tensors = _read_torch(path)
        weights = _with_prefix(tensors, HYPERNETWORK) or dict(tensors)

        # The sizes follow from the shapes.
        try:
            width, dim = weights["query_encoder.0.weight"].shape
            rank = len(weights["pos_emb"]) // 2
            layer_names = [name for name in weights if name.startswith("transformer.layers.")]
            layers = len({name.split(".")[2] for name in layer_names})
        except (KeyError, ValueError, TypeError) as error:
            raise UnreadableFile(
                f"{path} does not have the weights of the authors' QuARI: {error}"
            ) from None

        sizes = {"rank": rank, "width": width, "layers": layers}
        config = QuariConfig.published(dim, **{**sizes, **options})
        named = {f"{HYPERNETWORK}{name}": weight.float() for name, weight in weights.items()}
        checkpoint = cls(config, TrainingSettings(), encoder, IMPORTED, 0, weights=named)
        checkpoint.network()

        return checkpoint


def _large_weights(config: QuariConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and the shapes of the largest weights.

    The sizes are claims of a file: a network is made for them only if these weights are present, so
    that a small file cannot take much memory.
    """
    if config.form == "linear":
        yield "query_map", (config.dim, config.dim)
        yield "memory.queries", (config.memory, config.dim)
        return

    yield f"{HYPERNETWORK}query_encoder.0.weight", (config.width, config.dim)
    yield f"{HYPERNETWORK}pos_emb", (2 * config.rank + 1, config.width)
    for layer in range(config.layers):
        inside = f"{HYPERNETWORK}transformer.layers.{layer}.linear1.weight"
        yield inside, (INSIDE * config.width, config.width)


def _read(path: str | os.PathLike[str]) -> tuple[Tensors, str | None]:
    """Return the tensors of a safetensors file, and our header if there is one."""
    try:
        with open_file(path), safe_open(os.fspath(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, (file.metadata() or {}).get(HEADER)
    except UnreadableFile:
        raise
    except (OSError, SafetensorError, ValueError, MemoryError) as error:
        raise UnreadableFile(f"{path} is not a readable safetensors file: {error}") from None


def _read_torch(path: str | os.PathLike[str]) -> Tensors:
    try:
        with open_file(path) as file:
            _expect_torch_archive(path, file)
            content = torch.load(file, map_location="cpu", weights_only=True)

        content = content.get("state_dict", content)
        tensors = {
            name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)
        }
    except UnreadableFile:
        raise
    # A file may raise anything in torch's reader.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableFile(
            f"{path} is not a file of weights that torch can read safely: {reason}"
        ) from None

    for name, tensor in tensors.items():
        # A tensor may repeat one number without end, and a copy of it would then take all memory.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UnreadableFile(
                f"{path}: {name!r} has the shape {tuple(tensor.shape)} and fewer numbers"
            )

    return tensors


def _expect_torch_archive(path: str | os.PathLike[str], file: BinaryIO) -> None:
    """Raise UnreadableFile unless the file has the form of torch since 1.6.

    That is an archive that is not compressed: a small one could take all memory.
    """
    if not zipfile.is_zipfile(file):
        raise UnreadableFile(
            f"{path} is not a file of weights that torch can read safely: no archive; save it with "
            "torch.save again"
        )

    members = zipfile.ZipFile(file).infolist()
    if any(member.compress_type or member.flag_bits & ENCRYPTED for member in members):
        raise UnreadableFile(f"{path} is compressed or encrypted: save it with torch.save again")

    # `is_zipfile` and `ZipFile` have read from it.
    file.seek(0)


def _with_prefix(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with this, under the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _digest(facts: Mapping[str, Any], tensors: Tensors) -> str:
    # In a fixed order, since a file may list its tensors in another.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
