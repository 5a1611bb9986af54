"""The training loop: batches in, an averaged model and a loss curve out."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.model import ShippedModel
from tools.train_shipped.optimiser import Average, Optimiser, learning_rate
from tools.train_shipped.windows import Windows

RECORD_EVERY = 20
"""Steps between two points of the loss curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How long and how fast to train. Exactly one of ``steps`` and ``minutes`` is given."""

    steps: int | None = None
    minutes: float | None = None
    """Until the end of the training, from the start of the program; evaluation comes behind."""
    batch_tokens: int = 131_072
    """Of one step."""
    length: int = 1024
    """Tokens of a window."""
    long_length: int = 4096
    """Of the windows in the last part."""
    long_from: float = 0.8
    """Progress at which windows become long; 1: never."""
    peak_rate: float = 6e-3
    warmup_steps: int = 50
    weight_decay: float = 0.05
    uses_muon: bool = True
    draft_weight: float = 0.3
    """Of the draft heads' mean loss beside the main loss."""
    balance_rate: float = 2e-3
    """Of the routers' biases, a step, at the peak learning rate."""
    average_over: float = 0.02
    """Time constant of the averaged weights, as a share of the steps so far."""
    seed: int = 0
    compiles: bool = False
    """Let torch.compile fuse the layers."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("give either steps or minutes")
        if (self.steps is not None and self.steps < 1) or (self.minutes is not None and self.minutes <= 0):
            raise ValueError(f"steps and minutes must be positive, got {self.steps} and {self.minutes}")
        if self.batch_tokens < self.length:
            raise ValueError(f"batch_tokens ({self.batch_tokens}) must hold a window of {self.length}")


@dataclass(slots=True)
class CurvePoint:
    """A row of the loss curve: means over the steps since the row before."""

    step: int
    seconds: float
    tokens: int
    rate: float
    loss: float
    """Nats a token."""
    draft_losses: tuple[float, ...]


@dataclass(slots=True)
class Trained:
    """What came out; the model itself was changed in place."""

    curve: list[CurvePoint] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of the training alone, compilation included."""
    tokens_a_second: float = 0.0
    """After the warm-up, at the first window length."""
    notes: list[str] = field(default_factory=list)
    """What did not go as asked."""
    expert_load: list[list[float]] = field(default_factory=list)
    """Share of the choices that went to each expert in the last step, by layer."""


class Pace:
    """How far the training is, by steps or by the clock."""

    def __init__(self, options: TrainingOptions, started: float) -> None:
        """Count from now; with minutes, up to that time after ``started`` (of ``time.monotonic``)."""
        self._options = options
        self._end = started + 60 * (options.minutes or 0)
        self._begin: float | None = None

    def progress(self, step: int) -> float:
        """0 to 1; by the clock it begins once the warm-up, and with it compilation, is over."""
        if self._options.steps is not None:
            return step / self._options.steps
        now = time.monotonic()
        if now >= self._end:
            return 1.0
        if step < self._options.warmup_steps:
            return 0.0
        self._begin = now if self._begin is None else self._begin
        return (now - self._begin) / (self._end - self._begin)


def make_model(arch: Architecture, seed: int, device: torch.device) -> ShippedModel:
    """A fresh model; the same on every device, as its weights are drawn on the CPU."""
    torch.manual_seed(seed)
    return ShippedModel(arch).to(device)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 products on CUDA, nothing elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return nullcontext()


def train(model: ShippedModel, tokens_N: Tensor, options: TrainingOptions, started: float | None = None) -> Trained:
    """Train ``model`` in place on the text, and leave it with averaged weights, in evaluation mode.

    Args:
        model: On the device to train on.
        tokens_N: The text, int16, see :func:`tools.train_shipped.windows.encode`.
        options: How.
        started: Start of the program by ``time.monotonic``; None: now.
    """
    return _Loop(model, tokens_N, options, time.monotonic() if started is None else started).run()


class _Loop:
    """State of one training."""

    def __init__(self, model: ShippedModel, tokens_N: Tensor, options: TrainingOptions, started: float) -> None:
        self.model, self.options = model, options
        self.device = model.lm_head.weight.device
        self.windows = Windows(tokens_N.to(self.device), seed=options.seed)
        self.optimiser = Optimiser(model, weight_decay=options.weight_decay, uses_muon=options.uses_muon)
        self.average = Average(model)
        self.pace = Pace(options, started)
        self.result = Trained()
        self.begun = time.monotonic()
        self.warm: tuple[float, int] | None = None
        self.sums = torch.zeros(2 + model.arch.num_draft_heads, device=self.device)
        self.loads: list[Tensor] = []

    def run(self) -> Trained:
        if self.options.compiles:
            lengths = [0.0] + [self.options.long_from] * (self.options.long_from < 1)
            self.result.notes += compile_layers(self.model, [self._tokens(progress) for progress in lengths])
        self.model.train()
        step, progress = 0, 0.0
        interval = 0.5 if sys.stderr.isatty() else 15.0  # seconds; a log keeps every line
        with tqdm(total=self.options.steps, unit="step", file=sys.stderr, mininterval=interval) as bar:
            while progress < 1:
                self._step(step, progress)
                step += 1
                bar.update()
                if step % RECORD_EVERY == 0:
                    self._record(step, progress)
                    bar.set_postfix_str(_postfix(self.result.curve[-1]), refresh=False)
                progress = self.pace.progress(step)
        self._record(step, progress)
        self._finish(step)
        return self.result

    def _tokens(self, progress: float) -> Tensor:
        options = self.options
        length = options.length if progress < options.long_from else options.long_length
        return self.windows.batch(max(1, options.batch_tokens // length), length + 1 + self.model.arch.num_draft_heads)

    def _step(self, step: int, progress: float) -> None:
        options = self.options
        tokens_BT = self._tokens(progress)
        with autocast(self.device):
            losses = self.model.losses(tokens_BT)
        loss = losses.main
        if losses.drafts:
            loss = loss + options.draft_weight * torch.stack(losses.drafts).mean()
        loss.backward()
        rate = self._rate(step, progress)
        gradient = self.optimiser.step(rate)
        routers = [mixer.gate for mixer in self.model.expert_layers()]
        self.loads = [router.balance(options.balance_rate * rate / options.peak_rate) for router in routers]
        self.average.update(1 / (1 + options.average_over * step))
        self.sums += torch.stack([torch.ones_like(gradient), losses.main.detach(), *map(Tensor.detach, losses.drafts)])
        self.result.tokens += tokens_BT.shape[0] * (tokens_BT.shape[1] - 1 - self.model.arch.num_draft_heads)
        self._watch_speed(step, progress)

    def _rate(self, step: int, progress: float) -> float:
        warmed = min(1.0, (step + 1) / (self.options.warmup_steps + 1))
        return warmed * learning_rate(progress, self.options.peak_rate)

    def _watch_speed(self, step: int, progress: float) -> None:
        if step + 1 == self.options.warmup_steps:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.warm = (time.monotonic(), self.result.tokens)
        elif self.warm and progress < self.options.long_from:
            seconds = time.monotonic() - self.warm[0]
            self.result.tokens_a_second = (self.result.tokens - self.warm[1]) / max(seconds, 1e-9)

    def _record(self, step: int, progress: float) -> None:
        """Add a point to the curve; reading the sums waits for the device, which keeps the clock honest."""
        count, *sums = self.sums.tolist()
        if not count:
            return
        self.sums.zero_()
        main, *drafts = (value / count for value in sums)
        seconds, rate = time.monotonic() - self.begun, self._rate(step - 1, progress)
        self.result.curve.append(CurvePoint(step, seconds, self.result.tokens, rate, main, tuple(drafts)))

    def _finish(self, step: int) -> None:
        self.average.into_model()
        for layer in self.model.all_layers():
            layer._compiled_call_impl = None
        self.model.eval()
        self.result.expert_load = [load.tolist() for load in self.loads]
        self.result.steps, self.result.seconds = step, time.monotonic() - self.begun


def _postfix(point: CurvePoint) -> str:
    return f"loss {point.loss:.4f} drafts {' '.join(f'{loss:.4f}' for loss in point.draft_losses)} lr {point.rate:.1e}"


def compile_layers(model: ShippedModel, batches: list[Tensor]) -> list[str]:
    """Compile each layer for itself (equal ones share their code) and try it on ``batches``; what went wrong, if any.

    A failure leaves the model as it was, which trains slower and gives the same.
    """
    torch._dynamo.config.recompile_limit = 64  # a variant for each mixer and window length
    model.train()
    for layer in model.all_layers():
        layer.compile(dynamic=False)
    try:
        for tokens_BT in batches:
            with autocast(tokens_BT.device):
                losses = model.losses(tokens_BT)
            torch.stack([losses.main, *losses.drafts]).sum().backward()
        return []
    except Exception as error:  # whatever the compilers raise: there is no common base class
        for layer in model.all_layers():
            layer._compiled_call_impl = None
        note = f"torch.compile failed, trained without it: {type(error).__name__}: {str(error).strip()[:300]}"
        tqdm.write(note, file=sys.stderr)
        return [note]
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for mixer in model.expert_layers():
            mixer.gate.load_X.zero_()
