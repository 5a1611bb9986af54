"""What transformers says of texts that are given to it whole, and what the engine said of the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.shapes import fill_randomly
from engine.request import RequestOutput

CLOSE = 1e-4
"""Between two float32 implementations, on log-probabilities of some units."""


@dataclass(frozen=True)
class Said:
    """Of one text: a value for each token but the first, on the CPU."""

    logprobs: Tensor
    """float32 [n], of the token that stands there."""
    best: Tensor
    """int64 [n], the token that was the likeliest there."""


def transformers_says(
    folder: Path, texts: Sequence[Sequence[int]], *, dtype: torch.dtype, device: torch.device, attention: str
) -> list[Said]:
    """Each text read whole and alone, without a cache, by the checkpoint's own transformers class.

    Args:
        folder: A checkpoint.
        texts: Token ids, at least two each.
        dtype: Of weights and activations; log-probabilities are computed in float32 from the logits.
        device: Where.
        attention: transformers' name of an attention implementation: ``eager`` or ``sdpa``.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model = model.to(device).eval()
    found = []
    for text in texts:
        ids = torch.tensor(text, device=device)
        with torch.inference_mode():
            logprobs = model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, ids[1:, None])[:, 0]
        found.append(Said(chosen.cpu(), logprobs.argmax(-1).cpu()))
    return found


def engine_says(output: RequestOutput) -> dict[str, Tensor]:
    """Log-probabilities of the tokens of a text, by part: "prompt", but for the first, where it was asked for them.

    The other part is "output".
    """
    assert output.logprobs is not None
    found = {}
    if output.prompt_logprobs is not None:
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found["prompt"] = torch.tensor([row[token] for token, row in pairs if row is not None])
    found["output"] = torch.tensor([row[token] for token, row in zip(output.token_ids, output.logprobs, strict=True)])
    return found


def said_of(output: RequestOutput, said: Said) -> dict[str, Tensor]:
    """The same of a reference that read the whole text."""
    sizes = [len(output.prompt_token_ids) - 1, len(output.token_ids)]
    return dict(zip(("prompt", "output"), said.logprobs.split(sizes), strict=True))


def check_against_transformers(folder: Path, outputs: Sequence[RequestOutput]) -> None:
    """Greedy outputs of a float32 checkpoint have the ids that transformers calls best, and its log-probabilities."""
    texts, device = [text_of(output) for output in outputs], torch.device("cpu")
    said = transformers_says(folder, texts, dtype=torch.float32, device=device, attention="eager")
    for output, reference in zip(outputs, said, strict=True):
        expected = said_of(output, reference)
        for part, found in engine_says(output).items():
            assert torch.allclose(found, expected[part], atol=CLOSE, rtol=0), part
        assert reference.best[-len(output.token_ids) :].tolist() == list(output.token_ids)


def text_of(output: RequestOutput) -> list[int]:
    """Prompt and output."""
    return [*output.prompt_token_ids, *output.token_ids]


def write_half_checkpoint(folder: Path, architecture: str, *, device: torch.device, **config: Any) -> Path:
    """Save a random model whose weights are bfloat16, so that every dtype reads the same numbers.

    Args:
        folder: Made if it is not there.
        architecture: A transformers class name.
        device: Where the weights are made.
        config: Keys of its configuration.
    """
    import transformers

    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    with device:
        model = getattr(transformers, architecture)(config_class(**config))
    fill_randomly(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
