"""Every reader of a file that an operator names, and every kind of file that is not what it should be: one line each,
no traceback, no waiting, and no memory for what a header only claims."""

import io
import json
import os
import pickle
import socket
import struct
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from milvus_hubness.basics.files.certificates import read_pem
from milvus_hubness.basics.files.opening import read_token
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.errors import HubnessError
from milvus_hubness.extras.quari.checkpoint import Checkpoint
from milvus_hubness.extras.quari.reranker import read_labelled
from milvus_hubness.jobs.common.control_file import postpone_cutover
from milvus_hubness.jobs.common.inputs import read_texts
from milvus_hubness.jobs.common.judgements import Judgements, read_clicks
from milvus_hubness.milvus.client.matching import INPUTS, Candidates
from milvus_hubness.serve import ConfigFile
from tests.support.memory import peak_of

LITTLE = 40 << 20
"""Memory that a refusal may take, in bytes: imports of readers are among it."""


def read_match(path):
    folder = path.parent / "parts"
    folder.mkdir(exist_ok=True)
    if path.suffix == ".npz":
        (folder / INPUTS).write_text("{}")
        os.rename(path, folder / "00000000.npz") if path.exists() else os.symlink(
            path, folder / "00000000.npz"
        )
    else:
        (folder / INPUTS).symlink_to(path)
    return Candidates({}, folder)


READERS = {
    "bank .npy": (QueryBank.load, ".npy"),
    "bank .npz": (QueryBank.load, ".npz"),
    "bank .parquet": (QueryBank.load, ".parquet"),
    "bank .arrow": (QueryBank.load, ".arrow"),
    "bank .feather": (QueryBank.load, ".feather"),
    "bank .csv": (QueryBank.load, ".csv"),
    "bank .csv.gz": (QueryBank.load, ".csv.gz"),
    "bank .jsonl": (QueryBank.load, ".jsonl"),
    "bank .jsonl.gz": (QueryBank.load, ".jsonl.gz"),
    "judgements .csv": (Judgements.load, ".csv"),
    "judgements .npz": (Judgements.load, ".npz"),
    "judgements .parquet": (Judgements.load, ".parquet"),
    "judgements .arrow": (Judgements.load, ".arrow"),
    "judgements .jsonl": (Judgements.load, ".jsonl"),
    "qrels": (Judgements.load, ".qrels"),
    "qrels .json": (Judgements.load, ".json"),
    "clicks": (read_clicks, ".jsonl"),
    "pairs of items": (lambda path: read_labelled(str(path), None, None, None, None), ".npz"),
    "texts .npz": (lambda path: read_texts(None, str(path), "text", 3), ".npz"),
    "texts .parquet": (lambda path: read_texts(None, str(path), "text", 3), ".parquet"),
    "texts .npy": (lambda path: read_texts(None, str(path), "text", 3), ".npy"),
    "token": (read_token, ".txt"),
    "configuration": (ConfigFile, ".toml"),
    "control file": (postpone_cutover, ".json"),
    "certificate": (lambda path: read_pem(str(path)), ".pem"),
    "network": (Checkpoint.load, ".safetensors"),
    "weights": (Checkpoint.load_published, ".safetensors"),
    "weights of torch": (Checkpoint.load_published, ".pt"),
    "inputs of a match": (read_match, ".json"),
    "parts of a match": (read_match, ".npz"),
}


def archive(**members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, member in members.items():
            file.writestr(name.replace("_", "."), member)
    return content.getvalue()


def npy(shape, dtype="<f4", after=b"", **header):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        content, {"shape": shape, "fortran_order": False, "descr": dtype, **header}
    )
    return content.getvalue() + after


def encrypted():
    """An archive whose members say that they are encrypted."""
    content = bytearray(
        archive(query_npy=npy((2, 2), after=bytes(16)), key_npy=npy((2,), after=bytes(8)))
    )
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(mark)
        while at >= 0:
            content[at + offset] |= 1
            at = content.find(mark, at + 1)
    return bytes(content)


def place_socket(path):
    former = os.getcwd()
    os.chdir(path.parent)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path.name)
    server.close()
    os.chdir(former)


def place_sparse(path):
    path.write_bytes(npy((10**12, 4)))
    os.truncate(path, 16 * 10**12 + 128)


PLACES = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": place_socket,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
    "the log of the kernel": lambda path: path.symlink_to("/proc/kmsg"),
    "a file of the kernel": lambda path: path.symlink_to("/proc/self/environ"),
    "a loop": lambda path: path.symlink_to(path),
    "a dead link": lambda path: path.symlink_to("none"),
    "a hole of 16 TB": place_sparse,
}
CONTENTS = {
    "empty": b"",
    "spaces": b" \n\t\n",
    "zeros": bytes(4_096),
    "noise": np.random.default_rng(0).bytes(4_096),
    "a text": b"hello\nworld\n",
    "long": b"a" * (5 << 20),
    "nested lists": b"[" * 100_000 + b"]" * 100_000,
    "nested values": b"a = " + b"[" * 100_000 + b"]" * 100_000,
    "a list": b"[1, [2, [3]]]",
    "5,000 digits in JSON": b'{"rows_per_second": ' + b"9" * 5_000 + b"}",
    "5,000 digits in TOML": b"a = " + b"9" * 5_000,
    "5,000 hexadecimal digits": b"[http]\nmax_pending = 0x" + b"f" * 5_000,
    "a number": npy((), after=bytes(4)),
    "no numbers": npy((0, 4)),
    "a cube": npy((2, 2, 2), after=bytes(32)),
    "one row": npy((4,), after=bytes(16)),
    "objects": npy((2,), "|O", pickle.dumps([None, None])),
    "complex": npy((2, 2), "<c8", bytes(32)),
    "texts": npy((2, 2), "<U4", bytes(64)),
    "records": npy((2, 2), [("a", "<f4")], bytes(16)),
    "10^12 rows": npy((10**12, 4), after=bytes(1_000)),
    "more than the memory": npy((1 << 62, 1 << 62), after=bytes(1_000)),
    "fewer than none": npy((-1, 4), after=bytes(1_000)),
    "a header of 10^5 brackets": npy((1,))[:8] + struct.pack("<H", 60_000) + b"(" * 60_000,
    "an archive in an archive": archive(data_zip=archive(query_npy=npy((2, 2), after=bytes(16)))),
    "an archive for an array": archive(
        query_npy=archive(a_npy=b""), key_npy=archive(a_npy=b""), text_npy=b""
    ),
    "numbers in an archive": archive(
        query_npy=npy((), after=bytes(4)), key_npy=npy(()), text_npy=npy((), "<U2", bytes(8))
    ),
    "cubes in an archive": archive(
        **{
            f"{name}_npy": npy((2, 2, 2), after=bytes(32))
            for name in ("query", "key", "text", "item")
        }
    ),
    "cubes of weights": archive(
        query_npy=npy((2, 2), after=bytes(16)),
        key_npy=npy((2,), "<i8", bytes(16)),
        text_npy=npy((2, 2), after=bytes(16)),
        item_npy=npy((2,), after=bytes(8)),
        weight_npy=npy((2, 2), after=bytes(16)),
    ),
    "objects in an archive": archive(
        **{
            f"{name}_npy": npy((2,), "|O", pickle.dumps([None] * 2))
            for name in ("query", "key", "text", "item")
        }
    ),
    "10^12 rows in an archive": archive(
        **{
            f"{name}_npy": npy((10**12, 4), after=bytes(99))
            for name in ("query", "key", "text", "item")
        }
    ),
    "encrypted": encrypted(),
    "the first bytes of a table": b"PAR1" + bytes(100) + b"PAR1",
    "an encrypted table": b"PARE" + bytes(100) + b"PARE",
    "a safetensors header of 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "safetensors that are not there": struct.pack("<Q", 70)
    + b'{"w":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,8]}}'.ljust(70)
    + bytes(8),
    "a pickle": pickle.dumps({"a": [1]}),
}


def placed(content):
    return lambda path: path.write_bytes(content)


CASES = {**PLACES, **{name: placed(content) for name, content in CONTENTS.items()}}
FINE = {
    ("token", "a list"),
    ("token", "5,000 digits in JSON"),
    ("token", "5,000 digits in TOML"),
    ("control file", "nothing"),
    ("control file", "a dead link"),
    ("inputs of a match", "nothing"),
    ("inputs of a match", "a dead link"),
    ("inputs of a match", "a loop"),
    ("bank .npz", "cubes of weights"),
}
"""What a reader takes: a token may look like a list, a control file or the parts of a match may be missing, and of
several arrays the bank is `query`."""


PROBLEMS = {
    "nothing": "no such file; check the path",
    "a dead link": "no such file; check the path",
    "a folder": "is a folder: name a file",
    "a pipe": "is a pipe: name a file",
    "a socket": "is a socket: name a file",
    "an endless device": "is a device: name a file",
    "an empty device": "is a device: name a file",
}


@pytest.mark.parametrize("reader", READERS)
def test_each_bad_file_is_one_line(tmp_path, reader):
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault = fault_of_a_refusal(reader, case, folder)
        assert fault is None, f"{case}: {fault}"


def fault_of_a_refusal(reader, case, folder):
    """What is wrong with how a reader refuses a file; None if nothing is, or the reader may take it."""
    read, suffix = READERS[reader]
    path = folder / f"named{suffix}"
    CASES[case](path)
    tracemalloc.start()
    try:
        read(path)
    except HubnessError as refused:
        message = str(refused)
        _, peak = tracemalloc.get_traced_memory()
    except Exception as error:
        return f"no message, but {error!r}"
    else:
        return None if (reader, case) in FINE else "it was read"
    finally:
        tracemalloc.stop()

    if (reader, case) in FINE:
        return f"it was not read: {message}"
    if "named" not in message and "parts" not in message:
        return f"the file is not named: {message}"
    if reader != "texts .npy" and PROBLEMS.get(case, "") not in message:
        return f"another problem: {message}"
    # A configuration has a line for each fault.
    if len(message.splitlines()) > (2 if reader == "configuration" else 1):
        return f"several lines: {message}"
    if len(message) >= 700:
        return f"{len(message)} characters: {message}"
    return f"{peak:,} bytes" if peak >= LITTLE else None


def zeros_in_an_archive(path, compression=zipfile.ZIP_DEFLATED):
    """4 GiB of zeros in 4 MB, honest in all headers."""
    block = bytes(64 << 20)
    with (
        zipfile.ZipFile(path, "w", compression) as file,
        file.open("query.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy((1 << 26, 4)))
        for _ in range(4):
            member.write(block)


def equal_numbers(path):
    """A column of 200 million equal numbers: a few KB, without any compression."""
    values = pa.array(np.zeros(200_000_000, np.int8))
    lists = pa.FixedSizeListArray.from_arrays(values, 100)
    pq.write_table(pa.table({"query": lists.cast(pa.list_(pa.int8()))}), path)


def equal_texts(path):
    """10,000 rows with one text of 1 MB each, which a dictionary holds once, in Arrow's type and in the file."""
    texts = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(10_000, np.int32)), pa.array(["a" * (1 << 20)])
    )
    pq.write_table(pa.table({"text": texts}), path)


def repeated_texts(path):
    """A million rows with one text of 1 KB each, of the type of texts, which the file holds once."""
    pq.write_table(pa.table({"text": pa.array(["a" * 1_000] * 1_000_000)}), path)


def many_in_arrow(path):
    """Zeros that Zstandard packs to a ten-thousandth, in one batch."""
    values = pa.array(np.zeros(1_000_000_000, np.int8))
    table = pa.table({"query": pa.FixedSizeListArray.from_arrays(values, 100)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "suffix", "read"),
    [
        (zeros_in_an_archive, ".npz", QueryBank.load),
        (lambda path: zeros_in_an_archive(path, zipfile.ZIP_LZMA), ".npz", QueryBank.load),
        (equal_numbers, ".parquet", QueryBank.load),
        (equal_texts, ".parquet", lambda path: read_texts(None, str(path), "text", 10_000)),
        (repeated_texts, ".parquet", lambda path: read_texts(None, str(path), "text", 1_000_000)),
        (many_in_arrow, ".arrow", QueryBank.load),
    ],
    ids=["deflate", "lzma", "equal numbers", "equal texts", "repeated texts", "zstd"],
)
def test_a_small_file_does_not_fill_the_memory(tmp_path, place, suffix, read):
    path = tmp_path / f"bomb{suffix}"
    place(path)
    assert path.stat().st_size < 8 << 20
    before = peak_of(lambda: None)
    after = peak_of(lambda: read_and_be_refused(read, path))
    assert after - before < 400 << 20, f"{after - before:,} bytes"


def read_and_be_refused(read, path):
    with pytest.raises(HubnessError, match=r"^[^\n]*would grow from[^\n]*$"):
        read(path)


def test_weights_that_claim_more_than_they_have(tmp_path):
    wide = {
        "query_encoder.0.weight": torch.zeros(1).expand(10**6, 10**6),
        "pos_emb": torch.zeros(3, 4),
    }
    torch.save(wide, tmp_path / "wide.pt")
    with pytest.raises(
        HubnessError, match=r"wide.pt: .* has the shape \(1000000, 1000000\) and fewer numbers"
    ):
        Checkpoint.load_published(tmp_path / "wide.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(HubnessError, match=r"old.pt .* save it with torch.save again"):
        Checkpoint.load_published(tmp_path / "old.pt")
    layer = {"transformer.layers.0.linear1.weight": torch.zeros(64, 16)}
    flat = {
        "query_encoder.0.weight": torch.zeros(16, 8),
        "pos_emb": torch.zeros(2 * 10**12 + 2, 0),
        **layer,
    }
    save_file(flat, tmp_path / "flat.safetensors")
    with pytest.raises(HubnessError, match="not those of a network of these sizes"):
        Checkpoint.load_published(tmp_path / "flat.safetensors")


@pytest.mark.parametrize(
    "sizes",
    [
        {"dim": 10**9},
        {"memory": 10**12},
        {"form": "published", "width": 10**8},
        {"form": "published", "layers": 1_000},
    ],
    ids=str,
)
def test_a_network_whose_header_claims_other_sizes(tmp_path, sizes):
    from milvus_hubness.extras.quari import checkpoint
    from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings

    network = Checkpoint(QuariConfig(dim=4), TrainingSettings(), None, "none", 1)
    with torch.no_grad():
        weights = {
            f"weights.{name}": value
            for name, value in checkpoint.Quari(network.config).state_dict().items()
        }
    facts = network.facts()
    facts["config"] |= sizes
    facts["digest"] = checkpoint._digest(facts, weights)
    save_file(weights, tmp_path / "network", {"quari": json.dumps(facts)})
    tracemalloc.start()
    with pytest.raises(HubnessError, match="the weights are not those of a network of"):
        Checkpoint.load(tmp_path / "network")
    tracemalloc.stop()
