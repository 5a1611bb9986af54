"""One iteration as we recorded it, and as a tool did, on two groups of lanes over one time axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracing.nvtx_match import RangePair
from tracing.nvtx_ranges import colour_of
from workbench.bars import Bar, Scale, lanes_html

_LANES = {"phase": "phases", "wait": "waits", "copy": "copies", "graph": "graphs"}


def lanes_side_by_side(pairs: Iterable[RangePair], offset_ns: int, iteration: int, tool: str) -> str:
    """HTML of one iteration.

    Args:
        pairs: Ranges that both saw.
        offset_ns: Added to the tool's times.
        iteration: Its number.
        tool: What the tool is called.

    Raises:
        ValueError: no range of that iteration is there.
    """
    chosen = [pair for pair in pairs if pair.ours.iteration == iteration and pair.ours.category in _LANES]
    if not chosen:
        raise ValueError(f"iteration {iteration} is not among those that both saw")
    begin = min(min(pair.ours.start_ns, pair.theirs.start_ns + offset_ns) for pair in chosen)
    end = max(max(pair.ours.end_ns, pair.theirs.end_ns + offset_ns) for pair in chosen)
    scale = Scale(begin, end, [(begin, end)])
    return lanes_html({**_group("ours", chosen, scale, None), **_group(tool, chosen, scale, offset_ns)})


def _group(who: str, pairs: Sequence[RangePair], scale: Scale, offset_ns: int | None) -> dict[str, list[Bar]]:
    """Lanes of one side; ours where there is no offset."""
    lanes: dict[str, list[Bar]] = {}
    for category, title in _LANES.items():
        of_category = [pair for pair in pairs if pair.ours.category == category]
        if of_category:
            lanes[f"{title}, {who}"] = [_bar(pair, scale, offset_ns) for pair in of_category]
    return lanes


def _bar(pair: RangePair, scale: Scale, offset_ns: int | None) -> Bar:
    name, category = pair.ours.name, pair.ours.category
    start, end = pair.ours.start_ns, pair.ours.end_ns
    if offset_ns is not None:
        start, end = pair.theirs.start_ns + offset_ns, pair.theirs.end_ns + offset_ns
    title = f"{name}: {(end - start) / 1e3:,.1f} µs"
    return scale.bar(start, end, colour_of(name, category), label=name, title=title)
