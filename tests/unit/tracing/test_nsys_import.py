from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nsys_exports import (
    GLOBAL_PID,
    GLOBAL_TID,
    GRAPH_2023,
    KERNEL_2023,
    MEMCPY_2023,
    MEMSET_2023,
    NVTX_2023,
    PROCESS,
    RUNTIME_2023,
    THREAD,
    about,
    nvtx_names,
    nvtx_range,
    strings,
    write_tables,
)
from tracing.importing import ImportedKind, ImportedSpan, ImportedTrace, TraceImportError
from tracing.nsys_import import read_nsys

SHIPPED = Path(__file__).resolve().parents[3] / "notebooks" / "data" / "nsys" / "nsys.sqlite"


def nvtx_trace(path: Path, rows: list[Any], columns: list[str] = NVTX_2023, **more: Any) -> ImportedTrace:
    return read_nsys(write_tables(path, {**about(), "NVTX_EVENTS": (columns, [*nvtx_names(), *rows]), **more}))


def only(trace: ImportedTrace) -> ImportedSpan:
    (span,) = trace.spans
    return span


class TestRanges:
    def test_have_domain_category_payload_process_and_thread(self, tmp_path: Path) -> None:
        rows = [nvtx_range(10, 30, text="prepare", int64Value=7)]

        assert only(nvtx_trace(tmp_path / "e.sqlite", rows)) == ImportedSpan(
            kind=ImportedKind.RANGE,
            name="prepare",
            start_ns=10,
            end_ns=30,
            domain="engine",
            category="phase",
            payload=7,
            process=PROCESS,
            thread=THREAD,
        )

    def test_may_have_their_name_in_the_table_of_strings(self, tmp_path: Path) -> None:
        rows = [nvtx_range(10, 30, textId=2)]

        assert only(nvtx_trace(tmp_path / "e.sqlite", rows, **strings("sample", "resolve"))).name == "resolve"

    @pytest.mark.parametrize(
        ("column", "value"),
        [("int64Value", -4), ("uint64Value", 5), ("uint32Value", 6), ("int32Value", 0), ("doubleValue", 0.5)],
    )
    def test_have_a_payload_of_any_kind(self, tmp_path: Path, column: str, value: float) -> None:
        rows = [nvtx_range(10, 30, text="prepare", **{column: value})]

        assert only(nvtx_trace(tmp_path / "e.sqlite", rows)).payload == value

    def test_that_start_and_end_anywhere_are_read_too(self, tmp_path: Path) -> None:
        rows = [nvtx_range(10, 30, eventType=60, category=1, text="overlap", rangeId=3)]

        assert only(nvtx_trace(tmp_path / "e.sqlite", rows)).category == "iteration"

    def test_of_another_process_do_not_borrow_its_names(self, tmp_path: Path) -> None:
        rows = [nvtx_range(10, 30, text="prepare", globalTid=GLOBAL_TID + (1 << 24))]

        span = only(nvtx_trace(tmp_path / "e.sqlite", rows))
        assert (span.domain, span.category) == (None, "2")

    def test_still_open_at_the_end_are_left_out_with_a_note(self, tmp_path: Path) -> None:
        rows = [nvtx_range(10, 30, text="prepare"), nvtx_range(20, None, text="resolve")]

        trace = nvtx_trace(tmp_path / "e.sqlite", rows)
        assert only(trace).name == "prepare"
        assert trace.notes == ("1 NVTX ranges were open when the recording stopped: they are left out",)

    def test_are_known_by_the_exports_own_numbers(self, tmp_path: Path) -> None:
        kinds = {"NvtxPushPopRange": 159, "NvtxDomainCreate": 175, "NvtxCategory": 133}
        enum = (["id", "name", "label"], [{"id": number, "name": name} for name, number in kinds.items()])
        renumbered = [
            {**row, "eventType": row["eventType"] + 100} for row in [*nvtx_names(), nvtx_range(1, 2, text="x")]
        ]
        tables = {**about(), "NVTX_EVENTS": (NVTX_2023, renumbered), "ENUM_NSYS_EVENT_TYPE": enum}

        span = only(read_nsys(write_tables(tmp_path / "e.sqlite", tables)))
        assert (span.domain, span.category) == ("engine", "phase")

    def test_are_read_from_a_schema_with_fewer_columns(self, tmp_path: Path) -> None:
        columns = ["start", "end", "eventType", "text", "globalTid"]
        tables = {**about(), "NVTX_EVENTS": (columns, [nvtx_range(10, 30, text="prepare")])}

        span = only(read_nsys(write_tables(tmp_path / "e.sqlite", tables)))
        assert (span.name, span.domain, span.category, span.payload) == ("prepare", None, None, None)

    def test_marks_have_no_length(self, tmp_path: Path) -> None:
        span = only(nvtx_trace(tmp_path / "e.sqlite", [nvtx_range(10, None, eventType=34, text="abort")]))

        assert (span.kind, span.duration_ns) == (ImportedKind.MARK, 0)


def cuda_tables() -> dict[str, Any]:
    """A launched kernel, a graph, a copy and a fill."""
    device = {"deviceId": 0, "contextId": 1, "globalPid": GLOBAL_PID}
    call = {"globalTid": GLOBAL_TID, "nameId": 1}
    return {
        **about(),
        **strings("cudaLaunchKernel_v7000", "gemm", "void gemm<float>(float*)"),
        "ENUM_CUDA_MEMCPY_OPER": (["id", "name", "label"], [{"id": 1, "name": "HTOD", "label": "Host-to-Device"}]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (RUNTIME_2023, [{**call, "start": 1, "end": 3, "correlationId": 9}]),
        "CUPTI_ACTIVITY_KIND_KERNEL": (
            KERNEL_2023,
            [{**device, "start": 5, "end": 9, "streamId": 7, "correlationId": 9, "shortName": 2, "demangledName": 3}],
        ),
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
            GRAPH_2023,
            [{**device, "start": 10, "end": 20, "streamId": 7, "correlationId": 10, "graphId": 4, "graphExecId": 5}],
        ),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            MEMCPY_2023,
            [{**device, "start": 2, "end": 4, "streamId": 8, "correlationId": 11, "bytes": 64, "copyKind": 1}],
        ),
        "CUPTI_ACTIVITY_KIND_MEMSET": (
            MEMSET_2023,
            [{**device, "start": 21, "end": 22, "streamId": 7, "correlationId": 12, "bytes": 16}],
        ),
    }


class TestDeviceWork:
    def test_is_read_by_kind_in_the_order_of_starts(self, tmp_path: Path) -> None:
        trace = read_nsys(write_tables(tmp_path / "e.sqlite", cuda_tables()))

        assert [(span.kind.value, span.name, span.stream, span.correlation) for span in trace.spans] == [
            ("runtime", "cudaLaunchKernel", None, 9),
            ("memcpy", "Host-to-Device", 8, 11),
            ("kernel", "gemm", 7, 9),
            ("graph", "graph", 7, 10),
            ("memset", "memset", 7, 12),
        ]
        assert trace.notes == ()
        assert [span.bytes for span in trace.of(ImportedKind.MEMCPY, ImportedKind.MEMSET)] == [64, 16]
        assert trace.of(ImportedKind.GRAPH)[0].graph == 5
        assert {span.process for span in trace.spans} == {PROCESS}

    def test_of_a_newer_schema_is_read_and_its_new_columns_are_passed_over(self, tmp_path: Path) -> None:
        tables = cuda_tables()
        columns, (kernel,) = tables["CUPTI_ACTIVITY_KIND_KERNEL"]
        newer = {**kernel, "graphId": 4, "graphNodeId": 17, "greenContextId": 2, "clusterX": 1}
        tables["CUPTI_ACTIVITY_KIND_KERNEL"] = [*columns, "graphId", "greenContextId", "clusterX"], [newer]

        (span,) = read_nsys(write_tables(tmp_path / "e.sqlite", tables)).of(ImportedKind.KERNEL)
        assert (span.graph, span.graph_node) == (4, 17)

    def test_a_table_without_what_is_needed_becomes_a_note(self, tmp_path: Path) -> None:
        tables = cuda_tables()
        tables["CUPTI_ACTIVITY_KIND_KERNEL"] = ["begin", "end", "streamId"], [{"begin": 1, "end": 2, "streamId": 7}]

        trace = read_nsys(write_tables(tmp_path / "e.sqlite", tables))
        assert trace.of(ImportedKind.KERNEL) == ()
        assert trace.notes == ("table CUPTI_ACTIVITY_KIND_KERNEL lacks the column start: it is not read",)

    def test_without_an_end_is_left_out_with_a_note(self, tmp_path: Path) -> None:
        tables = cuda_tables()
        columns, (kernel,) = tables["CUPTI_ACTIVITY_KIND_KERNEL"]
        tables["CUPTI_ACTIVITY_KIND_KERNEL"] = columns, [kernel, {**kernel, "end": None}]

        trace = read_nsys(write_tables(tmp_path / "e.sqlite", tables))
        assert len(trace.of(ImportedKind.KERNEL)) == 1
        assert trace.notes == ("table CUPTI_ACTIVITY_KIND_KERNEL: 1 rows without a start or an end are left out",)


class TestTheExport:
    def test_tells_its_version_and_when_it_began(self, tmp_path: Path) -> None:
        trace = read_nsys(write_tables(tmp_path / "e.sqlite", cuda_tables() | about("2025.3.1.90", 123)))

        assert (trace.source, trace.start_epoch_ns) == ("Nsight Systems 2025.3.1.90", 123)

    def test_unknown_tables_are_noted_unless_they_are_empty_or_of_no_account(self, tmp_path: Path) -> None:
        more = {
            "CUDA_GRAPH_NODE_EVENTS_V2": (["start"], [{"start": 1}, {"start": 2}]),
            "GPU_METRICS": (["start"], []),
            "ENUM_NEW_KIND": (["id"], [{"id": 1}]),
            "TARGET_INFO_GPU": (["name"], [{"name": "H200"}]),
        }

        trace = read_nsys(write_tables(tmp_path / "e.sqlite", cuda_tables() | more))
        assert trace.notes == ("table CUDA_GRAPH_NODE_EVENTS_V2 (2 rows) is not read",)

    def test_without_events_is_a_trace_that_says_so(self, tmp_path: Path) -> None:
        trace = read_nsys(write_tables(tmp_path / "e.sqlite", about()))

        assert trace.spans == ()
        assert trace.notes == ("it holds no event of a kind that is read",)

    def test_moved_lies_on_another_clock(self, tmp_path: Path) -> None:
        trace = read_nsys(write_tables(tmp_path / "e.sqlite", cuda_tables()))

        moved = trace.moved(1000)
        assert [span.start_ns - 1000 for span in moved.spans] == [span.start_ns for span in trace.spans]
        assert [span.duration_ns for span in moved.spans] == [span.duration_ns for span in trace.spans]
        assert moved.start_epoch_ns is None

    def test_of_nsys_2023_4_4_is_read_whole(self) -> None:
        trace = read_nsys(SHIPPED)

        assert trace.source == "Nsight Systems 2023.4.4.54"
        assert trace.notes == ()
        assert {span.category for span in trace.spans} == {"iteration", "phase", "copy", "wait", "capture"}
        assert {span.domain for span in trace.spans} == {"engine"}


class TestFaults:
    def test_a_missing_file_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(TraceImportError, match=r"nothing\.sqlite cannot be read: No such file"):
            read_nsys(tmp_path / "nothing.sqlite")

    def test_an_empty_file_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.sqlite"
        path.touch()
        with pytest.raises(TraceImportError, match=r"empty\.sqlite is empty"):
            read_nsys(path)

    @pytest.mark.parametrize("name", ["report.nsys-rep", "report.qdstrm"])
    def test_a_report_is_told_from_its_export_with_the_command_that_makes_it(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(b"\x00" * 200)
        with pytest.raises(TraceImportError, match=r"is a report.*: nsys export --type sqlite"):
            read_nsys(tmp_path / name)

    def test_another_format_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": []}))
        with pytest.raises(TraceImportError, match="is no SQLite file"):
            read_nsys(path)

    def test_a_database_of_something_else_is_told(self, tmp_path: Path) -> None:
        path = write_tables(tmp_path / "history.sqlite", {"urls": (["url"], [{"url": "x"}])})
        with pytest.raises(TraceImportError, match="no export of Nsight Systems"):
            read_nsys(path)

    def test_a_folder_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(TraceImportError, match="cannot be read"):
            read_nsys(tmp_path)

    def test_a_truncated_file_is_told_with_its_size(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.sqlite"
        path.write_bytes(SHIPPED.read_bytes()[:-4096])
        with pytest.raises(TraceImportError, match=r"cut\.sqlite is truncated: [\d,]+ of [\d,]+ bytes"):
            read_nsys(path)

    @pytest.mark.parametrize("value", ["soon", 1e300, b"\x00\x01"])
    def test_a_column_that_holds_no_time_is_told(self, tmp_path: Path, value: object) -> None:
        tables = cuda_tables()
        columns, (kernel,) = tables["CUPTI_ACTIVITY_KIND_KERNEL"]
        tables["CUPTI_ACTIVITY_KIND_KERNEL"] = columns, [{**kernel, "start": value, "end": float("inf")}]
        with pytest.raises(TraceImportError, match="is damaged"):
            read_nsys(write_tables(tmp_path / "e.sqlite", tables))

    def test_nothing_is_written_beside_it(self, tmp_path: Path) -> None:
        path = write_tables(tmp_path / "e.sqlite", cuda_tables())
        before = path.read_bytes()
        read_nsys(path)
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == before

    @given(data=st.data())
    def test_damage_anywhere_is_an_import_error_or_harmless(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        content = bytearray(SHIPPED.read_bytes())
        for _ in range(data.draw(st.integers(1, 20))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.mktemp("damaged") / "e.sqlite"
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            spans: tuple[ImportedSpan, ...] = read_nsys(path).spans
        except TraceImportError:
            spans = ()  # any other error would fail the test
        assert all(isinstance(span.start_ns, int) for span in spans)
