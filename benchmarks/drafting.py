r"""Decode of models with draft heads: time per output token by drafts a step, at acceptance rates that are forced.

    python -m benchmarks.drafting --quick
    python -m benchmarks.drafting --device cuda --models shape:hybrid-2b --drafts 0 1 2 --seconds 240 --out FILE
    python -m benchmarks.drafting --device cuda --models shape:hybrid-2b --drafts 2 \
        --legs async+late_rewind=false async+late_rewind=true --out FILE

Random weights accept next to nothing, so acceptance is drawn instead: each draft that follows accepted ones is taken
with the given chance, which leaves all work as it is and makes the text meaningless. ``own`` is what the model bears
out; a model with a tokenizer (``shipped``) reads held-out text for it. One engine serves all rates of a batch.

A number is the median of stretches of steps in which all rows decode, with 576 tokens in the cache in the middle, as
512 read and half of 128 written. Legs (written as in ``benchmarks/traffic.py``) take turns, whichever goes first; every
other leg's steps are divided by the first one's of the same turn. Without drafts there is one leg, the first.

    step        wall time of an iteration; TPOT: over the tokens that a row gives in it, at a forced rate those to be
                expected, since of few rows chance draws other ones
    busy        the part of it in which the device computed: its floor
    floor       weights, keys, values and states of one plain step over the bandwidth of a copy, over those tokens
    hidden      share of the host's work during which the device computed; bubbles: share of time without device work
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafting_stretches import (
    OWN,
    Prompts,
    Rate,
    Seat,
    Sizes,
    Stretch,
    check_options,
    engine_config,
    forced_acceptance,
    spread,
    tokens_expected,
)
from benchmarks.drafting_tables import Found, cell_line, pair_line
from benchmarks.traffic import parse_leg
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.models.loader import LoadedModel
from workbench.bench.floor import copy_bandwidth, floor_ms
from workbench.legs import Leg
from workbench.loading import check_device, load_for

LARGE = {
    "models": ["shape:hybrid-2b"],
    "batches": [1, 8, 32, 128, 256],
    "rates": [0.0, 0.5, 0.8],
    "steps": 16,
    "settle": 4,
    "repeats": 3,
    "cached": 576,
}
SMALL = {**LARGE, "models": ["shape:tiny-hybrid"], "batches": [1, 4]}
QUICK = {**SMALL, "batches": [2], "rates": [0.0, 1.0], "steps": 4, "settle": 2, "repeats": 2, "cached": 64}
"""What is left open on the command line: on CUDA, elsewhere, and with ``--quick``."""

Times = dict[tuple[str, Rate], list[Stretch]]
"""Stretches by leg and rate, in the order of the turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What takes turns: the legs of one model, number of drafts and batch, at all rates."""

    loaded: LoadedModel
    base: EngineConfig
    legs: Sequence[Leg]
    drafts: int
    batch: int
    rates: Sequence[Rate]
    sizes: Sizes

    def __str__(self) -> str:
        return f"{self.loaded.name} S={self.drafts} {self.batch} rows"

    def seats(self, stack: ExitStack, prompts: Prompts, chance: Tensor) -> Iterator[Seat]:
        """An engine of each leg, full of rows and warm."""
        sizes, rates, drafts = self.sizes, self.rates, self.drafts
        texts = prompts.make(self.batch, sizes.prompt_len(drafts, rates))
        for leg in self.legs:
            config = engine_config(self.base, leg, drafts=drafts, batch=self.batch, sizes=sizes, rates=rates)
            seat = Seat(self.loaded, config, leg, chance)
            stack.enter_context(seat.engine)
            seat.fill(texts)
            seat.stretch(OWN if OWN in rates else rates[0], sizes)
            yield seat

    def take_turns(self, seats: Sequence[Seat]) -> Times:
        """Every leg at every rate, as often as is asked for; whichever leg goes first may profit or suffer from it.

        Rows that were forced to accept are no text of the model's any more, so what it bears out itself comes before.
        """
        times: Times = {(seat.leg.name, rate): [] for seat in seats for rate in self.rates}
        own = [rate for rate in self.rates if rate == OWN]
        for rates in (own, [rate for rate in self.rates if rate != OWN]):
            for turn in range(self.sizes.repeats):
                back = -1 if turn % 2 else 1  # rates too, so that all are met with as much in the cache
                for rate, seat in itertools.product(rates[::back], seats[::back]):
                    times[seat.leg.name, rate].append(seat.stretch(rate, self.sizes))
        return times

    def cell(self, seat: Seat, rate: Rate, stretches: Sequence[Stretch], bandwidth: float) -> dict[str, Any]:
        """Of one leg at one rate; drawn tokens a step come from all stretches, as chance makes them uneven."""
        drawn = sum(one.tokens for one in stretches) / (self.batch * self.sizes.steps * len(stretches))
        tokens = tokens_expected(rate, self.drafts) if isinstance(rate, float) else drawn
        cached = sum(one.cached for one in stretches) / len(stretches)
        proposed, accepted = (
            [sum(counts) for counts in zip(*(getattr(one, name) for one in stretches), strict=True)]
            for name in ("proposed", "accepted")
        )
        floor = floor_ms(self.loaded.model, rows=self.batch, cached=cached, bandwidth=bandwidth)
        parts = [one.breakdown for one in stretches]
        return {
            **self.identity(rate),
            "leg": seat.leg.name,
            "mode": seat.leg.mode,
            "tokens_a_step": drawn,
            "acceptance": [part / whole if whole else None for part, whole in zip(accepted, proposed, strict=True)],
            "cached": cached,
            "tpot_ms": spread([one.step_ms / tokens for one in stretches]),
            "step_ms": spread([one.step_ms for one in stretches]),
            "busy_ms": middle([one.busy_ms for one in stretches]),
            "floor_ms": floor / tokens,
            "hidden_share": middle([part.hidden_share for part in parts]),
            "bubble_share": middle([None if part.busy_share is None else 1 - part.busy_share for part in parts]),
            "exposed_us": middle([part.exposed_us for part in parts]),
            "host_us": {name: middle([part.host_us.get(name) for part in parts]) for name in parts[0].host_us},
            "device_ms": {name: middle([part.device_ms.get(name) for part in parts]) for name in parts[0].device_ms},
        }

    def pair(self, rate: Rate, seats: Sequence[Seat], times: Times, number: int) -> dict[str, Any]:
        """A later leg over the first one, turn by turn."""
        first, other = seats[0], seats[number]
        before, after = (times[seat.leg.name, rate] for seat in (first, other))
        turns = [later.step_ms / earlier.step_ms for later, earlier in zip(after, before, strict=True)]
        return {
            **self.identity(rate),
            "leg": other.leg.name,
            "over": first.leg.name,
            "step_ratio": spread(turns),
            "turns": turns,
            "state_bytes_per_row": [other.state_bytes_per_row, first.state_bytes_per_row],
            "engine_bytes": [other.engine_bytes, first.engine_bytes],
        }

    def identity(self, rate: Rate) -> dict[str, Any]:
        """Of what was measured, but for the leg."""
        return {"model": self.loaded.name, "batch": self.batch, "drafts": self.drafts, "rate": rate}


def middle(values: Sequence[float | None]) -> float | None:
    """Median of those that are there; None without any."""
    there = [value for value in values if value is not None]
    return median(there) if there else None


def measure_group(
    group: Group, prompts: Prompts, chance: Tensor, bandwidth: float, found: Found, say: Callable[[str], None]
) -> None:
    """Cells and pairs of one group."""
    with ExitStack() as stack:
        seats = []
        for seat in group.seats(stack, prompts, chance):
            seats.append(seat)
            found.engines.append({**group.identity(None), **seat.to_dict()})
            say(f"{group} {seat.leg.name}: engine {seat.startup_s:.1f} s, prompts {seat.filling_s:.1f} s")
        times = group.take_turns(seats)
        for rate in group.rates:
            for seat in seats:
                found.cells.append(group.cell(seat, rate, times[seat.leg.name, rate], bandwidth))
                say(cell_line(found.cells[-1]))
            for number in range(1, len(seats)):
                found.pairs.append(group.pair(rate, seats, times, number))
                say(pair_line(found.pairs[-1]))


def measure(args: argparse.Namespace, legs: Sequence[Leg], say: Callable[[str], None]) -> Found:
    """All groups, for which time is left; results so far are written behind each."""
    begin, found = time.perf_counter(), Found()
    base = EngineConfig(device=args.device)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    bandwidth = copy_bandwidth(device)
    sizes = Sizes(steps=args.steps, settle=args.settle, repeats=args.repeats, cached=args.cached)
    with forced_acceptance(device) as chance:
        for name in args.models:
            loading = time.perf_counter()
            loaded = load_for(base, name)
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.loading_s[name] = time.perf_counter() - loading
            say(f"{name}: loaded in {found.loading_s[name]:.1f} s; a copy moves {bandwidth / 1e9:,.0f} GB/s")
            prompts = Prompts(loaded)
            for drafts, batch in ((drafts, batch) for drafts in args.drafts for batch in args.batches):
                group = Group(
                    loaded=loaded,
                    base=base,
                    legs=legs if drafts else legs[:1],
                    drafts=drafts,
                    batch=batch,
                    rates=args.rates if drafts else [None],
                    sizes=sizes,
                )
                if time.perf_counter() - begin > args.seconds:
                    found.left_out.append(str(group))
                    continue
                try:
                    measure_group(group, prompts, chance, bandwidth, found, say)
                except (EngineError, torch.cuda.OutOfMemoryError) as error:  # it does not fit; others may
                    found.failed.append(f"{group}: {error}")
                    say(f"failed: {found.failed[-1]}")
                give_memory_back()
                found.write(args, bandwidth)
            del loaded, prompts
    for one in found.left_out:
        say(f"no time left for {one}")
    found.write(args, bandwidth)
    return found


def give_memory_back() -> None:
    """Of engines that are closed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse_rate(text: str) -> float | str:
    """A chance, or :data:`OWN`; ValueError for anything else."""
    if text == OWN:
        return OWN
    if not 0 <= float(text) <= 1:
        raise ValueError(text)
    return float(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--models", nargs="+", help="default: shape:hybrid-2b on cuda, else shape:tiny-hybrid")
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=parse_rate, help=f"chances, or {OWN} (default: 0 0.5 0.8)")
    parser.add_argument("--batches", nargs="+", type=int, help="rows (default: 1 8 32 128 256 on cuda)")
    parser.add_argument("--legs", nargs="+", default=["async"], help="async+late_rewind=true and the like")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="behind which no group begins any more")
    parser.add_argument("--steps", type=int, help="counted steps of a stretch")
    parser.add_argument("--settle", type=int, help="steps before them that are not counted")
    parser.add_argument("--repeats", type=int, help="stretches of each leg and rate")
    parser.add_argument("--cached", type=int, help="tokens in the cache of a row in the middle of what is measured")
    parser.add_argument("--quick", action="store_true", help="to see whether it works: a tiny model, few steps")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew behind each group")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where a group failed, 0 otherwise."""
    parser = make_parser()
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else LARGE if args.device == "cuda" else SMALL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    try:
        base, legs = EngineConfig(device=args.device), [parse_leg(text) for text in args.legs]
        check_device(base)
        check_options(base, legs)
    except EngineError as error:
        parser.error(str(error))
    found = measure(args, legs, lambda line: print(line, flush=True))
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
