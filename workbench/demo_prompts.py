"""Sixteen things people ask, short and long, with different sampling, spread over the run by iteration number."""

from __future__ import annotations

from engine.request import SamplingParams
from workbench.workloads import RequestSpec, Workload

_NOTICE = (
    "Please turn this notice into one friendly sentence: The lift in the north stairwell is out of order from Monday "
    "morning until Wednesday evening because two of its cables are being replaced. Visitors who cannot take the stairs "
    "should ring at the south entrance, where a colleague will let them in and take them up in the goods lift."
)
_RECIPE = (
    "I have half a cabbage, two carrots, an onion, a tin of white beans, some stale bread and a little cheese. There "
    "is oil, salt, pepper and paprika in the cupboard, and the oven works, but I own only one pot. What could I cook "
    "for two people this evening?"
)


def _greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]


def _drawn(max_tokens: int, seed: int, **more: object) -> SamplingParams:
    values = {"temperature": 0.8, "top_p": 0.95, **more}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **values)  # type: ignore[arg-type]


_ASKED: tuple[tuple[float, str, SamplingParams, bool], ...] = (
    # arrival, prompt, sampling, streamed to the terminal
    (0, "Explain to a child why the moon changes its shape.", _greedy(44), True),
    (0, "Name three uses for an old newspaper.", _drawn(32, 11), False),
    (0, "What is a prime number?", _greedy(28, logprobs=3), False),
    (0, _RECIPE, _drawn(36, 12, top_k=40), False),
    (0, "Write the first two lines of a poem about rain on a tin roof.", _drawn(30, 13, temperature=1.0), True),
    (0, "Which planet has the most moons?", _greedy(24, stop=[". ", ".\n"], include_stop_str_in_output=True), False),
    (8, "Hi!", _greedy(20), False),
    (8, _NOTICE, _greedy(40), False),
    (8, "Give me a name for a grey cat, and one reason.", _drawn(24, 14, logprobs=2), False),
    (16, "How does a bicycle stay upright?", _greedy(32, stop="\n\n"), False),
    (16, "List the days of the week, separated by commas.", _greedy(24, stop=["Thursday"]), False),
    (16, "Translate into French: Where is the station?", _drawn(20, 15, temperature=0.6), False),
    (26, "Suggest a title for a story about a lost umbrella.", _drawn(20, 16, min_p=0.05), True),
    (26, "Is it safe to look at the sun through a telescope? Answer briefly.", _greedy(24, logprobs=1), False),
    (34, "Count from one to ten in words.", _greedy(28, repetition_penalty=1.05), False),
    (34, "Say goodbye in a cheerful way.", _drawn(20, 17, frequency_penalty=0.4), False),
)


def demo_workload() -> Workload:
    """The demo's requests, in a chat, by iteration number."""
    specs = tuple(
        RequestSpec(prompt=prompt, params=params, arrival=arrival, chat=True, stream=stream)
        for arrival, prompt, params, stream in _ASKED
    )
    return Workload(name="demo: sixteen prompts", requests=specs, unit="iterations")
