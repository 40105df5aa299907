"""The sizes of the processor's caches, which tiles are cut to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL = {2: 1 << 20, 3: 16 << 20}
"""Bytes that a level is taken to have where the system does not tell, as outside Linux."""

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@cache
def cache_bytes(level: int, system: Path = SYSTEM) -> int:
    """Bytes of the cache of data of this level, 2 or 3, that the first core has or shares, from Linux's
    sysfs; those of `USUAL` where it does not tell."""
    for index in sorted(system.glob("index*")):
        try:
            result, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if int(result) == level and kind != "Instruction":
                return int(size.rstrip("".join(UNITS))) * UNITS.get(size[-1:], 1) or USUAL[level]
        except (OSError, ValueError):
            continue
    return USUAL[level]
