"""Workloads from trace files: every format, and every way in which a row can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.workloads import Workload, WorkloadError, parse_workload

TRACES = Path("/work/shared/data/traces")
has_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not on this machine")

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(text: str) -> Path:
        path = tmp_path / "trace.txt"
        path.write_text(text, encoding="utf-8", newline="")
        return path

    return put


def parse(text: str) -> Workload:
    return parse_workload(text, vocab_size=64)


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(spec.prompt), spec.params.max_tokens) for spec in workload.requests]


def arrivals(workload: Workload) -> list[float]:
    return [round(spec.arrival, 6) for spec in workload.requests]


class TestAzure:
    def test_reads_moments_of_seven_digits_as_seconds_from_the_first(self, write: Write) -> None:
        path = write(AZURE + "2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.2500000,396,109")

        workload = parse(f"azure:{path}")

        assert arrivals(workload) == [0, 1.75]
        assert lengths(workload) == [(374, 44), (396, 109)]
        assert (workload.unit, workload.is_closed, workload.notes) == ("s", False, ())

    def test_names_the_columns_of_a_file_that_is_no_such_trace(self, write: Write) -> None:
        path = write("when,in,out\n1,2,3\n")

        with pytest.raises(WorkloadError, match="no column 'TIMESTAMP' for arrival=; the columns are: when, in, out"):
            parse(f"azure:{path}")

    @has_traces
    def test_reads_the_published_file_whole(self) -> None:
        workload = parse(f"azure:{TRACES / 'azure_llm_2023_conv.csv'}")

        assert len(workload.requests) == 19_366
        assert workload.requests[-1].arrival == pytest.approx(3501.7, abs=0.1)
        assert max(lengths(workload))[0] == 14_050
        assert not workload.notes


class TestBurstGpt:
    rows = BURSTGPT + "5,ChatGPT,472,18,490,Conversation log\n9,GPT-4,0,0,0,API log\n45,GPT-4,10,3,13,API log\n"

    def test_counts_failed_requests_and_schedules_none(self, write: Write) -> None:
        workload = parse(f"burstgpt:{write(self.rows)}")

        assert lengths(workload) == [(472, 18), (10, 3)]
        assert arrivals(workload) == [0, 40]
        assert workload.notes == ("1 of 3 rows are failed requests and left out: line 3",)

    def test_goes_by_column_names_for_newer_files_have_more_columns(self, write: Write) -> None:
        head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        path = write(head + "5,7,1.5,ChatGPT,472,18,490,Conversation log\n")

        assert lengths(parse(f"burstgpt:{path}")) == [(472, 18)]

    @has_traces
    def test_reads_the_published_excerpt(self) -> None:
        workload = parse(f"burstgpt:{TRACES / 'burstgpt_1_head400.csv'}")

        assert len(workload.requests) == 383
        assert workload.notes[0].startswith("17 of 400 rows are failed requests and left out: line ")
        assert workload.requests[-1].arrival == pytest.approx(37_269)


def mooncake_line(**changes: Any) -> str:
    row = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2], **changes}
    return json.dumps({key: value for key, value in row.items() if value is not None}) + "\n"


class TestMooncake:
    def test_equal_hashes_are_equal_tokens_and_others_are_not(self, write: Write) -> None:
        path = write(mooncake_line() + mooncake_line(timestamp=3000, input_length=1536, hash_ids=[0, 1, 9]))

        first, second = (tuple(spec.prompt) for spec in parse(f"mooncake:{path}").requests)

        assert (len(first), len(second)) == (1100, 1536)
        assert first[:1024] == second[:1024]
        assert first[1024:] != second[1024:1100]

    def test_counts_milliseconds(self, write: Write) -> None:
        workload = parse(f"mooncake:{write(mooncake_line(timestamp=6000) + mooncake_line(timestamp=7500))}")

        assert arrivals(workload) == [0, 1.5]

    def test_spreads_arrivals_over_their_grid_the_same_way_each_time(self, write: Write) -> None:
        path = write(mooncake_line() * 40 + mooncake_line(timestamp=3000) * 40)

        spread, again = (parse(f"mooncake:{path}?spread=3") for _ in range(2))

        assert spread.requests == again.requests
        times = arrivals(spread)
        assert times == sorted(times)
        assert len(set(times)) == 80
        assert times[39] < 3 < times[41]
        assert len(set(arrivals(parse(f"mooncake:{path}")))) == 2

    def test_shrinks_blocks_with_lengths_so_that_sharing_stays(self, write: Write) -> None:
        path = write(mooncake_line() + mooncake_line(input_length=1536, hash_ids=[0, 1, 9]))

        whole, small = parse(f"mooncake:{path}"), parse(f"mooncake:{path}?shrink=64")

        assert lengths(small) == [(18, 1), (24, 1)]
        assert small.prefix_share(8) == 16 / 42
        assert whole.prefix_share(512) == 1024 / 2636
        with pytest.raises(WorkloadError, match="shrink=7 must divide the 512 tokens"):
            parse(f"mooncake:{path}?shrink=7")

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ("{\n", "line 2: is not a JSON object"),
            ("[1]\n", "line 2: is a list; expected a JSON object"),
            (mooncake_line(timestamp=None), "line 2: has no 'timestamp', only input_length, output_length, hash_ids"),
            (mooncake_line(timestamp="soon"), r"line 2: timestamp must be a number \(ms\), got 'soon'"),
            (mooncake_line(timestamp=True), r"line 2: timestamp must be a number \(ms\), got True"),
            (mooncake_line(input_length=0), "line 2: input_length must be a whole number of at least 1, got 0"),
            (mooncake_line(output_length=1.5), "line 2: output_length must be a whole number of at least 1, got 1.5"),
            (mooncake_line(output_length=[]), r"line 2: output_length must be a whole number .* got \[\]"),
            (mooncake_line(hash_ids=[0, 1]), "line 2: hash_ids has 2 ids of 512 tokens, 1100 prompt tokens have 3"),
            (mooncake_line(hash_ids=[0, 1, 2, 3]), "line 2: hash_ids has 4 ids"),
            (mooncake_line(hash_ids=7), "line 2: hash_ids must be a list of ids, got '7'"),
            (mooncake_line(hash_ids=[0, 1, None]), "line 2: hash_ids must be a list of ids"),
        ],
    )
    def test_counts_a_malformed_line_and_names_it(self, write: Write, line: str, fault: str) -> None:
        workload = parse(f"mooncake:{write(mooncake_line() + line + mooncake_line())}")

        assert len(workload.requests) == 2
        (note,) = workload.notes
        assert re.match(f"1 of 3 rows are malformed and left out: {fault}", note)
        alone = fault.replace("line 2", "line 1")
        with pytest.raises(WorkloadError, match=f"holds no request: 1 of 1 rows are .*{alone}"):
            parse(f"mooncake:{write(line)}")

    @has_traces
    def test_finds_the_sharing_that_the_published_excerpt_is_known_for(self) -> None:
        path = TRACES / "mooncake_conversation_head5500.jsonl"
        workload = parse(f"mooncake:{path}?shrink=256")
        ids = [identity for line in path.open() for identity in json.loads(line)["hash_ids"]]

        # Known over blocks, partial ones too: 0.339. A cache spares full blocks, and computes every last token.
        assert 1 - len(set(ids)) / len(ids) == pytest.approx(0.339, abs=0.001)
        assert len(workload.requests) == 5_500
        assert workload.prefix_share(2) == pytest.approx(0.345, abs=0.01)


class TestCsv:
    def test_takes_the_columns_that_are_named(self, write: Write) -> None:
        path = write("a b&c,i,o,x\n3,10,2,9\n1,11,3,9\n")

        workload = parse(f"csv:{path}?arrival=a b%26c&input=i&output=o")

        assert arrivals(workload) == [0, 2]
        assert lengths(workload) == [(11, 3), (10, 2)]

    @pytest.mark.parametrize(
        "head",
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "arrived_at,num_prefill_tokens,num_decode_tokens",
            "arrival,input,output",
            "Arrival Time,prompt_len,completion_tokens",
        ],
    )
    def test_finds_columns_by_their_usual_names(self, write: Write, head: str) -> None:
        workload = parse(f"csv:{write(head + chr(10) + '1,5,6' + chr(10) + '2,7,8')}")

        assert (arrivals(workload), lengths(workload)) == ([0, 1], [(5, 6), (7, 8)])

    def test_lists_the_columns_where_it_finds_none(self, write: Write) -> None:
        path = write("a,b\n1,2\n")

        with pytest.raises(WorkloadError, match="usual name for input; say input=COLUMN, one of: a, b"):
            parse(f"csv:{path}")
        with pytest.raises(WorkloadError, match="no column 'z' for output=; the columns are: a, b"):
            parse(f"csv:{path}?input=a&output=z")

    def test_refuses_a_column_that_stands_there_twice(self, write: Write) -> None:
        with pytest.raises(WorkloadError, match="column 'input' stands there 2 times"):
            parse(f"csv:{write('input,input,output' + chr(10) + '1,2,3')}")

    def test_is_closed_without_arrivals(self, write: Write) -> None:
        workload = parse(f"csv:{write('input,output' + chr(10) + '1,2')}")

        assert workload.is_closed
        assert workload.unit == "iterations"

    @pytest.mark.parametrize(
        ("unit", "second", "expected", "counted"),
        [("ms", "1500", 1.5, "s"), ("us", "1500", 0.0015, "s"), ("iterations", "3", 3, "iterations")],
    )
    def test_counts_arrivals_in_their_unit(
        self, write: Write, unit: str, second: str, expected: float, counted: str
    ) -> None:
        workload = parse(f"csv:{write(f'time,input,output{chr(10)}0,1,1{chr(10)}{second},1,1')}?unit={unit}")

        assert arrivals(workload)[1] == expected
        assert workload.unit == counted

    def test_refuses_an_unknown_unit(self, write: Write) -> None:
        with pytest.raises(WorkloadError, match="unit must be one of s, ms, us, ns, iterations; got 'days'"):
            parse(f"csv:{write('time,input,output' + chr(10) + '0,1,1')}?unit=days")

    def test_reads_prefix_ids_from_a_cell(self, write: Write) -> None:
        path = write('input,output,p\n8,1,a b\n8,1,"[""a"", ""c""]"\n')

        first, second = parse(f"csv:{path}?prefix=p&prefix_tokens=4").requests

        assert first.prompt[:4] == second.prompt[:4]
        assert first.prompt[4:] != second.prompt[4:]

    @pytest.mark.parametrize(
        ("row", "fault"),
        [
            ("5,6", "has 2 columns where the head has 3"),
            ("1,5,6,7", "has 4 columns where the head has 3"),
            (",5,6", "time must be a number or a timestamp, got ''"),
            ("nan,5,6", "time must be a number or a timestamp, got 'nan'"),
            ("inf,5,6", "time must be a number or a timestamp, got 'inf'"),
            ("2023-13-01,5,6", "time must be a number or a timestamp, got '2023-13-01'"),
            ("2023-11-16 18:15:46,5,6", "time is a timestamp where rows before have a number"),
            ("1,,6", "input must be a whole number of at least 1, got ''"),
            ("1,-5,6", "input must be a whole number of at least 1, got '-5'"),
            ("1,5,6.5", "output must be a whole number of at least 1, got '6.5'"),
            ("1,5,0", "output must be a whole number of at least 1, got '0'"),
            ("1,5,1e999", "output must be a whole number of at least 1, got '1e999'"),
        ],
    )
    def test_counts_a_malformed_row_and_names_its_line(self, write: Write, row: str, fault: str) -> None:
        workload = parse(f"csv:{write(f'time,input,output{chr(10)}0,3,3{chr(10)}{chr(10)}{row}{chr(10)}1,4,4')}")

        assert workload.notes == (f"1 of 3 rows are malformed and left out: line 4: {fault}",)
        assert lengths(workload) == [(3, 3), (4, 4)]

    def test_tells_the_first_few_of_many_and_how_many_more(self, write: Write) -> None:
        path = write("input,output\n1,1\n" + "x,1\n" * 6)

        (note,) = parse(f"csv:{path}").notes

        assert note.startswith("6 of 7 rows are malformed and left out: line 3: ")
        assert note.endswith("; and 3 more")
        assert note.count("line") == 3

    def test_a_file_without_a_good_row_is_an_error(self, write: Write) -> None:
        with pytest.raises(WorkloadError, match="holds no request: 1 of 1 rows are malformed and left out: line 2: in"):
            parse(f"csv:{write('input,output' + chr(10) + 'x,1')}")
        with pytest.raises(WorkloadError, match=r"trace\.txt holds no row$"):
            parse(f"csv:{write('input,output' + chr(10))}")
        with pytest.raises(WorkloadError, match="is empty; expected a head"):
            parse(f"csv:{write('')}")

    @pytest.mark.parametrize("kind", ["csv", "azure", "burstgpt", "mooncake", "lengths"])
    def test_a_file_that_cannot_be_read_is_told_in_one_line(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"input,output\n\xff\xfe,1\n")
        for name in ("none", "binary", "."):
            with pytest.raises(WorkloadError, match=r"workload file .* cannot be read: ") as error:
                parse(f"{kind}:{tmp_path / name}")
            assert "\n" not in str(error.value)
        with pytest.raises(WorkloadError, match=f"{kind} needs a file, as in {kind}:FILE"):
            parse(f"{kind}:")

    def test_reads_what_a_spreadsheet_saved_with_a_byte_order_mark(self, write: Write) -> None:
        assert lengths(parse(f"csv:{write(chr(0xFEFF) + 'input,output' + chr(10) + '1.0, 2')}")) == [(1, 2)]

    def test_an_unclosed_quote_is_an_error_and_no_end(self, write: Write) -> None:
        with pytest.raises(WorkloadError, match="cannot be read: unexpected end of data"):
            parse(f"csv:{write('input,output' + chr(10) + '1,2' + chr(10) + chr(34) + '3,4')}")


class TestLengths:
    table = "arrival,num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7,30,5,35,6\n2,40,6,46,6.7\n"

    def test_passes_over_arrivals(self, write: Write) -> None:
        workload = parse(f"lengths:{write(self.table)}")

        assert workload.is_closed
        assert lengths(workload) == [(30, 5), (40, 6)]

    def test_takes_an_arrival_process(self, write: Write) -> None:
        workload = parse(f"lengths:{write(self.table)}?rate=4")

        assert workload.unit == "s"
        assert 0 < arrivals(workload)[0] < arrivals(workload)[1]
        assert lengths(workload) == [(30, 5), (40, 6)]

    def test_has_no_arrivals_to_scale(self, write: Write) -> None:
        with pytest.raises(WorkloadError, match="scale= and spread= need arrivals, and no column tells them"):
            parse(f"lengths:{write(self.table)}?scale=2")
