"""Events of the Chrome trace format as text, written as they come."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TextIO

from tracing.intervals import Interval

_FIRST_THREAD = 1001  # viewers lose thread 0, and take one with its process's number for the main thread


class Track(NamedTuple):
    """A line of the picture: thread ``thread`` of process ``process``, both numbers of our own."""

    process: int
    thread: int


class EventWriter:
    """Writes one file. Times go in as nanoseconds and come out as microseconds after ``origin_ns``.

    Args:
        file: Takes text.
        head: What stands beside the events; plain values.
    """

    def __init__(self, file: TextIO, head: Mapping[str, Any]) -> None:
        self.origin_ns = 0
        """May be set; nothing written afterwards is earlier. Viewers keep nanoseconds of small times only."""
        self._file = file
        self._processes = count(1)
        self._threads = count(_FIRST_THREAD)
        self._flows = count(1)
        self._separator = "\n"
        file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(head)},"traceEvents":[')

    def close(self) -> None:
        """End the document; the file stays open."""
        self._file.write("\n]}\n")

    def process(self, name: str) -> int:
        """A new process, below those before it."""
        process = next(self._processes)
        self._metadata("process", f'"pid":{process}', name, process)
        return process

    def tracks(self, process: int, name: str, numbers: Sequence[int]) -> list[Track]:
        """As many new tracks of one name as ``numbers`` needs, below those before; the track of each number."""
        threads = [next(self._threads) for _ in range(max(numbers, default=-1) + 1)]
        for number, thread in enumerate(threads):
            title = name if number == 0 else f"{name} ({number + 1})"
            self._metadata("thread", f'"pid":{process},"tid":{thread}', title, thread)
        tracks = [Track(process, thread) for thread in threads]
        return [tracks[number] for number in numbers]

    def slice(self, track: Track, name: str, category: str, times: Interval, args: str, colour: str = "") -> None:
        """A stretch of time; ``args`` is a JSON object, ``colour`` one of the names that the format has."""
        start_ns, end_ns = times
        length_ns = max(0, end_ns - start_ns)
        cname = f'"cname":"{colour}",' if colour else ""
        self._event(
            f'"ph":"X","name":{_quoted(name)},"cat":"{category}",{cname}"pid":{track.process},"tid":{track.thread},'
            f'"ts":{self._us(start_ns)},"dur":{length_ns // 1000}.{length_ns % 1000:03d},"args":{args}'
        )

    def instant(self, track: Track, name: str, at_ns: int, args: str) -> None:
        """A moment; ``args`` is a JSON object."""
        self._event(
            f'"ph":"i","s":"t","name":{_quoted(name)},"cat":"instant","pid":{track.process},"tid":{track.thread},'
            f'"ts":{self._us(at_ns)},"args":{args}'
        )

    def counter(self, track: Track, name: str, series: str, at_ns: int, value: float) -> None:
        """A number at a moment: a line of its process. What cannot be drawn becomes an instant of ``track``."""
        if not math.isfinite(value):
            self.instant(track, name, at_ns, json.dumps({series: str(value)}))
            return
        self._event(
            f'"ph":"C","name":{_quoted(name)},"pid":{track.process},"ts":{self._us(at_ns)},'
            f'"args":{{{_quoted(series)}:{value}}}'
        )

    def flow(self, name: str, source: Track, source_ns: int, target: Track, target_ns: int) -> None:
        """An arrow between the slices that lie there; to be written after both."""
        common = f'"cat":"flow","name":{_quoted(name)},"id":{next(self._flows)}'
        start, end = self._us(source_ns), self._us(target_ns)
        self._event(f'"ph":"s",{common},"pid":{source.process},"tid":{source.thread},"ts":{start}')
        self._event(f'"ph":"f","bp":"e",{common},"pid":{target.process},"tid":{target.thread},"ts":{end}')

    def _metadata(self, kind: str, place: str, name: str, order: int) -> None:
        self._event(f'"ph":"M","name":"{kind}_name",{place},"args":{{"name":{_quoted(name)}}}')
        self._event(f'"ph":"M","name":"{kind}_sort_index",{place},"args":{{"sort_index":{order}}}')

    def _event(self, body: str) -> None:
        self._file.write(f"{self._separator}{{{body}}}")
        self._separator = ",\n"

    def _us(self, at_ns: int) -> str:
        since_ns = at_ns - self.origin_ns
        return f"{since_ns // 1000}.{since_ns % 1000:03d}"


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)
