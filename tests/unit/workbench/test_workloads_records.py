"""Workloads from rows that Python code has: mappings, tables, frames."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.request import SamplingParams
from workbench.workloads import Workload, WorkloadError

ROWS = [
    {"at": 2.0, "read": 20, "write": 3, "ids": ["a", "b"]},
    {"at": 0.5, "read": 24, "write": 4, "ids": ["a", "c", "d"]},
]


def make(rows: Any, **options: Any) -> Workload:
    columns = {"arrival": "at", "input": "read", "output": "write", "prefix": "ids", "prefix_tokens": 8}
    return Workload.from_records(rows, **{**columns, "vocab_size": 64, **options})


class PandasLike:
    """What is used of a pandas DataFrame; the real one and polars' were tried by hand."""

    columns = ("at", "read", "write", "ids")

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [
            {**row, "read": np.int64(row["read"]), "write": np.float64(row["write"]), "ids": np.array(row["ids"])}
            for row in ROWS
        ]


class TestRows:
    def test_become_requests_by_arrival_with_shared_prefixes(self) -> None:
        workload = make(ROWS)

        assert [spec.arrival for spec in workload.requests] == [0, 1.5]
        assert [len(spec.prompt) for spec in workload.requests] == [24, 20]
        assert [spec.params.max_tokens for spec in workload.requests] == [4, 3]
        first, second = (tuple(spec.prompt) for spec in workload.requests)
        assert first[:8] == second[:8]
        assert first[8:16] != second[8:16]
        assert repr(workload) == "records: 2 requests, 44 prompt tokens, over 1.5 s"

    @pytest.mark.parametrize(
        "rows", [pa.Table.from_pylist(ROWS), PandasLike(), iter(ROWS)], ids=["arrow", "pandas", "iterator"]
    )
    def test_of_any_kind_of_table_give_the_same(self, rows: Any) -> None:
        assert make(rows).requests == make(ROWS).requests

    def test_may_tell_moments_in_any_zone(self) -> None:
        noon = datetime(2024, 3, 31, 12, tzinfo=UTC)
        rows = [
            {"at": noon, "read": 1, "write": 1},
            {"at": (noon + timedelta(seconds=3)).astimezone(timezone(timedelta(hours=2))), "read": 1, "write": 1},
            {"at": "2024-03-31T12:00:07.25Z", "read": 1, "write": 1},
            {"at": "2024-03-31 12:00:08", "read": 1, "write": 1},
        ]

        assert [spec.arrival for spec in make(rows, prefix=None).requests] == [0, 3, 7.25, 8]

    def test_without_arrivals_are_a_closed_loop(self) -> None:
        workload = make(ROWS, arrival=None)

        assert workload.is_closed
        assert [len(spec.prompt) for spec in workload.requests] == [20, 24]

    def test_share_sampling_and_count_seeds_on(self) -> None:
        params = SamplingParams(temperature=0.7, top_k=5, seed=40)

        first, second = make(ROWS, arrival=None, params=params).requests

        assert first.params == params.replace(max_tokens=3)
        assert second.params == params.replace(max_tokens=4, seed=41)

    def test_are_greedy_and_keep_their_lengths_by_default(self) -> None:
        (params, _) = (spec.params for spec in make(ROWS).requests)

        assert params.is_greedy
        assert params.ignore_eos


class NoMoment(datetime):
    """As pandas' NaT."""

    def timestamp(self) -> float:
        raise ValueError("NaTType does not support timestamp")


class TestMalformedRows:
    def test_a_missing_moment_of_a_frame_is_told_and_stops_nothing(self) -> None:
        """One NaT in a DataFrame's column of arrivals was an exception of pandas' own."""
        rows = [{"at": moment, "read": 1, "write": 1} for moment in (datetime(2024, 1, 1), NoMoment(2024, 1, 1))]

        (note,) = make(rows, prefix=None).notes

        assert note.startswith("1 of 2 rows are malformed and left out: row 1: at must be a number or a timestamp, got")

    def test_are_told_by_their_place(self) -> None:
        rows = [*ROWS, (1, 2), {"at": 1, "read": 1}, {"at": 1, "read": float("nan"), "write": 1, "ids": []}]

        workload = make(rows)

        assert workload.notes == (
            "3 of 5 rows are malformed and left out: "
            "row 2: is a tuple; expected a mapping of column names to values; "
            "row 3: has no 'write', only at, read; "
            "row 4: read must be a whole number of at least 1, got nan",
        )
        assert workload.to_dict()["notes"] == list(workload.notes)

    def test_more_ids_than_the_prompt_has_room_for(self) -> None:
        (note,) = make([*ROWS, {"at": 1, "read": 8, "write": 1, "ids": ["a", "b"]}]).notes

        assert note.endswith("row 2: ids has 2 ids of 8 tokens, 8 prompt tokens have 1")

    def test_a_wrong_column_is_an_error_that_lists_those_there_are(self) -> None:
        with pytest.raises(
            WorkloadError, match=r"records holds no request: .* has no 'raed', only at, read, write, ids"
        ):
            make(ROWS, input="raed")

    @pytest.mark.parametrize("rows", ["text", 7, {"read": [1]}])
    def test_what_is_no_table_is_refused(self, rows: Any) -> None:
        with pytest.raises(WorkloadError, match="rows must be mappings of column names to values, a DataFrame or"):
            make(rows)

    def test_bad_arguments_are_refused(self) -> None:
        with pytest.raises(WorkloadError, match="unit must be one of"):
            make(ROWS, unit="h")
        with pytest.raises(WorkloadError, match="prefix_tokens must be at least 1"):
            make(ROWS, prefix_tokens=0)
