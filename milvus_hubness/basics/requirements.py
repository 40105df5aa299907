"""The versions of libraries and servers that this package works with, and a remedy for others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from milvus_hubness.errors import MissingExtra, UnsupportedVersion

EXTRAS = {
    **dict.fromkeys(("faiss", "jinja2", "pyarrow", "tenacity"), "check"),
    **dict.fromkeys(("safetensors", "scipy", "sklearn", "torch"), "jobs"),
    **dict.fromkeys(("cronsim", "prometheus_client", "starlette", "tomli", "uvicorn"), "serve"),
    "milvus_lite": "lite",
}
"""The extra of this package that installs a module."""

PACKAGES = ("milvus-hubness", "qdrant-hubness")
"""The packages whose requirements count, where they are installed."""

OLDEST_LITE = "3.1"
"""The first version of Milvus Lite that can store the state of a correction."""

OLDEST_MILVUS = (2, 3)

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<range>[^;)]*)\)?\s*(?:;(?P<marker>.*))?"
)
_BOUND = re.compile(r"(>=|<|==)\s*([\w.]+)")
_SERVER = re.compile(r"v?(\d+)\.(\d+)")


def install_line(extras: str = "") -> str:
    """Return the command that installs these extras of this package, from where it came itself.

    That is a package index, a clone, a wheel or a repository.
    """
    named = f"[{extras}]" if extras else ""
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        option = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {option}"{_path_of(url)}{named}"'
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}"
    place = f" @ {url}" if url else ""
    return f'pip install "{PACKAGES[0]}{named}{place}"'


def install_line_of(package: str, folder: str) -> str:
    """Return the command that installs another package, which a clone has in this folder."""
    origin = _origin()
    if "dir_info" in origin:
        path = Path(_path_of(origin["url"]), folder)
        if path.is_dir():
            return f'pip install "{path}"'
    return f"pip install {package}"


def _origin() -> dict[str, Any]:
    """Return where this package was installed from, as in PEP 610; empty for a package index."""
    clone = Path(__file__).parents[2]
    try:
        text = distribution(PACKAGES[0]).read_text("direct_url.json")
    except PackageNotFoundError:
        # It runs in a clone, without an installation.
        is_clone = (clone / "pyproject.toml").exists()
        return {"url": clone.as_uri(), "dir_info": {"editable": True}} if is_clone else {}
    return dict(json.loads(text)) if text else {}


def _path_of(url: str) -> str:
    return unquote(urlsplit(url).path)


@contextmanager
def naming_extras() -> Iterator[None]:
    """Raise MissingExtra in place of ModuleNotFoundError where an extra
    of this package installs the module, and UnsupportedVersion in place
    of any other ImportError where a library is of an unsupported version.
    """
    try:
        yield
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
            extra = EXTRAS[module]
            raise MissingExtra(
                f"{module} is not installed: {install_line(extra)}", extra
            ) from error

        if fault := unsupported_libraries():
            raise UnsupportedVersion(fault) from error

        raise


def unsupported_libraries() -> str:
    """Return, in one line, which installed libraries
    are of an unsupported version; empty if none is.

    This reads the metadata of all requirements, so
    it is for errors that such a library may explain.
    """
    faults = []
    required = []
    for package in PACKAGES:
        for name, bounds in _requirements(package):
            installed = _installed(name)
            if (
                installed
                and not _is_within(installed, bounds)
                and f"{name}{bounds}" not in required
            ):
                faults.append(f"{name} {installed} is installed, {package} needs {name}{bounds}")
                required.append(f"{name}{bounds}")

    if not faults:
        return ""

    return f"{'; '.join(faults)}: pip install {' '.join(repr(name) for name in required)}"


def unsupported_lite() -> str:
    """Return, in one line, that the installed Milvus Lite is too old; empty if it is not."""
    installed = _installed("milvus-lite")
    if installed is None or _numbers(installed) >= _numbers(OLDEST_LITE):
        return ""

    return (
        f"milvus-lite {installed} is installed, which cannot store the state of a correction: "
        f'pip install "milvus-lite>={OLDEST_LITE}"'
    )


def unsupported_milvus(server_version: str) -> str:
    """Return, in one line, that a server of this version is too old; empty if it is not.

    Versions that are not two numbers, as those of development builds, are accepted.
    """
    release = _SERVER.match(server_version)
    if release is None or (int(release[1]), int(release[2])) >= OLDEST_MILVUS:
        return ""

    oldest = ".".join(map(str, OLDEST_MILVUS))
    return f"the server runs Milvus {server_version}: upgrade it to {oldest} or newer"


def _requirements(package: str) -> list[tuple[str, str]]:
    """Return the names and the bounds of what a package requires, also for its extras."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return []

    named = []
    for line in lines:
        requirement = _REQUIREMENT.match(line)
        # Which of several Pythons a requirement is for would need a parser of markers.
        if requirement is None or "python_version" in (requirement["marker"] or ""):
            continue

        bounds = requirement["range"].replace(" ", "")
        if bounds:
            named.append((requirement["name"], bounds))

    return named


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_within(installed: str, bounds: str) -> bool:
    numbers = _numbers(installed)
    for operator, bound in _BOUND.findall(bounds):
        limit = _numbers(bound)
        if operator == ">=" and numbers < limit:
            return False
        if operator == "<" and numbers >= limit:
            return False
        if operator == "==" and numbers[: len(limit)] != limit:
            return False

    return True


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) for "2.13.0+cpu" and for "2.13.0rc1"."""
    numbers = []
    for number_text in text.split("+")[0].split("."):
        digits = re.match(r"\d+", number_text)
        if digits is None:
            break

        numbers.append(int(digits[0]))
    return tuple(numbers)
