"""Lines of the decode benchmark's tables."""

from __future__ import annotations

from workbench.bench.pairs import DecodeCell, Pair
from workbench.bench.results import Leg, cell, on_off, percent, phases

CELL_HEAD = (
    " rows mode   graphs     tpot    floor  ratio     step  forward   sample     host   busy  hidden   hits"
    "   prefill      tok/s"
)
PHASE_HEAD = " rows mode   graphs  host work by phase, µs"
PAIR_HEAD = " rows graphs   gain  predicted  async step / longer  hidden of legacy's exposed %"


def describe(model: str, device: str, prompt_len: int, output_len: int, bandwidth: float) -> str:
    """What the tables are of."""
    return (
        f"decode: {model} on {device}, {prompt_len} tokens in, {output_len} out, greedy; floor at "
        f"{bandwidth / 1e9:,.0f} GB/s; times in ms, host in µs, shares in %"
    )


def cell_line(leg: Leg, found: DecodeCell) -> str:
    """One batch in one leg."""
    times = found.breakdown
    return (
        f"{found.batch:5d} {leg.mode:6s} {on_off(leg.graphs):6s} {cell(found.tpot_ms, 8, 3)} "
        f"{cell(found.floor_ms, 8, 3)} {cell(found.tpot_ms / found.floor_ms, 6, 2)} {cell(times.step_ms, 8, 3)} "
        f"{cell(times.device_ms.get('forward'), 8, 3)} {cell(times.device_ms.get('sample'), 8, 3)} "
        f"{cell(times.host_sum_us, 8, 0)} {cell(percent(times.busy_share), 6, 1)} "
        f"{cell(percent(times.hidden_share), 7, 1)} {cell(percent(times.graph_hit_rate), 6, 1)} "
        f"{cell(found.prefill_ms, 9, 1)} {cell(found.tokens_per_s, 10, 0)}"
    )


def phase_line(leg: Leg, found: DecodeCell) -> str:
    """Where the host's time of a step goes."""
    return f"{found.batch:5d} {leg.mode:6s} {on_off(leg.graphs):6s}  {phases(found.breakdown.host_us)}"


def pair_line(leg: Leg, pair: Pair) -> str:
    """Async beside legacy."""
    return (
        f"{pair.batch:5d} {on_off(leg.graphs):6s} {cell(pair.gain, 6, 2)} {cell(pair.predicted_gain, 10, 2)} "
        f"{cell(pair.step_over_longer, 20, 2)} {cell(percent(pair.hidden_of_legacy), 29, 1)}"
    )
