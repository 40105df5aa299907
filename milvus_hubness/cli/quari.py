"""The commands milvus-hubness quari train, import-weights and eval."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import EPOCHS, FORM, MAP_EPOCHS, MEMORY
from milvus_hubness.basics.files.writing import check_writable, expect_different
from milvus_hubness.basics.texts import points
from milvus_hubness.cli.command_line import command_line
from milvus_hubness.cli.console import (
    progress_bars,
    say,
    show_facts,
    show_result,
    show_table,
    write_page,
)
from milvus_hubness.cli.options import AsJson, Connection, Field, PairsQueries, pairs_of
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    from milvus_hubness.basics.progress import Progress
    from milvus_hubness.extras.quari.checkpoint import Checkpoint
    from milvus_hubness.extras.quari.reranker import Labelled

Encoder = Annotated[str | None, "Name and version of the model that made the vectors."]


@dataclass(frozen=True)
class LabelledPairs:
    """The options that name labelled pairs of vectors."""

    pairs: Annotated[
        str,
        "Labelled pairs: .npz, .parquet or .arrow file with 'query' and 'item', the vector of its "
        "right answer, or, with --collection, what tune takes as --pairs.",
    ]
    collection: Annotated[
        str | None, "Collection whose rows are the gallery. [default: the items of --pairs]"
    ] = None
    pairs_queries: PairsQueries = None
    field: Field = None

    def read(self, connection: Connection, progress: Progress) -> Labelled:
        """Return the pairs. Raises as `read_labelled` does."""
        from milvus_hubness.extras.quari.reranker import read_labelled

        return read_labelled(
            self.pairs, self.collection, connection.open, self.field, progress, self.pairs_queries
        )


RANKS = ("MdR", "MnR")
"""Measures that are ranks; the others are shares, and shown in percent."""


def train(
    labelled: LabelledPairs,
    out: Annotated[Path, "Network file to write; its learning curves are OUT as .html."],
    connection: Connection,
    resume: Annotated[bool, "Continue the training in --out, with the same options."] = False,
    encoder: Encoder = None,
    form: Annotated[
        str, "linear (maps with a memory) or published (QuARI's network, loss and noise)."
    ] = FORM,
    param: Annotated[
        list[str] | None,
        "NAME=VALUE, another field of QuariConfig or TrainingSettings; repeatable: epochs=20 at most, "
        f"memory=6000 pairs that linear maps remember. [default: {MAP_EPOCHS} epochs, {EPOCHS} of "
        f"networks; memory {MEMORY}]",
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train linear maps or a network on labelled pairs of vectors.

    A tenth of the answered items is held out to choose the epoch. The network is written after
    every epoch; --resume continues an interrupted training.

    Example: milvus-hubness quari train --pairs pairs.npz --collection products --out network.safetensors
    """
    from milvus_hubness.extras.quari.curves import learning_curves
    from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
    from milvus_hubness.extras.quari.train import train

    # dim is that of the vectors, and form, on which other defaults depend, has an option of its own.
    of_network = {field.name for field in fields(QuariConfig)} - {"dim", "form"}
    of_training = {field.name for field in fields(TrainingSettings)}
    # Only linear maps have a memory.
    options: dict[str, Any] = {"memory": MEMORY if form == "linear" else 0}
    options |= pairs_of(param, "--param")

    if "form" in options:
        raise InvalidParameter("--param form: pass --form, on which other defaults depend")
    if unknown := options.keys() - of_network - of_training:
        names = ", ".join(sorted(of_network | of_training))
        raise InvalidParameter(
            f"--param {min(unknown)}: unknown parameter; allowed parameters: {names}"
        )

    sizes = {name: value for name, value in options.items() if name in of_network}
    sizes["form"] = form
    settings_of: Any = TrainingSettings.linear if form == "linear" else TrainingSettings
    settings = settings_of(
        **{name: value for name, value in options.items() if name in of_training}
    )
    # It raises for values that do not fit, before any file or collection is read.
    QuariConfig(dim=1, **sizes)
    curves = out.with_suffix(".html")
    read = [("--pairs", labelled.pairs), ("--pairs-queries", labelled.pairs_queries)]
    for option, path in read:
        if path is not None:
            expect_different(
                [(option, Path(path)), ("--out", out), ("the curves of --out", curves)]
            )
    check_writable(curves)

    with progress_bars() as progress:
        pairs = labelled.read(connection, progress).pairs
        network = train(
            pairs,
            QuariConfig(pairs.dim, **sizes),
            settings,
            path=out,
            resume=resume,
            encoder=encoder,
            progress=progress,
        )

    write_page(curves, learning_curves(network.history, network.best_epoch))
    facts = {
        **_facts(network),
        "left_out": pairs.left_out,
        "network": str(out),
        "curves": str(curves),
    }
    title = f"Trained on {network.pairs} pairs, judged on {len(pairs) - network.pairs}"
    show_result(as_json, {"quari": facts}, lambda: show_facts(title, _in_words(facts)))


def _facts(network: Checkpoint) -> dict[str, Any]:
    """Return the facts about a network, with its first and best epochs."""
    facts = network.facts()
    facts["parameters"] = sum(weight.numel() for weight in network.weights.values())
    if facts["history"]:
        facts |= {"before": facts["history"][0], "best": facts["history"][network.best_epoch]}
    return facts


LINEAR = "d {dim}, two linear maps"
PUBLISHED = "d {dim}, rank {rank}, width {width}, {layers} layers × {steps} steps, {form}"


def _in_words(facts: dict[str, Any]) -> dict[str, object]:
    sizes = facts["config"]
    form = (LINEAR if sizes["form"] == "linear" else PUBLISHED).format(**sizes)

    # Weights of the authors have no history.
    judged = {}
    if facts["history"]:
        before = facts["before"]
        best = facts["best"]
        # The memory of linear maps is filled in a row of its own, without a loss.
        trained = sum(epoch["loss"] is not None for epoch in facts["history"])
        most_epochs = facts["settings"]["epochs"]
        chosen = f"best {best['epoch']}"
        if best["loss"] is None and best["epoch"]:
            chosen = "best with the memory"
        judged = {
            "epochs": f"{trained} of {most_epochs}, {chosen}",
            "validation R@1": f"{before['r1']:.1%} → {best['r1']:.1%}",
            "validation MRR": f"{before['mrr']:.1%} → {best['mrr']:.1%}",
        }

    left_out = facts.get("left_out")
    return {
        "network": facts["network"],
        "curves": facts.get("curves"),
        "encoder": facts["encoder"],
        "sizes": f"{form}; {facts['parameters']:,} parameters",
        "remembers": f"{sizes['memory']} pairs" if sizes["memory"] else None,
        **judged,
        "left out": f"{left_out} pairs without a direction" if left_out else None,
    }


def import_weights(
    weights: Annotated[
        Path, typer.Argument(help="Weights of the authors' code: .safetensors, or a file of torch.")
    ],
    out: Annotated[Path, "Network file to write."],
    encoder: Encoder = None,
    param: Annotated[
        list[str] | None, "NAME=VALUE, if not the authors': heads=8, steps=4; repeatable."
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a network of weights that the authors' code has trained.

    Of a file of torch, only tensors are loaded, never other objects.

    Example: milvus-hubness quari import-weights model_weights.pt --out network.safetensors --encoder clip-vit-b-16
    """
    from milvus_hubness.extras.quari.checkpoint import NOT_IN_WEIGHTS, Checkpoint

    options = pairs_of(param, "--param")
    # Before the call, which has other parameters, such as encoder.
    if unknown := options.keys() - set(NOT_IN_WEIGHTS):
        names = ", ".join(NOT_IN_WEIGHTS)
        raise InvalidParameter(
            f"--param {min(unknown)}: unknown parameter; allowed parameters: {names}"
        )

    expect_different([("WEIGHTS", weights), ("--out", out)])
    network = Checkpoint.load_published(weights, encoder=encoder, **options)
    network.save(out)
    facts = {**_facts(network), "network": str(out)}
    show_result(
        as_json, {"quari": facts}, lambda: show_facts("The authors' weights", _in_words(facts))
    )


def evaluate(
    network: Annotated[Path, typer.Argument(help="Network, as written by quari train.")],
    labelled: LabelledPairs,
    connection: Connection,
    candidates: Annotated[int, "Items of the search that are re-ranked."] = 1000,
    encoder: Encoder = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a network on labelled pairs that it was not trained on.

    Compares the raw search, the corrected search if the collection has biases, and the re-ranked
    search.

    Example: milvus-hubness quari eval network.safetensors --pairs new_pairs.npz --collection products
    """
    from milvus_hubness.extras.quari.reranker import QuariReranker

    reranker = QuariReranker.load(network, encoder=encoder, candidates=candidates)
    with progress_bars() as progress:
        result = labelled.read(connection, progress).evaluate(reranker)

    show_result(as_json, {"quari": result}, lambda: _show_evaluation(result))


def _show_evaluation(result: dict[str, Any]) -> None:
    rows = []
    # A collection without biases has no corrected search.
    for name in ("raw", "corrected", "reranked"):
        if name in result:
            values = [
                f"{value if measure in RANKS else 100 * value:.1f}"
                for measure, value in result[name].items()
            ]
            rows.append((name, *values))
    show_table(f"{result['queries']} queries", ("", *result["raw"]), rows)
    for name, gain in result["gain"].items():
        say(f"R@1 against {name}: {points(tuple(gain.values()))}")

    say("{milliseconds:.1f} ms a query for {candidates} candidates".format(**result))


app = command_line(
    "Train and evaluate a network that re-ranks corrected candidates for each query."
    "\n\nExample: milvus-hubness quari train --pairs pairs.npz --out network.safetensors",
    train,
    import_weights,
    eval=evaluate,
)
