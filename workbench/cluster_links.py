"""How a cluster reaches its ranks: threads of this process, or processes of ipyparallel, on one machine or on many."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

from engine.parallel.local import LocalRanks
from workbench.cluster_rank import Answer, RankEnd, answer, answer_of, look_around, make_end
from workbench.peek import SessionError


class ClusterError(SessionError):
    """A rank raised, has died, or does not answer; or ranks cannot go on together. One line, with the rank."""


class Pending(Protocol):
    """An answer to come."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it is there by then."""
        ...

    def get(self) -> Answer:
        """It, once it is there."""
        ...


class Link(Protocol):
    """The way to one rank; one call at a time.

    Attributes:
        rank: Which.
        name: What a person could look for: a thread, a process and its machine.
    """

    rank: int
    name: str

    def call(self, method: str, *args: Any) -> Pending:
        """Begin a method of :class:`~workbench.cluster_rank.RankEnd`."""
        ...

    def why_dead(self) -> str | None:
        """Why it will never answer; None: it may."""
        ...


@dataclass
class Connection:
    """All ranks of a cluster."""

    links: Sequence[Link]
    close: Callable[[], None]
    """Ends threads and processes; the ranks have left one another before, if they could."""
    ends: Sequence[RankEnd] = ()
    """Of ranks in this process."""
    has_one_clock: bool = True
    """Whether all read the clock of one machine."""


# -- threads -----------------------------------------------------------------------------------------------------------


class _Promise:
    """Of a thread."""

    def __init__(self, future: Future[Answer]) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> bool:
        return bool(wait_for([self._future], timeout_s).done)

    def get(self) -> Answer:
        return self._future.result()


class ThreadLink:
    """A rank that is a thread of this process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"thread rank-{rank}"
        self.end: RankEnd | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}")

    def start(self, make: Callable[[], RankEnd]) -> Pending:
        """Make the rank in its thread."""

        def made() -> Answer:
            try:
                self.end = make()
                return Answer(self.end.place())
            except Exception as error:
                return Answer(None, " ".join(str(error).split()), type(error).__name__)

        return _Promise(self._thread.submit(made))

    def call(self, method: str, *args: Any) -> Pending:
        """See :meth:`Link.call`."""
        assert self.end is not None
        return _Promise(self._thread.submit(answer_of, self.end, method, *args))

    def why_dead(self) -> str | None:
        """A thread lives as long as its process."""
        return None

    def close(self) -> None:
        """Let go of the thread, whatever it still does."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def connect_threads(size: int, model: Any, options: Mapping[str, Any], timeout_s: float, limit_s: float) -> Connection:
    """Ranks in this process.

    Raises:
        ClusterError: one cannot be made.
    """
    ranks = LocalRanks.make(size, timeout_s=timeout_s)
    links = [ThreadLink(rank) for rank in range(size)]

    def close() -> None:
        for one, link in zip(ranks, links, strict=True):
            one.close()
            link.close()

    def make(rank: int) -> Callable[[], RankEnd]:
        return lambda: RankEnd(rank, size, model, options, ranks[rank])

    try:
        collect(links, [link.start(make(rank)) for rank, link in enumerate(links)], "start", limit_s)
    except BaseException:
        close()
        raise
    return Connection(links, close, [link.end for link in links if link.end is not None])


# -- processes ---------------------------------------------------------------------------------------------------------


class _Remote:
    """Of a process."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self, timeout_s: float) -> bool:
        self._result.wait(timeout_s)
        return bool(self._result.ready())

    def get(self) -> Answer:
        try:
            found: Answer = self._result.get()
            return found
        except Exception as error:  # of ipyparallel's: the engine has gone, or the answer cannot be read
            text = " ".join(str(error).split())
            return Answer(None, f"it has died: {text}", "Dead") if " died " in text else Answer(None, text, "Error")


class _Gone:
    """Of a process that is no more."""

    def __init__(self, text: str) -> None:
        self._text = text

    def wait(self, timeout_s: float) -> bool:
        return True

    def get(self) -> Answer:
        return Answer(None, self._text, "Dead")


class ProcessLink:
    """A rank that is an engine of ipyparallel."""

    def __init__(self, rank: int, view: Any) -> None:
        self.rank = rank
        self.view = view
        self.name = "a process"
        self.process: int | None = None
        """Its number, if it is on this machine."""

    def apply(self, function: Callable[..., Any], *args: Any) -> Pending:
        """Begin any function there."""
        try:
            return _Remote(self.view.apply_async(function, *args))
        except IndexError:  # ipyparallel has taken it off its list
            return _Gone(f"it has died: {self.why_dead() or 'its engine is gone'}")

    def call(self, method: str, *args: Any) -> Pending:
        """See :meth:`Link.call`."""
        return self.apply(answer, method, *args)

    def why_dead(self) -> str | None:
        """Seen at once on this machine; elsewhere ipyparallel notices after some missed heart beats."""
        if self.process is not None and not _lives(self.process):
            return f"its process {self.process} has ended"
        return None


def _lives(process: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def connect_processes(size: int, model: Any, options: Mapping[str, Any], launcher: Any, limit_s: float) -> Connection:
    """Ranks that are processes.

    Args:
        size: How many.
        model: Loaded by each of them.
        options: Of their sessions.
        launcher: An engine launcher of ipyparallel, by class or name; None: processes of this machine.
        limit_s: The longest that starting may take.

    Raises:
        ClusterError: ipyparallel is missing, or a rank cannot be made.
    """
    try:
        import ipyparallel
    except ImportError:
        raise ClusterError(
            "a cluster of processes needs ipyparallel; install the notebook's packages with: pip install -e "
            "'.[notebook]', or use Cluster(in_process=True)"
        ) from None
    cluster = ipyparallel.Cluster(
        n=size, log_level=logging.ERROR, **({} if launcher is None else {"engines": launcher})
    )
    try:
        cluster.start_cluster_sync()
        client = cluster.connect_client_sync()
        client.wait_for_engines(size, timeout=limit_s, interactive=False)
        links = [ProcessLink(rank, client[number]) for rank, number in enumerate(sorted(client.ids)[:size])]
        _make_ends(links, model, options, launcher is None, limit_s)
    except BaseException as error:
        cluster.stop_cluster_sync()
        if isinstance(error, ClusterError) or not isinstance(error, Exception):
            raise
        raise ClusterError(f"the ranks could not be started: {' '.join(str(error).split())}") from error

    def close() -> None:
        client.close()
        cluster.stop_cluster_sync()

    return Connection(links, close, has_one_clock=launcher is None)


def _make_ends(
    links: Sequence[ProcessLink], model: Any, options: Mapping[str, Any], is_local: bool, limit_s: float
) -> None:
    until = time.monotonic() + limit_s
    size = len(links)
    for link in links:
        link.view.block = False
    seen = [_plain(link.apply(look_around), limit_s, link.rank) for link in links]
    hosts = {host for host, *_ in seen}
    _, address, port, _ = seen[0]
    for link, (host, _, _, process) in zip(links, seen, strict=True):
        link.name = f"process {process} on {host}"
        if is_local:
            link.process = process
    threads = max(1, (os.cpu_count() or 1) // size) if is_local else None
    where = "127.0.0.1" if len(hosts) == 1 else address
    making = [link.apply(make_end, rank, size, where, port, threads, model, options) for rank, link in enumerate(links)]
    collect(links, making, "start", max(1.0, until - time.monotonic()))


def _plain(pending: Pending, limit_s: float, rank: int) -> Any:
    """The value of a function that makes no :class:`Answer`."""
    if not pending.wait(limit_s):
        raise ClusterError(f"rank {rank} did not answer within {limit_s:g} s of its start")
    found: Any = pending.get()
    if isinstance(found, Answer):
        raise ClusterError(f"rank {rank} could not start: {found.error}")
    return found


# -- answers of several ranks ------------------------------------------------------------------------------------------

_LOOK_S = 0.05
"""So often it is looked whether ranks still live."""
_GLANCE_S = 0.001
"""So long one is waited for while others may answer too."""
_GRACE_S = 5.0
"""Once a rank has failed, the others hear of it and answer within this, or are given up."""


def collect(links: Sequence[Link], pending: Sequence[Pending], what: str, limit_s: float) -> list[Any]:
    """Wait for an answer of each.

    Args:
        links: Of the ranks that were asked.
        pending: What each of them was asked.
        what: The same, for messages.
        limit_s: The longest.

    Returns:
        Their values, in order.

    Raises:
        ClusterError: one raised, has died, or does not answer. What a rank raises by itself goes before what others
            say of it.
    """
    found = _wait_for_all(links, pending, limit_s)
    errors = [(link, one) for link, one in zip(links, found, strict=True) if one is not None and one.error is not None]
    if errors:
        link, error = min(errors, key=lambda pair: _WEIGHT.get(pair[1].kind, 1))
        kind = "" if error.kind in ("Dead", "RankError") else f"{error.kind}: "
        raise ClusterError(f"rank {link.rank} ({link.name}), {what}: {kind}{error.error}")
    absent = [f"rank {link.rank} ({link.name})" for link, one in zip(links, found, strict=True) if one is None]
    if absent:
        raise ClusterError(f"{', '.join(absent)} did not answer {what} within {limit_s:g} s")
    return [one.value for one in found if one is not None]


def _wait_for_all(links: Sequence[Link], pending: Sequence[Pending], limit_s: float) -> list[Answer | None]:
    """What each answers; None: nothing in time."""
    until = time.monotonic() + limit_s
    found: list[Answer | None] = [None] * len(pending)
    while None in found and time.monotonic() < until:
        for place, (link, one) in enumerate(zip(links, pending, strict=True)):
            if found[place] is not None:
                continue
            if one.wait(_LOOK_S if found.count(None) == 1 else _GLANCE_S):
                found[place] = one.get()
            elif (why := link.why_dead()) is not None:
                found[place] = Answer(None, f"it has died: {why}", "Dead")
            answer_ = found[place]
            if answer_ is not None and answer_.error is not None:
                until = min(until, time.monotonic() + _GRACE_S)
    return found


_WEIGHT = {"Dead": 0, "RankError": 2, "DeviceError": 2, "IterationFailedError": 3}
"""The lowest is told; others are 1."""
