"""Which ranks of a cluster may run their next phase without waiting for one that does not.

Ranks meet in every iteration, in the same places whatever their orders: at its beginning, in ``prepare``, where hosts
agree, and in ``forward`` and ``draft``, where devices exchange tokens. Between two meetings ranks may be anywhere, so
a phase on each of them at once could leave one waiting for another that nobody moves any more. Who stands at no meeting
goes first; once all stand at the same one, all go through it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.cluster_links import ClusterError
from workbench.cluster_place import Place

MEETINGS = frozenset({"prepare", "draft", "forward"})
"""Phases in which a rank may wait for the others; it does not in ``forward`` and ``draft`` on the thread device and on
CUDA, whose devices do it there."""


def next_ranks(places: Sequence[Place]) -> list[int]:
    """Who runs a phase next, of ranks of which some have an iteration in hand.

    Raises:
        ClusterError: they stand at different meetings, and no way leads on.
    """
    free = [place.rank for place in places if place.next_phase is not None and place.next_phase not in MEETINGS]
    if free:
        return free
    if len({place.next_phase for place in places}) == 1 and not places[0].is_between:
        return [place.rank for place in places]
    there = ", ".join(f"rank {place.rank} {_standing(place)}" for place in places)
    raise ClusterError(f"ranks stand at different meetings and would wait for ever: {there}; reset()")


def _standing(place: Place) -> str:
    return "between iterations" if place.is_between else f"before {place.next_phase} of iteration {place.iteration}"


def are_between(places: Sequence[Place]) -> bool:
    """Whether no rank has an iteration in hand."""
    return all(place.is_between for place in places)


def is_over(places: Sequence[Place]) -> bool:
    """Whether no rank has anything to do, now or later."""
    return not any(place.has_work or not place.is_settled or place.next_arrival is not None for place in places)


def jump_to(places: Sequence[Place]) -> float | None:
    """To what time on the clock all jump, as nobody has anything to do before it; None: there is something to do."""
    if any(place.has_work or not place.is_settled for place in places):
        return None
    return min((place.next_arrival for place in places if place.next_arrival is not None), default=None)


def held_text(places: Sequence[Place]) -> str | None:
    """Why breakpoints hold ranks; None: none does."""
    texts = [f"rank {place.rank}: {place.held}" for place in places if place.held is not None]
    return "; ".join(texts) or None
