"""Run folders: what is written is read again, and what is no run is refused in one line."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given

from tests.unit.tracing import record_strategies as some
from tests.unit.tracing.traces import batch, device, phase, record
from tracing import run_folder, schemas
from tracing.records import Category, GraphUse, RequestRecord, Span
from tracing.run_folder import REMEDY, RunFolderError, check_target, read_run, write_run
from tracing.trace import Records, Trace

FILES = ("config.json", "spans.parquet", "iterations.parquet", "requests.parquet")


def small_trace(name: str = "async", **fields: Any) -> Trace:
    records = Records(
        spans=[phase("prepare", 1, 4), device("forward", 3, 9)],
        iterations=[record(0, 0, 10, launched=batch(), wasted_rows={"eos": 1})],
        requests=[RequestRecord(request_id="r0", arrival_ns=0)],
    )
    return Trace(name=name, records=records, **fields)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_table(folder: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    path = folder / f"{name}.parquet"
    parquet.write_table(change(parquet.ParquetFile(path).read()), path)


def without(column: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([column])


def with_column(name: str, column: pa.Array) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, column)


def damaged(path: Path, data: bytes, rng: random.Random) -> bytes:
    """A file with one kind of damage."""
    kind = rng.choice(["flip", "flip", "cut", "lose", "drop"])
    place = rng.randrange(len(data))
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == "cut":
        return data[:place]
    if kind == "lose":
        return data[:place] + data[place + rng.randrange(1, 20) :]
    if path.suffix == ".json":
        value = json.loads(data)
        holder = value[0] if isinstance(value, list) else value
        del holder[rng.choice(sorted(holder))]
        return json.dumps(value).encode()
    table, buffer = parquet.ParquetFile(path).read(), pa.BufferOutputStream()
    parquet.write_table(table.drop_columns([rng.choice(table.column_names)]), buffer)
    return bytes(buffer.getvalue().to_pybytes())


def read_or_refusal(folder: Path) -> Trace | str:
    try:
        return read_run(folder)
    except RunFolderError as error:
        return str(error)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(small_trace(), tmp_path / "run")


class TestRoundTrip:
    @given(trace=some.traces())
    def test_gives_back_equal_traces(self, trace: Trace) -> None:
        with TemporaryDirectory() as folder:
            again = read_run(write_run(trace, Path(folder) / "run"))

        assert again == trace

    def test_an_empty_trace_too(self, tmp_path: Path) -> None:
        trace = Trace(name="", records=Records())

        assert read_run(write_run(trace, tmp_path / "run")) == trace

    def test_gives_back_equal_tables(self, tmp_path: Path) -> None:
        trace = small_trace()
        again = read_run(write_run(trace, tmp_path / "run"))

        for name in ("spans", "iterations", "requests", "phases", "device", "bubbles", "blame"):
            table = getattr(again, name)
            assert table.equals(getattr(trace, name))
            assert table.schema.equals(getattr(trace, name).schema)

    def test_the_files_are_the_tables_for_any_reader(self, run: Path) -> None:
        for name in ("spans", "iterations", "requests"):
            assert parquet.read_table(run / f"{name}.parquet").equals(getattr(small_trace(), name))

    def test_columns_and_keys_of_a_later_workbench_are_passed_over(self, run: Path) -> None:
        edit_table(run, "spans", lambda table: table.append_column("rank", pa.array([0] * table.num_rows)))
        edit_config(run, mood="good")

        assert read_run(run) == small_trace()

    @pytest.mark.parametrize(
        ("table", "columns"),
        [
            ("spans", "duration_ns"),
            ("iterations", "duration_ns host_ns wait_ns other_ns hidden_ns exposed_ns busy_ns is_void"),
            ("iterations", "consumed_kind launched_kind"),
            ("requests", "queue_delay_ns ttft_ns tpot_ns e2e_ns is_void"),
        ],
    )
    def test_columns_that_follow_from_others_may_be_missing(self, run: Path, table: str, columns: str) -> None:
        edit_table(run, table, lambda found: found.drop_columns(columns.split()))

        again = read_run(run)

        assert again == small_trace()
        assert getattr(again, table).equals(getattr(small_trace(), table)), "they are worked out again"

    def test_outputs_stand_in_a_file_of_their_own(self, tmp_path: Path) -> None:
        plain = write_run(small_trace(), tmp_path / "plain")
        told = write_run(small_trace(outputs=[{"request_id": "r0", "text": "é"}]), tmp_path / "told")

        assert names_in(plain) == set(FILES)
        assert names_in(told) == {*FILES, "outputs.json"}

    def test_folders_on_the_way_are_made_and_nothing_is_left_beside(self, tmp_path: Path) -> None:
        write_run(small_trace(), tmp_path / "a" / "b" / "run")

        assert names_in(tmp_path / "a" / "b") == {"run"}

    def test_a_folder_named_like_a_partition_adds_no_column(self, tmp_path: Path) -> None:
        assert read_run(write_run(small_trace(), tmp_path / "mode=x" / "rank=3")) == small_trace()


class TestTarget:
    def test_an_empty_folder_is_used(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()

        assert read_run(write_run(small_trace(), tmp_path / "run")) == small_trace()

    def test_a_run_is_replaced_only_if_asked(self, run: Path) -> None:
        with pytest.raises(RunFolderError, match="holds a run already"):
            write_run(small_trace("new"), run)
        assert read_run(run).name == "async"

        write_run(small_trace("new"), run, overwrite=True)

        assert read_run(run).name == "new"
        assert names_in(run.parent) == {"run"}

    def test_outputs_of_the_replaced_run_do_not_stay(self, tmp_path: Path) -> None:
        write_run(small_trace(outputs=[{"text": "old"}]), tmp_path / "run")

        write_run(small_trace(), tmp_path / "run", overwrite=True)

        assert read_run(tmp_path / "run").outputs == ()

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_nothing_else_is_ever_replaced(self, tmp_path: Path, run: Path, overwrite: bool) -> None:
        file, folder = tmp_path / "file", tmp_path / "folder"
        file.write_text("mine")
        folder.mkdir()
        (folder / "config.json").write_text('{"mine": 1}')
        (run / "notes.txt").write_text("mine")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        for target, said in ((file, "is a file"), (folder, "holds no run"), (run, "holds notes.txt")):
            with pytest.raises(RunFolderError, match=said):
                check_target(target, overwrite=overwrite)
            with pytest.raises(RunFolderError, match=said):
                write_run(small_trace("new"), target, overwrite=overwrite)

        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_write_that_fails_changes_nothing(self, run: Path, overwrite: bool) -> None:
        target = run if overwrite else run.parent / "other"
        before = {path: path.read_bytes() for path in run.iterdir()}
        bad = Span(name="x", category=Category.INSTANT, lane="host", start_ns=0, end_ns=0, args={"a": object()})

        for trace in (small_trace(config={"x": float("nan")}), Trace(name="x", records=Records(spans=[bad]))):
            with pytest.raises(RunFolderError, match="cannot be written"):
                write_run(trace, target, overwrite=overwrite)

        assert {path: path.read_bytes() for path in run.iterdir()} == before
        assert names_in(run.parent) == {"run"}

    def test_a_rename_that_fails_puts_the_old_run_back(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.name == "new":
                raise OSError("disk on fire")
            return honest(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="disk on fire"):
            write_run(small_trace("new"), run, overwrite=True)

        assert read_run(run) == small_trace()
        assert names_in(run.parent) == {"run"}


class TestReading:
    def refused(self, folder: Path, *said: str) -> None:
        with pytest.raises(RunFolderError) as caught:
            read_run(folder)
        message = str(caught.value)
        assert "\n" not in message
        for part in said:
            assert part in message

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere", "nowhere is no run", "no such folder")

    @pytest.mark.parametrize("name", FILES)
    def test_a_missing_file(self, run: Path, name: str) -> None:
        (run / name).unlink()

        self.refused(run, name, "is missing")

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("keep", [0, 0.5, 0.99])
    def test_a_truncated_file(self, run: Path, name: str, keep: float) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: int(len(data) * keep)])

        self.refused(run, name, "damaged")

    @pytest.mark.parametrize("name", FILES)
    def test_a_file_of_something_else(self, run: Path, name: str) -> None:
        (run / name).write_bytes(b"\xff\xfe\x00PK\n" * 100)

        self.refused(run, name, "damaged")

    @pytest.mark.parametrize("content", ["[]", "{}", '{"format": "mine"}', "3"])
    def test_a_head_of_something_else(self, run: Path, content: str) -> None:
        (run / "config.json").write_text(content)

        self.refused(run, "config.json", "is not the head of a run")

    def test_every_other_column_is_needed(self, run: Path) -> None:
        derived = (
            "duration_ns host_ns wait_ns other_ns hidden_ns exposed_ns busy_ns is_void consumed_kind launched_kind "
        )
        derived += "queue_delay_ns ttft_ns tpot_ns e2e_ns"
        later: dict[str, set[str]] = {"spans": set(), "iterations": {"num_device"}, "requests": set()}
        later["requests"] = {"void_reasons", "drafts_proposed", "drafts_accepted"}
        for table, added in later.items():
            path = run / f"{table}.parquet"
            data = path.read_bytes()
            for column in set(parquet.read_schema(path).names) - set(derived.split()) - added:
                edit_table(run, table, without(column))
                self.refused(run, path.name, f"column {column} is missing")
                path.write_bytes(data)

    def test_a_newer_format(self, run: Path) -> None:
        edit_config(run, version=run_folder.VERSION + 1)

        self.refused(run, f"format version {run_folder.VERSION + 1}", "update")

    @pytest.mark.parametrize("field", ["version", "rows", "name", "config", "lost_iterations", "device_clock_error_ns"])
    def test_a_head_with_a_field_of_another_kind(self, run: Path, field: str) -> None:
        edit_config(run, **{field: [1]})

        self.refused(run, "config.json", "damaged", field)

    @pytest.mark.parametrize(
        ("table", "change", "said"),
        [
            ("spans", without("start_ns"), "column start_ns is missing"),
            ("requests", with_column("arrival_ns", pa.array(["x"])), "column arrival_ns must be int64, is string"),
            ("iterations", with_column("begin_ns", pa.array([None], pa.int64())), "column begin_ns must hold no nulls"),
            ("spans", lambda table: table.slice(1), "holds 1 rows where config.json says 2"),
        ],
        ids=["missing column", "other type", "null", "rows of another run"],
    )
    def test_a_table_of_something_else(
        self, run: Path, table: str, change: Callable[[pa.Table], pa.Table], said: str
    ) -> None:
        edit_table(run, table, change)

        self.refused(run, f"{table}.parquet", said)

    def test_a_category_that_nobody_knows_and_args_that_are_no_object(self, run: Path) -> None:
        words = pa.array(["phase", "dance"]).dictionary_encode()
        edit_table(run, "spans", with_column("category", words))
        self.refused(run, "category holds 'dance'")

        write_run(small_trace(), run, overwrite=True)
        edit_table(run, "spans", with_column("args", pa.array([None, "[1]"])))
        self.refused(run, "args holds '[1]'")

    @pytest.mark.parametrize("name", ["config.json", "outputs.json"])
    @pytest.mark.parametrize("depth", [100, 100_000])
    def test_a_file_nested_too_deeply(self, run: Path, name: str, depth: int) -> None:
        """A RecursionError came out: of the reader, or of whoever printed what had been read."""
        deep = "[" * depth + "]" * depth
        (run / name).write_text(deep)
        self.refused(run, name, "damaged: it is nested too deeply", REMEDY)

        (run / name).write_text(json.dumps({"a": 0}).replace("0", deep))
        self.refused(run, name, "damaged: it is nested too deeply")

    @pytest.mark.parametrize(
        ("column", "kind", "leader"),
        [
            ("launched_num_tokens", pa.int64(), "launched_iteration"),
            ("launched_num_prefill", pa.int64(), "launched_iteration"),
            ("launched_num_decode", pa.int64(), "launched_iteration"),
            ("launched_request_ids", schemas.NAMES, "launched_iteration"),
            ("graph_hit", pa.bool_(), "graph_label"),
            ("graph_padding_tokens", pa.int64(), "graph_label"),
            ("graph_num_decode", pa.int64(), "graph_num_tokens"),
        ],
    )
    def test_half_a_batch_or_graph(self, run: Path, column: str, kind: pa.DataType, leader: str) -> None:
        """None in place of a batch's numbers broke whoever added them up."""
        graph = GraphUse(label="bucket", hit=True, dims=(1, 0, 1))
        records = Records(iterations=[record(0, 0, 10, launched=batch(), graph=graph)])
        write_run(Trace(name="x", records=records), run, overwrite=True)
        edit_table(run, "iterations", with_column(column, pa.array([None], kind)))

        self.refused(run, "iterations.parquet", f"column {column} holds a null in row 0, where {leader} holds", REMEDY)

    @pytest.mark.parametrize("name", FILES[1:])
    def test_a_flipped_byte(self, run: Path, name: str) -> None:
        """Arrow does not look: what lay in a page came back as other numbers, or as an error of pyarrow's."""
        data = (run / name).read_bytes()
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for place in range(4, footer, 19):
            (run / name).write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
            found = read_or_refusal(run)
            if isinstance(found, str):
                assert name in found
                assert "\n" not in found
            else:
                assert found == small_trace(), f"byte {place} changes what is read"

    def test_a_flipped_byte_in_a_file_without_checksums(self, run: Path) -> None:
        """As earlier versions wrote them: an index of a word that is not there came out as an IndexError."""
        edit_table(run, "spans", lambda table: table)
        path = run / "spans.parquet"
        data = path.read_bytes()
        for place in range(4, 200):
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
            found = read_or_refusal(run)
            assert not isinstance(found, str) or found.startswith(f"{path} is damaged"), f"byte {place}"

    @pytest.mark.parametrize("seed", range(8))
    def test_whatever_is_damaged_it_reads_or_is_refused_in_one_line(self, tmp_path: Path, seed: int) -> None:
        """Flipped and lost bytes, cut files, dropped keys and columns, in every file of a run."""
        rng = random.Random(seed)
        outputs = [{"request_id": "r0", "prompt_token_ids": [1], "output_token_ids": [2, 3], "text": "é"}]
        run = write_run(small_trace(outputs=outputs, config={"mode": "async", "graphs": [1, 2]}), tmp_path / "run")
        whole = {path: path.read_bytes() for path in sorted(run.iterdir())}
        refused = 0
        for number in range(120):
            path = sorted(whole)[number % len(whole)]
            path.write_bytes(damaged(path, whole[path], rng))
            found = read_or_refusal(run)
            if isinstance(found, str):
                refused += 1
                assert found.startswith(str(run))
                assert path.name in found
                assert "\n" not in found
            path.write_bytes(whole[path])
        assert 30 < refused < 120

    @pytest.mark.parametrize("content", ["{", "{}", "[1]"])
    def test_damaged_outputs(self, run: Path, content: str) -> None:
        (run / "outputs.json").write_text(content)

        self.refused(run, "outputs.json", "damaged")


class TestTrace:
    def test_needs_no_arrow_until_a_table_is_asked_for(self) -> None:
        code = (
            "import sys, tracing.recorder, tracing.run_folder, tracing.trace, workbench.session, engine\n"
            "trace = tracing.trace.Trace(name='x', records=tracing.trace.Records())\n"
            "trace.summary, repr(trace)\n"
            "assert 'pyarrow' not in sys.modules\n"
            "trace.phases\n"
            "assert 'pyarrow' in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_is_a_short_line_at_a_prompt(self) -> None:
        assert repr(small_trace()) == "<Trace async: 1 iterations, 2 spans>"
        assert re.fullmatch(r"<Records: 1 iterations, 1 requests, 2 spans>", repr(small_trace().records))

    def test_differs_where_any_part_does(self) -> None:
        trace = small_trace()

        assert trace == small_trace()
        assert trace != replace(trace, counters={"steps": 1})
        assert trace != replace(trace, records=replace(trace.records, spans=trace.records.spans[1:]))
