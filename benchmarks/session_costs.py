"""What a session's conveniences cost the engine: turns for an event loop, recorded changes, watches, breakpoints.

    python benchmarks/session_costs.py --model shape:tiny --rows 8 --op-sleep-s 0.002

One session serves steady decode; chunks of iterations take turns between plain ``run`` and each convenience, so that
both see the same machine. Told are the medians of wall time an iteration and of the paired ratios, for the loop of a
plain Python program. ``--busy`` lets another task of the loop wake every millisecond, as a kernel's messages would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable

import torch

from workbench.environment import environment
from workbench.session import Session

CHUNK = 60


async def _plain(session: Session) -> None:
    session.run(CHUNK)


async def _in_background(session: Session) -> None:
    await session.run_async(CHUNK)


async def _with_changes(session: Session) -> None:
    session.record_changes = True
    session.run(CHUNK)
    session.record_changes = False


async def _with_watches(session: Session) -> None:
    made = [session.watch(f"watch {index}", lambda s: s.engine.pool.num_free) for index in range(4)]
    session.run(CHUNK)
    for one in made:
        one.remove()


async def _with_breakpoints(session: Session) -> None:
    made = [session.break_on("resolve", reason="policy"), session.break_on("emit", when=lambda s: False)]
    session.run(CHUNK)
    for one in made:
        one.remove()


KINDS: dict[str, Callable[[Session], Awaitable[None]]] = {
    "run_async": _in_background,
    "record_changes": _with_changes,
    "4 watches": _with_watches,
    "2 breakpoints": _with_breakpoints,
}


ITERATIONS = 20 + CHUNK * (len(KINDS) + 1)


async def measure(session: Session, pairs: int) -> dict[str, dict[str, float]]:
    """Median microseconds an iteration and the paired ratio to plain ``run``, for each kind."""
    times: dict[str, list[float]] = {name: [] for name in ("run", *KINDS)}
    turns = list({"run": _plain, **KINDS}.items())
    for _ in range(pairs):
        turns.reverse()  # sequences grow on the way, and with them a step
        session.reset()
        rows = session.config.max_requests
        session.submit([[1, 2, 3]] * rows, max_tokens=ITERATIONS + 32, temperature=0, ignore_eos=True)
        session.run(20)
        for name, work in turns:
            begin = time.perf_counter()
            await work(session)
            times[name].append((time.perf_counter() - begin) / CHUNK * 1e6)
    return {
        name: {
            "median_us": statistics.median(taken),
            "ratio": statistics.median(one / plain for one, plain in zip(taken, times["run"], strict=True)),
        }
        for name, taken in times.items()
    }


async def _wake_every_millisecond() -> None:
    while True:
        await asyncio.sleep(0.001)


async def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="oracle")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="async")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--op-sleep-s", type=float, default=0.0)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Session(
        options.model,
        options.mode,
        device=options.device,
        max_requests=options.rows,
        max_batch_tokens=ITERATIONS + 64,
        max_sequence_length=ITERATIONS + 64,
        block_size=64,
        op_sleep_s=options.op_sleep_s,
    ) as session:
        noise = asyncio.ensure_future(_wake_every_millisecond()) if options.busy else None
        result = await measure(session, options.pairs)
        if noise is not None:
            noise.cancel()
        print(json.dumps({"options": vars(options), "environment": environment(), "result": result}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
