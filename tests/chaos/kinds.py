"""The kinds of trials: the collection before, the two commands that overlap, and the commands at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.jobs import Job
from tests.chaos.scene import ALPHA, PENDING, K, Scene

NNN = ("--method", "nnn", "--param", f"k={K}", "--param", f"alpha={ALPHA}")
REFUSED_SECONDS = 20.0

Command = Callable[[Scene], Sequence[str]]


@dataclass(frozen=True)
class Kind:
    """group: of the kinds that are counted together. place: where biases are kept: copy or beside.
    first, seconds: the commands that overlap.
    renames: the application reads the source's own name."""

    group: str
    place: str
    prepare: Callable[[Scene], None]
    first: Command
    seconds: tuple[Command, ...]
    renames: bool = False

    def make(self, scene: Scene) -> None:
        """The collection, as it is before the first command."""
        scene.make(alias=not self.renames)
        self.prepare(scene)

    def finish(self, scene: Scene) -> None:
        """Whatever was left is brought to its end, and refreshed to the second bank."""
        if self.place == "copy":
            # The first of two may only finish what an earlier command began, a rollback for example.
            for _ in range(2):
                if not _is_switched(scene):
                    _until_done(scene, run, cutover_renaming if self.renames else cutover)
            assert _is_switched(scene), (
                "the last run exited with 0, and the application reads the source"
            )
        elif scene.state() is None:
            _until_done(scene, enable)
        _until_done(scene, refresh(1))


def _until_done(scene: Scene, *commands: Command) -> Job:
    """The first of these commands that exits with 0; again, where the lease of another is not over yet."""
    until = time.monotonic() + REFUSED_SECONDS
    while True:
        jobs = []
        for command in commands:
            jobs.append(scene.start("last", list(command(scene))))
            if jobs[-1].wait() == 0:
                return jobs[-1]
        assert time.monotonic() < until, "the last run fails: " + " | ".join(
            each.message for each in jobs
        )
        time.sleep(0.5)


def _is_switched(scene: Scene) -> bool:
    return bool(scene.read_collection() != scene.source and scene.state() is not None)


# -- commands ---------------------------------------------------------------------------------------------


def refresh(bank: int, *options: str) -> Command:
    return lambda scene: (
        *("refresh", scene.name, "--bank", str(scene.banks[bank]), *NNN, "--force"),
        *options,
    )


def serve(bank: int) -> Command:
    """The service, which looks at its collection once, and refreshes it to this bank."""
    return lambda scene: ("serve", "--once", "--config", str(scene.configuration(bank)))


def refresh_pending(scene: Scene) -> Sequence[str]:
    return ("refresh", scene.name)


def enable(scene: Scene) -> Sequence[str]:
    return ("enable", scene.source, "--bank", str(scene.banks[0]), *NNN, "--force")


def disable(scene: Scene) -> Sequence[str]:
    return ("disable", scene.source)


def copy(scene: Scene) -> Sequence[str]:
    return ("migrate", "run", scene.source, "--bank", str(scene.banks[0]), *NNN, "--force")


def run(scene: Scene) -> Sequence[str]:
    return (
        *copy(scene),
        *(("--rename",) if scene.name == scene.source else ("--alias", scene.name)),
    )


def restart(scene: Scene) -> Sequence[str]:
    return (*run(scene), "--restart")


def cutover(scene: Scene) -> Sequence[str]:
    return ("migrate", "cutover", scene.source, "--alias", scene.name)


def cutover_renaming(scene: Scene) -> Sequence[str]:
    return ("migrate", "cutover", scene.source, "--rename")


def rollback(scene: Scene) -> Sequence[str]:
    return ("migrate", "rollback", scene.name)


def drop_copy(scene: Scene) -> Sequence[str]:
    return ("migrate", "clean", scene.source, "--drop", f"{scene.source}_hubness", "--yes")


# -- what there is before ---------------------------------------------------------------------------------


def nothing(scene: Scene) -> None:
    pass


def enabled(scene: Scene) -> None:
    _do(scene, enable)


def copied(scene: Scene) -> None:
    _do(scene, lambda scene: (*copy(scene), "--no-writers"))


def migrated(scene: Scene) -> None:
    _do(scene, lambda scene: (*run(scene), "--no-writers"))


def pending(scene: Scene) -> None:
    enabled(scene)
    scene.insert(PENDING, pending=True)


def _do(scene: Scene, command: Command) -> None:
    scene.do(*command(scene))


KINDS: dict[str, Kind] = {
    "refresh": Kind("refresh", "copy", migrated, refresh(1), (refresh(1), refresh(2), rollback)),
    "refresh-beside": Kind(
        "refresh beside", "beside", enabled, refresh(1), (refresh(1), refresh(2), disable)
    ),
    "pending": Kind(
        "refresh beside",
        "beside",
        pending,
        refresh_pending,
        (refresh_pending, refresh(1)),
    ),
    "serve": Kind("serve", "copy", migrated, serve(1), (serve(1), serve(2), refresh(1), rollback)),
    "serve-beside": Kind("serve", "beside", enabled, serve(1), (serve(1), serve(2), refresh(1))),
    "enable-beside": Kind("enable", "beside", nothing, enable, (enable, disable)),
    "disable-beside": Kind("disable", "beside", enabled, disable, (disable, enable, refresh(1))),
    "migrate": Kind("migrate", "copy", nothing, run, (run, restart, drop_copy)),
    "migrate-rename": Kind("migrate", "copy", nothing, run, (run, restart), renames=True),
    "cutover": Kind("cutover", "copy", copied, cutover, (cutover, refresh(1), rollback, run)),
    "cutover-rename": Kind(
        "cutover", "copy", copied, cutover_renaming, (cutover_renaming, refresh(1)), renames=True
    ),
    "rollback": Kind("rollback", "copy", migrated, rollback, (rollback, refresh(1), cutover)),
    "clean": Kind("clean", "copy", copied, drop_copy, (run, cutover, drop_copy)),
}


def claims(scene: Scene, job: Job) -> dict[str, Any]:
    """What must hold, as a job that exited with 0 has it: "switched" whether the application reads a copy,
    "corrected" whether the collection it reads is."""
    words = [word for word in job.argv[:2] if not word.startswith("-")]
    if words[0] == "disable":
        return {"corrected": False}
    if words[0] == "serve" or (words[0] in ("enable", "refresh") and "_hubness" not in words[1]):
        return {"corrected": True}
    if "rollback" in words:
        return {"switched": False}
    if words[1] == "cutover" or {"--alias", "--rename"} & set(job.argv):
        return {"switched": True}
    return {}


def holds(scene: Scene, claim: dict[str, Any]) -> bool:
    found: dict[str, Callable[[], bool]] = {
        "switched": lambda: scene.read_collection() != scene.source,
        "corrected": lambda: scene.state() is not None,
    }
    return all(found[name]() == value for name, value in claim.items())
