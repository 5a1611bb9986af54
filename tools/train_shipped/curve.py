"""The loss curve as a table and as a small drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tools.train_shipped.training import CurvePoint

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 44, 36, 14
_COLOURS = ("#1f6feb", "#d1741f", "#2e9e5b", "#8a5cc7")


def curve_csv(curve: Sequence[CurvePoint]) -> str:
    """Columns: step, seconds, tokens, learning rate, then bits a byte of the main model and of each head."""
    heads = len(curve[0].draft_losses) if curve else 0
    lines = [
        ",".join(["step", "seconds", "tokens", "rate", "bits", *(f"draft_{head + 1}_bits" for head in range(heads))])
    ]
    for point in curve:
        bits = [f"{loss / math.log(2):.4f}" for loss in (point.loss, *point.draft_losses)]
        lines.append(",".join([str(point.step), f"{point.seconds:.1f}", str(point.tokens), f"{point.rate:.3g}", *bits]))
    return "\n".join(lines) + "\n"


def curve_svg(curve: Sequence[CurvePoint]) -> str:
    """Bits a byte over millions of tokens, the main model and the heads."""
    labels = ["main", *(f"draft {head + 1}" for head in range(len(curve[0].draft_losses)))]
    series = [[loss / math.log(2) for loss in values] for values in zip(*_losses(curve), strict=True)]
    low = math.floor(4 * min(map(min, series))) / 4
    high = max(low + 1, min(4.0, max(map(max, series))))
    most = curve[-1].tokens

    def place(tokens: float, bits: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 10) * tokens / most
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (min(bits, high) - low) / (high - low))
        return round(x, 1), round(y, 1)

    parts = [_text(_WIDTH / 2, _HEIGHT - 6, f"million bytes read, of {most / 1e6:.0f}"), _text(26, 10, "bits/byte")]
    for step in range(5):
        bits, tokens = low + (high - low) * step / 4, most * step / 4
        (left, y), (right, _) = place(0, bits), place(most, bits)
        parts.append(f'<path d="M{left} {y}H{right}" stroke="#8883"/>' + _text(22, y + 4, f"{bits:.2f}"))
        parts.append(_text(place(tokens, low)[0], _HEIGHT - 21, f"{tokens / 1e6:.0f}"))
    for number, (label, values) in enumerate(zip(labels, series, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x},{y}" for x, y in map(place, [point.tokens for point in curve], values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(_WIDTH - 60, 26 + 15 * number, label, colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _losses(curve: Sequence[CurvePoint]) -> list[tuple[float, ...]]:
    return [(point.loss, *point.draft_losses) for point in curve]


def _text(x: float, y: float, text: str, colour: str = "#777") -> str:
    return f'<text x="{x}" y="{y}" font-size="11" text-anchor="middle" fill="{colour}">{text}</text>'
