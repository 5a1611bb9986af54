"""The demo's first act, of a few seconds: the shipped hybrid writes Python, without drafts and with them."""

from __future__ import annotations

import inspect
import textwrap
from typing import Protocol

from engine.config import EngineConfig
from engine.request import SamplingParams
from workbench.comparison import Comparison, compare
from workbench.legs import Leg
from workbench.loading import load_for
from workbench.runs import Run
from workbench.verdicts import Verdict
from workbench.workloads import RequestSpec, Workload


class Say(Protocol):
    """Writes to the terminal at once."""

    def __call__(self, text: str, end: str = "\n") -> None: ...


_LEGS = (
    Leg(name="legacy", mode="legacy"),
    Leg(name="async", mode="async"),
    Leg(name="async, 2 drafts", mode="async", changes={"speculative_tokens": 2}),
)
_TOKENS = 64


def shipped_workload() -> Workload:
    """Six beginnings of Python text, four of them at once."""
    source = inspect.getsource(textwrap)
    starts = (
        'def mean(values):\n    """',
        "import os\nimport sys\n\n\nclass ",
        source[:180],
        source[4000:4200],
        "for key, value in ",
        source[9000:9260],
    )
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)
    specs = tuple(
        RequestSpec(prompt=prompt, params=params, arrival=0 if i < 4 else 12) for i, prompt in enumerate(starts)
    )
    return Workload(name="shipped: six beginnings", requests=specs, unit="iterations")


def run_shipped(device: str, say: Say) -> bool:
    """Serve it in both modes and with two drafts a step, and print what that changed.

    Args:
        device: ``cpu``, ``inline`` or ``cuda``.
        say: Writes to the terminal.

    Returns:
        Whether no leg's ids differ by more than rounding explains.
    """
    config = EngineConfig(device=device, dtype="float32", max_requests=8, max_sequence_length=512)  # type: ignore[arg-type]
    loaded = load_for(config, "shipped")
    say("first the model that comes with the package: a byte-level hybrid (Mamba2, attention, experts, 2 draft heads)")
    found = compare(shipped_workload(), _LEGS, model=loaded, config=config, repeats=1, progress=False, warmup=1)
    say(f"  {_text_of(found)!r}")
    for run in found.runs:
        say(f"  {run.name:<16} {_numbers(run)}")
    same = "all legs gave the same ids" if found.ids_equal else _differences(found)
    say(f"  {same} for {len(found.workload.requests)} requests; an accepted draft is a token that cost no forward\n")
    return found.outputs_match


def _text_of(found: Comparison) -> str:
    spec, output = found.workload.requests[0], found.runs[0].outputs[0]
    return f"{spec.prompt}{output.text}"[:96]


def _numbers(run: Run) -> str:
    summary = run.summary
    text = "" if summary.tokens_per_s is None else f"{summary.tokens_per_s:8,.0f} tokens/s"
    text += f", {summary.num_iterations:4} iterations"
    if summary.drafts is None:
        return text
    places = " and ".join(f"{100 * share:.0f} %" for share in summary.drafts.acceptance)
    return (
        f"{text}, {summary.drafts.tokens_per_row:.2f} tokens a row and step (accepted: {places} of the drafts by place)"
    )


def _differences(found: Comparison) -> str:
    parted = sum(one.verdict is not Verdict.EQUAL for one in found.verdicts)
    return f"ids differ by rounding in {parted}" if found.outputs_match else f"ids DIFFER in {parted}"
