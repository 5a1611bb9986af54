"""The part of a cluster that asks its ranks, and knows where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.request import RequestOutput
from workbench.cluster_links import ClusterError, Connection, Link, Pending, collect
from workbench.cluster_place import Moved, Place
from workbench.cluster_views import Places

_GLANCE_S = 5.0
LOST = "lost"
"""State of a rank that does not answer any more."""


class Asking:
    """All ranks behind one connection.

    Args:
        connection: To ranks that have been made.
        limit_s: How long a rank may take for one answer.
    """

    def __init__(self, connection: Connection, limit_s: float) -> None:
        self.connection = connection
        self.size = len(connection.links)
        self._limit_s = limit_s
        self._is_closed = False
        self._owed: list[tuple[Link, Pending]] = []
        """Answers that an interrupt left to come."""
        self._places = Places(self.ask("place"))

    @property
    def places(self) -> Places:
        """Where all ranks stand; behind an interrupt it waits for what they were doing."""
        self._hear_owed()
        return self._places

    def ask(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of :class:`~workbench.cluster_rank.RankEnd` on ranks at once; on all if none are named.

        Raises:
            ClusterError: one raised, has died, or does not answer in time.
        """
        self._require_open()
        self._hear_owed()
        links = [self.connection.links[rank] for rank in (range(self.size) if ranks is None else ranks)]
        pending = [link.call(method, *args) for link in links]
        self._owed = list(zip(links, pending, strict=True))
        try:
            found = collect(links, pending, method.replace("_", " "), self._limit_s)
        except ClusterError:
            self._owed = [(link, one) for link, one in self._owed if not one.wait(0)]
            raise
        self._owed = []
        return found

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClusterError("the cluster is closed; make a new one")

    def _hear_owed(self) -> None:
        """Hear what an interrupt did not wait for."""
        if self._owed:
            links, pending = zip(*self._owed, strict=True)
            self._owed = []
            collect(links, pending, "what it was asked before", self._limit_s)
            self._places = Places(self.ask("place"))

    def move(self, method: str, *args: Any, ranks: Sequence[int] | None = None) -> list[RequestOutput]:
        """:meth:`ask` for what moves ranks; returns what ended.

        Raises:
            ClusterError: as :meth:`ask`; also where a rank has failed or gone before.
        """
        self.require_sound()
        try:
            moved: list[Moved] = self.ask(method, *args, ranks=ranks)
        except ClusterError:
            self._look_again()
            raise
        self.take([one.place for one in moved])
        return [output for one in moved for output in one.ended]

    def take(self, places: Sequence[Place]) -> None:
        """Some ranks stand there now."""
        newer = {place.rank: place for place in places}
        self._places = Places(newer.get(place.rank, place) for place in self._places)

    def require_sound(self) -> None:
        """Refuse to move ranks that cannot go on.

        Raises:
            ClusterError: naming the first of them; also where the cluster is closed.
        """
        self._require_open()
        for place in sorted(self.places, key=lambda place: place.state != LOST):
            if place.state in ("failed", LOST):
                what = "is lost" if place.state == LOST else "has failed"
                raise ClusterError(
                    f"rank {place.rank} {what}, and the others cannot go on without it; look at what there is, then "
                    "make a new Cluster"
                )

    def _look_again(self) -> None:
        """Where ranks stand after an error; who does not say is lost."""
        owing = {link.rank for link, _ in self._owed}
        self._owed = []
        for place in self._places:
            link, found = self.connection.links[place.rank], replace(place, state=LOST)
            if place.rank not in owing and link.why_dead() is None:
                with suppress(ClusterError):
                    (found,) = collect([link], [link.call("place")], "where it stands", _GLANCE_S)
            self.take([found])

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End all ranks; if they can leave one another first they do, which needs all of them."""
        if self._is_closed:
            return
        try:
            if not self._owed and all(one.is_between and one.state not in ("failed", LOST) for one in self._places):
                with suppress(ClusterError):
                    self.ask("close")
        finally:
            self._is_closed = True
            self.connection.close()
