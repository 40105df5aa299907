"""Where the files lie that a copy is imported from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from milvus_hubness.errors import CannotMigrate, InvalidInput
from milvus_hubness.stores.base import CollectionInfo, Store


@dataclass(frozen=True)
class BulkTarget:
    """A folder that this process writes to and the database reads from. remote: how the database calls it,
    its path there or a prefix in its bucket; None where both call it the same."""

    folder: Path
    remote: str | None = None

    @classmethod
    def parse(cls, text: str) -> BulkTarget:
        """LOCAL or LOCAL=REMOTE."""
        folder, equals, remote = text.partition("=")
        return cls(Path(folder), remote if equals else None)

    def seen_by_database(self, file: str) -> str:
        """The path of a file in the folder as the database calls it."""
        remote = str(self.folder.resolve()) if self.remote is None else self.remote
        return f"{remote.rstrip('/')}/{file}" if remote else file

    def require(self, store: Store, source: CollectionInfo) -> None:
        """Raises InvalidInput where the folder is not there, and CannotMigrate where rows of `source` cannot
        go through files."""
        if not self.folder.is_dir():
            raise InvalidInput(f"there is no folder {self.folder} for files to import")
        if reasons := store.import_obstacles(source):
            raise CannotMigrate(f"{source.name!r} cannot be copied by files: {'; '.join(reasons)}")
