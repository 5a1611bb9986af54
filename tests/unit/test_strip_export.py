"""A stripped export reads as before, and tells nothing of the machine it was made on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.nsys_exports import NVTX_2023, RUNTIME_2023, about, nvtx_names, nvtx_range, strings, write_tables
from tools.strip_export import main, strip_export
from tracing.nsys_import import read_nsys

SHIPPED = Path(__file__).resolve().parents[2] / "notebooks" / "data" / "nsys" / "nsys.sqlite"


def export(path: Path) -> Path:
    facts = about()
    facts["META_DATA_EXPORT"][1].append({"name": "EXPORT_HOST", "value": "secret-host"})
    tables = {
        **facts,
        **strings("resolve", "secret-string", "cudaLaunchKernel_v7000"),
        "NVTX_EVENTS": (NVTX_2023, [*nvtx_names(), nvtx_range(1, 5, textId=1, int64Value=3)]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (RUNTIME_2023, [{"start": 2, "end": 3, "nameId": 3, "globalTid": 1}]),
        "META_DATA_CAPTURE": (["name", "value"], [{"name": "ENVIRONMENT", "value": "TOKEN=secret-token"}]),
    }
    return write_tables(path, tables)


def test_it_reads_as_before(tmp_path: Path) -> None:
    source = export(tmp_path / "in.sqlite")

    strip_export(source, tmp_path / "out.sqlite")

    before, after = read_nsys(source), read_nsys(tmp_path / "out.sqlite")
    assert len(before.spans) == 2
    assert (after.spans, after.source, after.start_epoch_ns) == (before.spans, before.source, before.start_epoch_ns)


def test_nothing_of_the_machine_is_left_in_the_file(tmp_path: Path) -> None:
    strip_export(export(tmp_path / "in.sqlite"), tmp_path / "out.sqlite")

    assert b"secret" not in (tmp_path / "out.sqlite").read_bytes()


def test_a_wrong_call_is_one_line_that_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, text = export(tmp_path / "in.sqlite"), tmp_path / "out.sqlite", tmp_path / "text.sqlite"
    text.write_text("TOKEN=secret-token", encoding="utf-8")
    before = source.read_bytes()
    for arguments, fault in (
        ([], "takes IN and OUT, got 0 arguments"),
        ([source], "got 1 arguments"),
        ([source, source], "IN and OUT are both"),
        ([tmp_path / "none", target], "none: No such file"),
        ([text, target], "text.sqlite is no SQLite export of Nsight Systems"),
    ):
        assert main([str(one) for one in arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("strip_export: ")
        assert fault in said
        assert said.count("\n") == 1
        assert not target.exists()
    assert source.read_bytes() == before

    assert main([str(source), str(target)]) == 0
    assert len(read_nsys(target).spans) == 2


def test_what_is_shipped_is_stripped() -> None:
    with closing(sqlite3.connect(SHIPPED)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert tables == {
        "NVTX_EVENTS",
        "StringIds",
        "META_DATA_EXPORT",
        "TARGET_INFO_SESSION_START_TIME",
        "ENUM_NSYS_EVENT_TYPE",
    }
    assert SHIPPED.stat().st_size < 200_000
