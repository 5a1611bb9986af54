"""What ``session.panel()`` costs and how soon it answers, in JupyterLab in a headless Chromium.

    python -m benchmarks.ui_panel --models oracle shape:tiny --json

Needs the extra ui, which ``make test-ui`` brings, and Chromium. Told are: from pointerdown to the paint in which head
or strip of the bar has changed; updates a second in a run, and what showing them costs the engine; iterations behind a
click on Pause; the kernel's answer to another cell while it runs; frames a second of the timeline in the panel; redraws
pane by pane. The oracle's device sleeps, shape:tiny computes on a core. Browser, kernel and device share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.panel_redraw import measure_redraws
from tests.ui.browser import missing, opened_browser
from tests.ui.lab import Lab, opened_lab

Case = tuple[str, dict[str, float]]
Table = dict[str, dict[str, float]]

CLICKS = 30
PAUSES = 8
ANSWERS = 30
FRAMES = 120
UPDATES_S = 5
_MAKE = """
import asyncio
from benchmarks.panel_kernel import Bench
bench = Bench({model!r})
bench.panel
"""
_ROOT = Path(__file__).resolve().parents[1]
_WATCH = """
() => {
  window.clicked = null; window.clicks = []; window.updates = 0;
  document.addEventListener("pointerdown", (event) => { window.clicked = event.timeStamp; }, { capture: true });
  const watch = new MutationObserver(() => {
    window.updates += 1;
    const begin = window.clicked;
    window.clicked = null;
    if (begin === null) return;
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => window.clicks.push(performance.now() - begin);  // behind the paint
    requestAnimationFrame(() => port2.postMessage(null));
  });
  for (const part of document.querySelectorAll(".wb-panel-bar .wb-head, .wb-panel-bar .wb-strip")) {
    watch.observe(part, { characterData: true, childList: true, attributes: true, subtree: true });
  }
}
"""
_ANSWER_MS = """
async () => {
  const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session, begin = performance.now();
  await kernel.requestExecute({ code: "6 * 7", store_history: false }).done;
  return performance.now() - begin;
}
"""
_PAN = """
([frames, shown]) => new Promise((done) => {
  const { timeline } = document.querySelector(".wb-timeline"), times = [];
  const { to, from } = timeline.store.extent();
  timeline.view.show(to - (to - from) * shown, to);
  let last = null, left = frames;
  const step = (now) => {
    if (last !== null) times.push(now - last);
    last = now;
    if (!left--) { done(times); return; }
    timeline.pan(left % 40 < 20 ? 0.02 : -0.02);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["oracle", "shape:tiny"], choices=["oracle", "shape:tiny"])
    parser.add_argument("--pairs", type=int, default=8, help="runs with and without a panel, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of them")
    parser.add_argument("--spans", type=int, default=100_000, help="in the timeline that is panned")
    parser.add_argument("--iterations", type=int, default=10_000, help="behind which redraws are measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if missing("jupyterlab", "nbformat"):
        raise SystemExit(f"ui_panel: {missing('jupyterlab', 'nbformat')}")
    results: Table = {}
    for name, values in measure(options):
        results[name] = values
        if not options.json:
            told = "  ".join(f"{key} {value:,.3f}" for key, value in values.items())
            print(f"{name:<52}{told}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


def measure(options: argparse.Namespace) -> Iterator[Case]:
    """Every case as it is measured; times in milliseconds unless their names say otherwise."""
    with opened_browser() as browser:
        for model in options.models:
            with opened_panel(browser, model) as lab:
                for name, values in _in_lab(lab, options):
                    yield f"{model}: {name}", values
    yield from measure_redraws(options.iterations).items()


@contextmanager
def opened_panel(browser: Any, model: str) -> Iterator[Lab]:
    """JupyterLab with one panel, in a kernel that finds this package."""
    os.environ["PYTHONPATH"] = str(_ROOT)
    with (
        tempfile.TemporaryDirectory() as folder,
        opened_lab(browser, Path(folder), [_MAKE.format(model=model).strip()]) as lab,
    ):
        lab.run_all()
        lab.page.wait_for_selector(".wb-panel-bar .wb-headline:text('between')")
        lab.page.keyboard.press("Escape")
        lab.page.evaluate(_WATCH)
        yield lab
        if lab.errors:
            raise SystemExit(f"ui_panel: the console says {lab.errors}")


def _in_lab(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    yield "click on Phase to its picture", spread(_clicks(lab, "step_phase"))
    yield "click on Step to its picture", spread(_clicks(lab, "step"))
    lab.ask("[bench.session.step(), None][1]")
    yield "click on Pause", _pauses(lab)
    yield "a cell's answer, nothing runs", spread(_answers(lab))
    yield "a cell's answer in a run", while_it_runs(lab, lambda: spread(_answers(lab)))
    yield "updates in a run", while_it_runs(lab, lambda: {"updates/s": _updates(lab)})
    yield "a run with the panel, over one without", _cost(lab, options)
    yield from _panning(lab, options.spans).items()


def _clicks(lab: Lab, command: str) -> list[float]:
    """Milliseconds; each waits for the one before, as a person does."""
    lab.page.evaluate("() => { window.clicks = []; }")
    for number in range(1, CLICKS + 1):
        _button(lab, command).click()
        lab.page.wait_for_function("(count) => window.clicks.length >= count", arg=number, timeout=10_000)
        lab.page.wait_for_timeout(250)  # the ticker has had its turn, and the next click's picture is its own
    times: list[float] = lab.page.evaluate("() => window.clicks")
    return times


def _button(lab: Lab, command: str) -> Any:
    return lab.page.locator(f".wb-panel [data-command={command}]").first


def while_it_runs(lab: Lab, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What ``work`` finds while the session runs in the background."""
    lab.ask("[bench.refill(), bench.session.start(), None][2]")
    lab.page.wait_for_timeout(500)
    found = work()
    if lab.ask("bench.session.state") != "running":
        raise SystemExit("ui_panel: the run ended before it was measured; make its requests longer")
    lab.ask("[bench.session.pause(), None][1]")
    lab.wait_for("bench.session.state", "paused")
    return found


def _pauses(lab: Lab) -> dict[str, float]:
    """Iterations that began behind the click, and behind the moment at which the kernel heard of it."""
    since_click, since_heard, times = [], [], []
    for _ in range(PAUSES):
        lab.ask("bench.refill()")
        _button(lab, "run").click()
        lab.wait_for("bench.session.state", "running")
        lab.page.wait_for_timeout(400)
        lab.page.evaluate(
            "() => addEventListener('pointerdown', (event) => {"
            " window.pressed = performance.timeOrigin + event.timeStamp; }, { capture: true, once: true })"
        )
        _button(lab, "pause").click()
        lab.wait_for("bench.session.state", "paused")
        pressed_s = lab.page.evaluate("() => window.pressed") / 1e3
        since_click.append(lab.ask(f"bench.begun_after({pressed_s!r})"))
        begun, heard_s = lab.ask("bench.heard[-1]")
        since_heard.append(lab.ask("bench.begun") - begun)
        times.append(1e3 * (heard_s - pressed_s))
    return {
        "iterations since heard, most": max(since_heard),
        "iterations since click, median": statistics.median(since_click),
        "most": max(since_click),
        "ms to be heard": statistics.median(times),
    }


def _answers(lab: Lab) -> list[float]:
    times = []
    for _ in range(ANSWERS):
        times.append(lab.page.evaluate(_ANSWER_MS))
        lab.page.wait_for_timeout(37)
    return times


def _updates(lab: Lab) -> float:
    """Changes of the bar, or of its strip, a second."""
    lab.page.evaluate("() => { window.updates = 0; }")
    begin = time.perf_counter()
    lab.page.wait_for_timeout(1e3 * UPDATES_S)
    count: int = lab.page.evaluate("() => window.updates")
    return count / (time.perf_counter() - begin)


def _cost(lab: Lab, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second with a panel over those without, and the share of a run's time spent in redraws."""
    lab.ask(f"globals().update(task=asyncio.ensure_future(bench.compare({options.pairs}, {options.seconds})))")
    lab.wait_for("task.done()", True, timeout_s=20 + 10 * options.pairs * options.seconds)
    told: dict[str, float] = lab.ask("[task.result(), bench.medians()][1]")
    return told


def _panning(lab: Lab, num_spans: int) -> Table:
    """Frames of a timeline that holds so many spans, all of them in view and a hundredth."""
    lab.ask(f"bench.grow({num_spans})")
    lab.page.wait_for_function(
        "(least) => document.querySelector('.wb-timeline').timeline.store.numSpans >= least",
        arg=0.95 * num_spans,
        timeout=60_000,
    )
    lab.page.evaluate("() => { document.querySelector('.wb-timeline').timeline.set('follow', false); }")
    results = {}
    for shown in (1.0, 0.01):
        times = lab.page.evaluate(_PAN, [FRAMES, shown])
        found = {"frames/s": 1e3 / statistics.fmean(times), **spread(times)}
        results[f"panning, {shown:.0%} of {num_spans:,} spans in view"] = found
    return results


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and longest of milliseconds."""
    ordered = sorted(times)
    at = min(len(ordered) - 1, int(0.95 * len(ordered)))
    return {"median ms": statistics.median(ordered), "95 % ms": ordered[at], "longest ms": ordered[-1]}


if __name__ == "__main__":
    main()
