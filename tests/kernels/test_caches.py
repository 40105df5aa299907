"""Tiles are cut to the caches that the system tells of."""

from __future__ import annotations

import os

import pytest

from milvus_hubness.kernels import operands, screened
from milvus_hubness.kernels.operands import USUAL, cache_bytes


def told(folder, *caches_):
    for number, (level, kind, size) in enumerate(caches_):
        index = folder / f"index{number}"
        index.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (index / name).write_text(f"{text}\n")
    return folder


def test_sizes_are_read_by_level(tmp_path):
    system = told(
        tmp_path,
        (1, "Data", "48K"),
        (1, "Instruction", "32K"),
        (2, "Instruction", "64K"),
        (2, "Unified", "2048K"),
        (3, "Unified", "96M"),
    )
    assert cache_bytes(2, system) == 2 << 20
    assert cache_bytes(3, system) == 96 << 20


def test_what_is_not_told_is_as_usual(tmp_path):
    assert cache_bytes(3, tmp_path / "nowhere") == USUAL[3]
    system = told(tmp_path / "odd", (2, "Unified", "a lot"), (3, "Unified", "0K"))
    assert (cache_bytes(2, system), cache_bytes(3, system)) == (USUAL[2], USUAL[3])
    (system / "index0" / "size").unlink()
    cache_bytes.cache_clear()
    assert cache_bytes(2, system) == USUAL[2]


@pytest.mark.skipif(not operands.SYSTEM.is_dir(), reason="the system tells nothing of its caches")
def test_this_machine_tells():
    known = os.sysconf("SC_LEVEL2_CACHE_SIZE") if "SC_LEVEL2_CACHE_SIZE" in os.sysconf_names else 0
    if known <= 0:
        pytest.skip("the C library does not know the size either")
    assert cache_bytes(2) == known


@pytest.mark.parametrize(
    ("second", "third", "dim", "tiles"),
    [
        (1 << 20, 32 << 20, 512, (512, 32_768)),
        (1 << 20, 32 << 20, 300, (768, 21_824)),
        (1 << 20, 32 << 20, 64, (1024, 16_384)),
        (256 << 10, 8 << 20, 1024, (128, 32_768)),
        (2 << 20, 4 << 20, 512, (1024, 16_384)),
    ],
)
def test_tiles_follow_from_the_caches(monkeypatch, second, third, dim, tiles):
    monkeypatch.setattr(screened, "cache_bytes", {2: second, 3: third}.__getitem__)
    assert screened.tiles_for(dim) == tiles
