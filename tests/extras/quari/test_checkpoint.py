"""The file of a network: what goes in comes out, and what is not one is refused."""

import dataclasses
import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from milvus_hubness.errors import EncoderMismatch, UnreadableFile
from milvus_hubness.extras.quari.checkpoint import Checkpoint, Epoch
from milvus_hubness.extras.quari.reranker import QuariReranker
from milvus_hubness.extras.quari.settings import TrainingSettings


@pytest.fixture
def kept(disturbed):
    network = disturbed()
    history = (Epoch(0, None, 0.1, 0.2), Epoch(1, 1.5, 0.3, 0.4), Epoch(2, 1.25, 0.3, 0.4))
    return Checkpoint(
        network.config, TrainingSettings(), "mini-lm 6", "abc/def", 7, history, network.state_dict()
    )


def test_what_goes_in_comes_out(kept, tmp_path):
    kept.save(tmp_path / "network.safetensors")
    read = Checkpoint.load(tmp_path / "network.safetensors")
    for name in ("config", "settings", "encoder", "trained_on", "pairs", "history", "resumption"):
        assert getattr(read, name) == getattr(kept, name), name
    assert read.best_epoch == 1
    for name, each in kept.weights.items():
        assert torch.equal(read.weights[name], each)
    assert [path.name for path in tmp_path.iterdir()] == ["network.safetensors"]
    queries = torch.randn(3, kept.config.dim)
    torch.testing.assert_close(read.network()(queries).U, kept.network()(queries).U)


def test_a_network_is_for_one_encoder(kept, tmp_path):
    path = tmp_path / "network"
    kept.save(path)
    assert QuariReranker.load(path, encoder="mini-lm 6").dim == kept.config.dim
    assert QuariReranker.load(path).candidates == 1000
    with pytest.raises(EncoderMismatch, match=r"'mini-lm 6'.*'mini-lm 12'"):
        QuariReranker.load(path, encoder="mini-lm 12")
    dataclasses.replace(kept, encoder=None).save(path)
    with pytest.raises(EncoderMismatch, match="does not name"):
        QuariReranker.load(path, encoder="mini-lm 12")


def header(path):
    size = int.from_bytes(path.read_bytes()[:8], "little")
    return size, path.read_bytes()[8 : 8 + size]


def rewritten(kept, path, **changed):
    """The file with other facts in its header."""
    tensors = {f"weights.{name}": each for name, each in kept.weights.items()}
    kept.save(path)
    facts = json.loads(json.loads(header(path)[1])["__metadata__"]["quari"])
    save_file(tensors, path, {"quari": json.dumps({**facts, **changed})})


def test_a_file_that_is_damaged_is_refused(kept, tmp_path):
    path = tmp_path / "network"
    with pytest.raises(UnreadableFile, match="no such file; check the path"):
        Checkpoint.load(path)
    kept.save(path)
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(UnreadableFile, match="it is empty"):
        Checkpoint.load(path)
    for broken in (whole[:-5], whole[: len(whole) // 3], whole[:4], b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(UnreadableFile, match="not a readable"):
            Checkpoint.load(path)
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    with pytest.raises(UnreadableFile, match="damaged"):
        Checkpoint.load(path)


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    for write in (
        lambda file: pickle.dump(Trap(), file),
        lambda file: torch.save({"x": Trap()}, file),
    ):
        with open(tmp_path / "network.pt", "wb") as file:
            write(file)
        with pytest.raises(UnreadableFile):
            Checkpoint.load(tmp_path / "network.pt")


def test_other_safetensors_are_refused(kept, tmp_path):
    path = tmp_path / "network"
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(UnreadableFile, match="not a QuARI network"):
        Checkpoint.load(path)
    rewritten(kept, path, format=99)
    with pytest.raises(UnreadableFile, match="format 99"):
        Checkpoint.load(path)
    rewritten(kept, path, config={**dataclasses.asdict(kept.config), "rank": 4})
    with pytest.raises(UnreadableFile, match="damaged"):
        Checkpoint.load(path)
    dataclasses.replace(kept, config=dataclasses.replace(kept.config, width=4)).save(path)
    with pytest.raises(UnreadableFile, match="these sizes"):
        Checkpoint.load(path)


def test_a_place_that_cannot_be_written_is_named(kept, tmp_path):
    with pytest.raises(UnreadableFile, match="cannot write"):
        kept.save(tmp_path / "no such folder" / "network")
