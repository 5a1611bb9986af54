"""Tokens sent to each expert of each layer, for the panel's heat map."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

import numpy as np

from workbench.expert_load import not_counting_text
from workbench.panel.messages import ExpertsPane

if TYPE_CHECKING:
    from workbench.session import Session


def experts_view(session: Session) -> ExpertsPane:
    """The counts now, as far as the device has come: between iterations it may be on its way through a forward."""
    counter = session._experts
    load = counter.read()
    if load is None:
        text = not_counting_text(counter, session.engine.loaded.name)
        hint = f"{text[0].upper()}{text[1:]}."
        return ExpertsPane(layers=[], num_experts=0, counts="", imbalances=[], summary="", hint=hint)
    busiest = int(np.argmax(load.imbalances))
    summary = (
        f"{load.counts.shape[0]} layers of {load.counts.shape[1]} experts, {int(load.counts[0].sum()):,} choices a "
        f"layer; layer {load.layers[busiest]} is the most uneven, its busiest expert has "
        f"{load.imbalances[busiest]:.2f} times the mean"
    )
    return ExpertsPane(
        layers=list(load.layers),
        num_experts=load.counts.shape[1],
        counts=b64encode(load.counts.astype("<u8").tobytes()).decode("ascii") if load.counts.any() else "",
        imbalances=[round(float(one), 4) for one in load.imbalances],
        summary=summary,
        hint="No token was sent to an expert yet: run the session.",
    )
