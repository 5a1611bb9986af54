"""The part of a cluster that is looked at: where ranks stand, and what each of them recorded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from engine.parallel.log import from_rows
from engine.request import RequestOutput
from tracing.ranks import ClockOffset, RanksSummary, RankTrace, RoundTrip, clock_offset, on_one_clock
from workbench.cluster_asking import Asking
from workbench.cluster_links import ClusterError
from workbench.cluster_stepper import are_between, is_over
from workbench.cluster_views import Places, RequestTable
from workbench.collectives import CollectivesTable, collectives_table, device_spans
from workbench.expert_load_of_ranks import RanksExpertLoad, ranks_expert_load
from workbench.session import Session

if TYPE_CHECKING:
    from workbench.widgets.timeline import TimelineWidget

_ROUND_TRIPS = 15


class ClusterLooking:
    """Asks ranks; changes nothing."""

    size: int
    _asking: Asking

    def _check_rank(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ClusterError(f"rank must be one of 0 to {self.size - 1}, got {rank!r}")
        return rank

    @property
    def places(self) -> Places:
        """Where all ranks stand."""
        return self._asking.places

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do at any rank."""
        return are_between(self.places) and is_over(self.places)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Of all ranks, with ``in_process``; to look at, to break on, and not to drive: that needs all of them.

        Raises:
            ClusterError: they are in other processes.
        """
        if not self._asking.connection.ends:
            raise ClusterError("the sessions are in processes of their own; use in_process=True to have them here")
        return tuple(end.session for end in self._asking.connection.ends)

    def requests(self) -> RequestTable:
        """Every request of every rank, as a table."""
        return RequestTable(line for lines in self._asking.ask("requests") for line in lines)

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        """Of every rank, the last output of each request or what it has so far; rank 0's first."""
        return {name: output for outputs in self._asking.ask("outputs") for name, output in outputs.items()}

    # -- together --------------------------------------------------------------------------------------------------

    def collectives(self) -> CollectivesTable:
        """What ranks did together, in order, each by its own account; the newest 100,000 of each place."""
        return collectives_table([from_rows(rows) for rows in self._asking.ask("collectives")])

    def check_collectives(self) -> None:
        """Compare those accounts.

        Raises:
            ClusterError: they differ; the first difference.
        """
        difference = self.collectives().difference
        if difference is not None:
            raise ClusterError(str(difference))

    def expert_load(self) -> RanksExpertLoad:
        """Tokens that experts were sent, by whatever rank; needs ``expert_load=True``."""
        return ranks_expert_load(self._asking.ask("expert_load"))

    # -- by time ---------------------------------------------------------------------------------------------------

    def traces(self) -> list[RankTrace]:
        """What each rank recorded, and how its clock lies to rank 0's.

        Processes and threads of one machine read one clock. Elsewhere the offset is measured, by the shortest of some
        round trips to either rank, and is off by half of both at most. Collectives inside device work are with them
        where their times are known, so not on CUDA.
        """
        traces = self._asking.ask("trace")
        # On CUDA the log has the times at which the host enqueued them.
        on_host = all(trace.config["device"] != "cuda" for trace in traces)
        spans = (
            [device_spans(from_rows(rows)) for rows in self._asking.ask("collectives")] if on_host else [()] * self.size
        )
        clocks = [ClockOffset(0, 0)] * self.size if self._asking.connection.has_one_clock else self._clocks()
        return [RankTrace(rank, traces[rank], *clocks[rank], collectives=spans[rank]) for rank in range(self.size)]

    def _clocks(self) -> list[ClockOffset]:
        """What to add to each rank's times to have rank 0's."""
        first, *others = [self._measure_clock(rank) for rank in range(self.size)]
        return [
            ClockOffset(0, 0),
            *(ClockOffset(one.offset_ns - first.offset_ns, one.error_ns + first.error_ns) for one in others),
        ]

    def _measure_clock(self, rank: int) -> ClockOffset:
        """What to add to a rank's times to have this process'."""
        return clock_offset(self._round_trip(rank) for _ in range(_ROUND_TRIPS))

    def _round_trip(self, rank: int) -> RoundTrip:
        sent_ns = time.perf_counter_ns()
        (remote_ns,) = self._asking.ask("now_ns", ranks=[rank])
        return RoundTrip(sent_ns, remote_ns, time.perf_counter_ns())

    def summary(self) -> RanksSummary:
        """Busy, dummy and waiting shares, and tokens, by rank."""
        return on_one_clock(self.traces()).summary

    def timeline(self, **traits: Any) -> TimelineWidget:
        """What all ranks did, one below the other on one clock, as a widget.

        Raises:
            ClusterError: ipywidgets or anywidget is not installed.
        """
        try:
            from workbench.widgets.timeline import TimelineWidget
        except ImportError as error:
            raise ClusterError(
                f"a timeline needs {error.name}; install the notebook's packages with: pip install -e '.[notebook]'"
            ) from error
        return TimelineWidget.of_ranks(self.traces(), **traits)
