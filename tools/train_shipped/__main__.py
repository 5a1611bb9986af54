"""Train the shipped model: ``python -m tools.train_shipped --out DIR``. See docs/shipped_model.md."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.card import Run, model_card
from tools.train_shipped.corpus import Corpus, describe, library_corpus, unpack
from tools.train_shipped.curve import curve_csv, curve_svg
from tools.train_shipped.evaluation import EvaluationOptions, measure
from tools.train_shipped.saving import folder_bytes, round_weights, save_folder
from tools.train_shipped.training import TrainingOptions, make_model, train
from tools.train_shipped.windows import encode


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_shipped", description="Train the shipped model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument(
        "--corpus", type=Path, help="packed by tools.train_shipped.corpus; default: this Python's library"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, help="until the end of training; evaluation takes another minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--long-from", type=float, default=0.8, help="progress at which windows get longer")
    parser.add_argument("--long-length", type=int, default=Architecture().max_position, help="tokens of a window then")
    parser.add_argument("--rate", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--adamw", action="store_true", help="AdamW for matrices too, to compare")
    parser.add_argument("--compile", action="store_true", help="fuse layers by torch.compile")
    parser.add_argument("--pattern", default=Architecture().pattern, help="layers of the main model")
    parser.add_argument("--eval-bytes", type=int, help="held-out bytes to measure on; default: all")
    parser.add_argument("--eval-texts", type=int, default=64, help="own texts to measure on")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, save, measure, write the card."""
    started, wanted = time.monotonic(), parse()
    corpus = read_corpus(wanted.corpus)
    print(describe(corpus), file=sys.stderr)
    options = TrainingOptions(
        steps=wanted.steps,
        minutes=wanted.minutes,
        batch_tokens=wanted.batch_tokens,
        length=wanted.length,
        long_length=wanted.long_length,
        long_from=wanted.long_from,
        peak_rate=wanted.rate,
        warmup_steps=wanted.warmup,
        uses_muon=not wanted.adamw,
        seed=wanted.seed,
        compiles=wanted.compile,
    )
    device = torch.device(wanted.device)
    arch = Architecture(pattern=wanted.pattern, max_position=max(options.length, options.long_length))
    model = make_model(arch, options.seed, device)
    trained = train(model, encode(corpus.training), options, started)
    round_weights(model)
    save_folder(model, wanted.out)  # before measuring, so that a time limit costs the numbers only
    (wanted.out / "loss.csv").write_text(curve_csv(trained.curve), encoding="utf-8")
    (wanted.out / "loss.svg").write_text(curve_svg(trained.curve), encoding="utf-8")
    print(f"trained {trained.steps} steps in {trained.seconds:.0f} s; measuring", file=sys.stderr)
    evaluation = EvaluationOptions(
        max_bytes=wanted.eval_bytes,
        num_texts=wanted.eval_texts,
        window=arch.max_position,
        overlap=3 * arch.max_position // 4,
    )
    measured = measure(model, corpus.held_out, evaluation)
    run = Run.of(options, trained, corpus, model, evaluation, device)
    (wanted.out / "README.md").write_text(model_card(run, measured), encoding="utf-8")
    print(model_card(run, measured))
    print(f"{wanted.out}: {folder_bytes(wanted.out):,} bytes, {time.monotonic() - started:.0f} s in all")


def read_corpus(path: Path | None) -> Corpus:
    """The packed corpus, or the one of the Python that runs this."""
    return library_corpus() if path is None else unpack(path.read_bytes())


if __name__ == "__main__":
    main()
