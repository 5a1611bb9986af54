"""legacy = async on CUDA: in float32 token for token, in bfloat16 but for what rounding explains, which is listed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.models.loader import LoadedModel, load_model
from tests.tell import tell
from workbench.comparison import Comparison, compare
from workbench.verdicts import RequestVerdict, Verdict
from workbench.workloads import RequestSpec, Workload

DEVICE = "cuda" if torch.cuda.is_available() else "inline"
TORCH_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
NUM_REQUESTS = 32
LIMITS: dict[str, Any] = {
    "max_requests": 12,  # fewer than requests, so that the modes' batches differ
    "max_batch_tokens": 512,
    "max_sequence_length": 300,
    "num_blocks": 228,
    "graphs": -1,
}
LEGS = ("legacy", "no-overlap", "async")
MODEL = "shape:qwen3-0.6b"
LONGEST = 200


def workload(vocab_size: int, temperatures: tuple[float, ...]) -> Workload:
    """Requests of mixed lengths, all there at the start."""
    rng = random.Random(7)
    requests = []
    for seed in range(NUM_REQUESTS):
        params = SamplingParams(
            max_tokens=rng.randint(16, 64),
            temperature=temperatures[seed % len(temperatures)],
            seed=seed,
            ignore_eos=True,
        )
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, LONGEST)))
        requests.append(RequestSpec(prompt=prompt, params=params))
    return Workload(name="mixed", requests=tuple(requests))


def compare_on(loaded: LoadedModel, work: Workload, **options: Any) -> Comparison:
    found = compare(work, LEGS, model=loaded, device=DEVICE, repeats=1, warmup=0, **{**LIMITS, **options})
    assert found.runs[2].counters["overlap_steps"] > 20
    assert all(run.counters["graph_hits"] > 20 for run in found.runs)
    return found


class TestFloat32:
    @pytest.mark.parametrize("temperatures", [(0.0,), (1.0, 0.6)], ids=["greedy", "seeded"])
    def test_every_request_is_equal_in_all_legs(self, temperatures: tuple[float, ...]) -> None:
        """Any divergence is a failure, even one that rounding explains."""
        loaded = load_model("shape:tiny", dtype=torch.float32, device=TORCH_DEVICE)

        found = compare_on(loaded, workload(loaded.vocab_size, temperatures), dtype="float32")

        assert {verdict.verdict for verdict in found.verdicts} == {Verdict.EQUAL}, str(found)


class TestBfloat16:
    @pytest.mark.parametrize("backend", ["triton", "flashinfer"])
    def test_legs_part_only_where_rounding_decides(self, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip(backend)
        loaded = load_model(MODEL, attention=backend, dtype=torch.bfloat16, device=TORCH_DEVICE)
        work = workload(loaded.vocab_size, (0.0, 1.0, 0.0, 0.6))

        found = compare_on(loaded, work, dtype="bfloat16", attention_backend=backend)

        parted = [one for one in found.verdicts if one.verdict is not Verdict.EQUAL]
        lines = [f"{backend}: {found.verdict_text}; {summary(parted)}", *map(str, parted)]
        tell(capsys, lines)
        assert found.outputs_match, "\n".join(["rounding does not explain what is DIFFERENT", *lines])


def summary(parted: list[RequestVerdict]) -> str:
    """The largest distances, and the largest share of what rounding explains."""
    judged = [(one.measure, one.distance, one.tolerance) for one in parted if one.distance is not None]
    largest = [
        f"largest {name} {max((distance for measure, distance, _ in judged if measure == name), default=0.0):.2g}"
        for name in ("logit margin", "draw distance")
    ]
    most = max((distance / tolerance for _, distance, tolerance in judged if tolerance), default=0.0)
    return f"{', '.join(largest)}, at most {most:.0%} of the tolerance"
