"""Chrome traces read back, with the rules that Perfetto has for them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
Track = tuple[int, int]


class Slice(NamedTuple):
    """Times in nanoseconds since the origin."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]

    @property
    def place(self) -> tuple[str, int, int]:
        return self.name, self.start_ns, self.end_ns


class ChromeFile:
    """What a file holds now."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        self.document: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_constant=_refuse)

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.document["traceEvents"] if event["ph"] == kind]

    @cached_property
    def slices(self) -> dict[Track, list[Slice]]:
        """By track, in the order of the file."""
        found: dict[Track, list[Slice]] = defaultdict(list)
        for event in self.events("X"):
            start_ns = nanoseconds(event["ts"])
            times = (start_ns, start_ns + nanoseconds(event["dur"]))
            found[event["pid"], event["tid"]].append(Slice(event["name"], event["cat"], *times, event["args"]))
        return found

    def of(self, *categories: str) -> list[Slice]:
        return [one for track in self.slices.values() for one in track if one.category in categories]

    @cached_property
    def track_names(self) -> dict[Track, str]:
        named = (event for event in self.events("M") if event["name"] == "thread_name")
        return {(event["pid"], event["tid"]): event["args"]["name"] for event in named}

    def track(self, name: str) -> list[Slice]:
        return self.slices[next(track for track, title in self.track_names.items() if title == name)]

    def check_nesting(self) -> None:
        """On no track two slices overlap in part: Perfetto would drop one."""
        for track, members in self.slices.items():
            open_ends: list[int] = []
            for one in sorted(members, key=lambda one: one.start_ns):  # stable: of equal starts the file's order counts
                while open_ends and open_ends[-1] <= one.start_ns:
                    open_ends.pop()
                assert not open_ends or one.end_ns <= open_ends[-1], f"{one} overlaps another on {track}"
                open_ends.append(one.end_ns)

    @cached_property
    def flow_events(self) -> list[tuple[Event, Event]]:
        """Start and end of every arrow."""
        starts = {event["id"]: event for event in self.events("s")}
        ends = {event["id"]: event for event in self.events("f")}
        assert starts.keys() == ends.keys()
        assert len(starts) == len(self.events("s")) == len(self.events("f"))
        for number, start in starts.items():
            assert (start["name"], start["cat"]) == (ends[number]["name"], ends[number]["cat"])
            assert start["ts"] <= ends[number]["ts"], f"arrow {number} goes back in time"
        return [(start, ends[number]) for number, start in starts.items()]

    def flows(self, name: str) -> list[tuple[Slice, Slice]]:
        """From and to, tied to slices as Perfetto does: to what began last on the track."""
        return [(self._tied(start), self._tied(end)) for start, end in self.flow_events if start["name"] == name]

    def is_inside_a_slice(self, event: Event) -> bool:
        at_ns = nanoseconds(event["ts"])
        return any(one.start_ns <= at_ns < one.end_ns for one in self.slices[event["pid"], event["tid"]])

    def _tied(self, event: Event) -> Slice:
        at_ns = nanoseconds(event["ts"])
        begun = [one for one in self.slices[event["pid"], event["tid"]] if one.start_ns <= at_ns]
        assert begun, f"no slice for {event}"
        last = max(reversed(begun), key=lambda one: one.start_ns)
        assert at_ns < last.end_ns, f"{event} lies outside {last}"
        return last


def nanoseconds(microseconds: Decimal) -> int:
    assert microseconds * 1000 == int(microseconds * 1000)
    return int(microseconds * 1000)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
