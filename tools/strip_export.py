"""Cut an SQLite export of Nsight Systems down to what our reader reads: ``python tools/strip_export.py IN OUT``.

An export holds the whole environment of the profiled process and the machine's name; what is shipped with the
notebooks, or shown to others, must not.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

KEPT_TABLES = ("NVTX_EVENTS", "StringIds", "META_DATA_EXPORT", "TARGET_INFO_SESSION_START_TIME", "ENUM_NSYS_EVENT_TYPE")
KEPT_PREFIX = "CUPTI_ACTIVITY_KIND_"
KEPT_FACTS = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION", "EXPORT_PLATFORM")
NAME_COLUMNS = ("textId", "nameId", "shortName", "demangledName", "mangledName")
"""Columns that hold ids of strings."""


def strip_export(source: Path, target: Path) -> None:
    """Write ``target``, a smaller ``source``; strings that no kept row names go too."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        kept = [name for name in tables if name in KEPT_TABLES or name.startswith(KEPT_PREFIX)]
        for name in set(tables) - set(kept):
            connection.execute(f'DROP TABLE "{name}"')
        marks = ",".join("?" * len(KEPT_FACTS))
        connection.execute(f"DELETE FROM META_DATA_EXPORT WHERE name NOT IN ({marks})", KEPT_FACTS)
        used = " UNION ".join(_string_ids(connection, kept))
        connection.execute(f"DELETE FROM StringIds WHERE id NOT IN ({used})")
        connection.commit()
        connection.execute("VACUUM")


def _string_ids(connection: sqlite3.Connection, tables: list[str]) -> list[str]:
    queries = ["SELECT -1"]
    for table in tables:
        columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
        queries += [
            f'SELECT "{name}" FROM "{table}" WHERE "{name}" NOT NULL' for name in NAME_COLUMNS if name in columns
        ]
    return queries


def main(arguments: Sequence[str]) -> int:
    """Run as a program; returns its exit status."""
    if len(arguments) != 2:
        return _refuse(f"takes IN and OUT, got {len(arguments)} arguments: python tools/strip_export.py IN OUT")
    source, target = map(Path, arguments)
    if target.exists() and target.samefile(source):
        return _refuse(f"IN and OUT are both {source}; name another OUT")
    try:
        strip_export(source, target)
    except OSError as error:
        return _refuse(f"cannot use {error.filename}: {error.strerror}")
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)  # it holds what was to be cut off
        return _refuse(f"{source} is no SQLite export of Nsight Systems: {error}")
    return 0


def _refuse(why: str) -> int:
    print(f"strip_export: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
