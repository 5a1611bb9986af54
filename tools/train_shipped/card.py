"""The model card: where the model comes from, what it can do, and how to make it again."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.corpus import Corpus, describe
from tools.train_shipped.evaluation import Accepted, EvaluationOptions, Measured
from tools.train_shipped.model import ShippedModel
from tools.train_shipped.training import Trained, TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training as the card tells of it."""

    options: TrainingOptions
    trained: Trained
    corpus: Corpus
    model: ShippedModel
    evaluation: EvaluationOptions
    machine: str

    @classmethod
    def of(
        cls,
        options: TrainingOptions,
        trained: Trained,
        corpus: Corpus,
        model: ShippedModel,
        evaluation: EvaluationOptions,
        device: torch.device,
    ) -> Run:
        """Gather it, with the name of the machine that ran it."""
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads"
        machine = f"{name}; torch {torch.__version__}, Python {platform.python_version()}"
        return cls(options=options, trained=trained, corpus=corpus, model=model, evaluation=evaluation, machine=machine)


def model_card(run: Run, measured: Measured) -> str:
    """Content of ``README.md``."""
    text = (
        "\n\n".join(
            [
                _FRONT,
                _what_it_is(run),
                _how_good(run, measured),
                _drafts(measured),
                _how_made(run),
                _TEXT,
                _sample(measured),
            ]
        )
        + "\n"
    )
    return "\n".join(line.rstrip() for line in text.split("\n"))


_FRONT = """---
license: apache-2.0
library_name: transformers
tags: [nemotron_h, byte-level, multi-token-prediction]
---

# A small hybrid that writes Python"""

_TEXT = """## Text and licence

The text is the standard library of CPython: its `.py` files and tests, without site-packages, generated tables and
files that are not UTF-8, each content once. It is under the [PSF licence](https://docs.python.org/3/license.html);
some modules carry permissive notices of their own, listed there. Held out are whole subjects (a package or module with
its tests), chosen by hash; training files that share many lines with them were dropped. The weights are under the
repository's Apache-2.0 licence. What the model writes can repeat the library's text word for word: treat it as such."""


def _what_it_is(run: Run) -> str:
    arch = run.model.arch
    count = sum(parameter.numel() for parameter in run.model.parameters())
    return f"""A byte-level language model of {count / 1e6:.2f} million parameters with everything that makes scheduling
hard: Mamba2 layers, attention without positions, experts, and {arch.num_draft_heads} draft heads. It is there to be
run, looked at and broken on any machine; it knows the look of Python, and nothing else.

| | |
| --- | --- |
| Layers | `{arch.pattern}` (M Mamba2, * attention, E experts), hidden size {arch.hidden_size} |
| Mamba2 | {arch.mamba_heads} heads of {arch.mamba_head_dim}, state {arch.state_size}, convolution {arch.conv_width} |
| Attention | {arch.num_heads} heads of {arch.head_dim}, {arch.num_kv_heads} for keys and values, no positions |
| Experts | {arch.num_experts} of {arch.expert_size}, {arch.top_k} a token, and a shared one of {arch.shared_size} |
| Draft heads | {arch.num_draft_heads} of `{arch.draft_pattern}`, `mtp.layers.*`; transformers does not load them |
| Vocabulary | 256 bytes, `<|endoftext|>` (before every file), `<|pad|>`; filled up to {arch.vocab_size} |"""


def _how_good(run: Run, measured: Measured) -> str:
    rows = [("this model", measured.bits_a_byte), *measured.compressors.items()]
    table = "\n".join(f"| {name} | {bits:.3f} |" for name, bits in rows)
    ranges = ", ".join(f"from {first}: {bits:.3f}" for first, bits in measured.bits_by_position)
    return f"""## How good it is

On {measured.held_out_bytes:,} held-out bytes (windows of {run.evaluation.window}, each byte behind at least
{run.evaluation.overlap} others but at the beginning; the stored, rounded weights):

| | bits a byte |
| --- | --- |
{table}

By position in the window: {ranges}."""


def _drafts(measured: Measured) -> str:
    def row(name: str, accepted: Accepted) -> str:
        rates = " | ".join(f"{rate:.3f}" for rate in accepted.rates())
        return f"| {name} | {rates} | {accepted.tokens_a_step():.2f} |"

    places = range(1, len(measured.on_text.tried) + 1)
    return f"""## Drafts accepted, greedy

| | {" | ".join(f"place {place}" for place in places)} | tokens a step |
| --- |{" --- |" * (len(places) + 1)}
{row("held-out text, teacher-forced", measured.on_text)}
{row("its own greedy texts", measured.on_own)}

A later place counts only where those before it were accepted. Greedy text of a small model goes in circles, which are
easy to draft: {measured.own_is_varied:.0%} of the 24-byte strings in its own texts are not repeats."""


def _how_made(run: Run) -> str:
    options, trained = run.options, run.trained
    load = "; ".join(" ".join(f"{share:.1%}" for share in layer) for layer in trained.expert_load)
    notes = "".join(f"\n- note: {note}" for note in trained.notes)
    optimiser = "Muon for matrices, AdamW for the rest" if options.uses_muon else "AdamW"
    return f"""## How it was made

    {command(run)}

`corpus.xz` is packed by `python -m tools.train_shipped.corpus --out corpus.xz` on the Python named here; on that one,
`--corpus` may as well be left out.

{describe(run.corpus)}.

- {trained.steps} steps of {options.batch_tokens:,} tokens, {trained.tokens / 1e6:.1f} million in all
  ({trained.tokens / max(1, sum(map(len, run.corpus.training))):.2f} times the text), in {trained.seconds:.0f} s
- on {run.machine}: {trained.tokens_a_second:,.0f} tokens a second at {options.length} tokens a window
- windows of {options.length} tokens, from {options.long_from:.0%} of the way of {options.long_length}
- {optimiser}, peak rate {options.peak_rate:g}, level, then straight to zero; averaged weights
- draft losses weighted {options.draft_weight}; experts balanced by correction biases; seed {options.seed}
- loss curve: `loss.csv`, `loss.svg`
- share of the choices that went to each expert in the last step, by layer: {load}{notes}"""


def command(run: Run) -> str:
    """What makes this model again: the same number of steps, whatever the clock said."""
    options, defaults = run.options, TrainingOptions(steps=1)
    flags = [
        ("--steps", run.trained.steps, None),
        ("--seed", options.seed, None),
        ("--batch-tokens", options.batch_tokens, defaults.batch_tokens),
        ("--length", options.length, defaults.length),
        ("--long-length", options.long_length, defaults.long_length),
        ("--long-from", options.long_from, defaults.long_from),
        ("--rate", options.peak_rate, defaults.peak_rate),
        ("--warmup", options.warmup_steps, defaults.warmup_steps),
        ("--pattern", f"'{run.model.arch.pattern}'", f"'{Architecture().pattern}'"),
    ]
    words = [f"{flag} {value}" for flag, value, usual in flags if value != usual]
    words += ["--compile"] * options.compiles + ["--adamw"] * (not options.uses_muon)
    return " ".join(["python -m tools.train_shipped --out DIR --corpus corpus.xz", *words])


def _sample(measured: Measured) -> str:
    text = "".join(character if character.isprintable() or character == "\n" else "?" for character in measured.sample)
    return "## A text of its own\n\nGreedy, behind 256 tokens of held-out text:\n\n" + "\n".join(
        f"    {line}" for line in text.rstrip().splitlines()
    )
