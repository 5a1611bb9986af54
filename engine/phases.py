"""The orders of one iteration as data, on one screen, and the reasons for taking them."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A piece of an iteration; a verb, the same word in code, spans and documents."""

    ADMIT = "admit"  # queue -> rows and blocks; the only place where the queue is changed
    PREPARE = "prepare"  # rows of the next forward, its blocks, its staged inputs; host only
    FORWARD = "forward"  # publish the staged inputs and launch the base forward; becomes pending
    SAMPLE = "sample"  # launch sampling of the pending logits and the copy of its result
    VERIFY = "verify"  # in place of sample, with drafting: which drafts the pending logits bear out
    DRAFT = "draft"  # launch the draft heads: what may follow the newest tokens
    REWIND = "rewind"  # wait for the accepted counts; lengths and states go back to the last accepted token
    RESOLVE = "resolve"  # wait for that copy; finish, release, compact rows; commit tokens
    EMIT = "emit"  # detokenise, match stop strings, make outputs


VERIFICATION = (Phase.VERIFY, Phase.DRAFT, Phase.REWIND)
"""What takes the place of sample where draft tokens are verified."""


class Order(Enum):
    """The phases one iteration takes, in order."""

    LEGACY = (Phase.ADMIT, Phase.PREPARE, Phase.FORWARD, Phase.SAMPLE, Phase.RESOLVE, Phase.EMIT)
    NO_OVERLAP = (Phase.SAMPLE, Phase.RESOLVE, Phase.ADMIT, Phase.PREPARE, Phase.FORWARD, Phase.EMIT)
    OVERLAP = (Phase.PREPARE, Phase.SAMPLE, Phase.FORWARD, Phase.RESOLVE, Phase.EMIT)
    OVERLAP_ADMIT = (Phase.ADMIT, Phase.PREPARE, Phase.SAMPLE, Phase.FORWARD, Phase.RESOLVE, Phase.EMIT)
    PRIMER = (Phase.ADMIT, Phase.PREPARE, Phase.FORWARD)
    DRAIN = (Phase.SAMPLE, Phase.RESOLVE, Phase.EMIT)
    # With drafting lengths depend on what is accepted, so prepare comes behind rewind; it hides behind the draft heads.
    MTP_LEGACY = (Phase.ADMIT, Phase.PREPARE, Phase.FORWARD, *VERIFICATION, Phase.RESOLVE, Phase.EMIT)
    MTP_NO_OVERLAP = (*VERIFICATION, Phase.RESOLVE, Phase.ADMIT, Phase.PREPARE, Phase.FORWARD, Phase.EMIT)
    MTP_OVERLAP = (*VERIFICATION, Phase.PREPARE, Phase.FORWARD, Phase.RESOLVE, Phase.EMIT)
    MTP_OVERLAP_ADMIT = (*VERIFICATION, Phase.ADMIT, Phase.PREPARE, Phase.FORWARD, Phase.RESOLVE, Phase.EMIT)
    MTP_DRAIN = (*VERIFICATION, Phase.RESOLVE, Phase.EMIT)
    # With experts on other ranks each issues the same collectives in every iteration, whatever it has to do: what it
    # lacks of draft heads and forwards is dummy work, and prepare is where ranks agree on how large they are.
    DUMMY = (Phase.PREPARE, Phase.FORWARD)
    MTP_DUMMY = (Phase.DRAFT, Phase.PREPARE, Phase.FORWARD)
    MTP_LEGACY_DUMMY = (Phase.PREPARE, Phase.FORWARD, Phase.DRAFT)
    MTP_PRIMER = (Phase.DRAFT, Phase.ADMIT, Phase.PREPARE, Phase.FORWARD)
    SHARED_DRAIN = (Phase.SAMPLE, Phase.RESOLVE, Phase.PREPARE, Phase.FORWARD, Phase.EMIT)
    MTP_SHARED_DRAIN = (*VERIFICATION, Phase.RESOLVE, Phase.PREPARE, Phase.FORWARD, Phase.EMIT)
    # Unless the device counts lengths: then nothing is waited for before the next forward, and rewind comes behind it.
    MTP_OVERLAP_LATE = (
        Phase.PREPARE,
        Phase.VERIFY,
        Phase.DRAFT,
        Phase.FORWARD,
        Phase.REWIND,
        Phase.RESOLVE,
        Phase.EMIT,
    )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in order."""
        phases: tuple[Phase, ...] = self.value
        return phases

    @property
    def is_overlap(self) -> bool:
        """Whether the next forward is enqueued before the pending one's tokens are known."""
        return self in (
            Order.OVERLAP,
            Order.OVERLAP_ADMIT,
            Order.MTP_OVERLAP,
            Order.MTP_OVERLAP_ADMIT,
            Order.MTP_OVERLAP_LATE,
        )

    @property
    def with_drafting(self) -> Order:
        """The order that takes its place where draft tokens are verified."""
        return _WITH_DRAFTING.get(self, self)

    def among_ranks(self, *, is_legacy: bool, has_drafts: bool) -> Order:
        """The order that takes its place where other ranks hold experts of the model."""
        if self is Order.MTP_DUMMY and is_legacy:
            return Order.MTP_LEGACY_DUMMY
        if self is Order.PRIMER and has_drafts:
            return Order.MTP_PRIMER
        return _AMONG_RANKS.get(self, self)

    @property
    def launches(self) -> bool:
        """Whether it may launch a forward of its own rows."""
        return Phase.FORWARD in self.phases and not self.is_dummy and self.without_drafting is not Order.SHARED_DRAIN

    @property
    def needs_ranks(self) -> bool:
        """Whether only an engine among other ranks takes it."""
        return self.is_dummy or self is Order.MTP_PRIMER or self.without_drafting is Order.SHARED_DRAIN

    @property
    def is_dummy(self) -> bool:
        """Whether it does nothing but what other ranks need."""
        return self in (Order.DUMMY, Order.MTP_DUMMY, Order.MTP_LEGACY_DUMMY)

    @property
    def without_drafting(self) -> Order:
        """The order that it takes the place of."""
        others = {
            Order.MTP_OVERLAP_LATE: Order.OVERLAP,
            Order.MTP_LEGACY_DUMMY: Order.DUMMY,
            Order.MTP_PRIMER: Order.PRIMER,
        }
        if self in others:
            return others[self]
        return next((plain for plain, drafting in _WITH_DRAFTING.items() if drafting is self), self)

    @property
    def label(self) -> str:
        """The order's name in spans, tables and messages."""
        return self.name.lower()


_WITH_DRAFTING = {
    Order.LEGACY: Order.MTP_LEGACY,
    Order.NO_OVERLAP: Order.MTP_NO_OVERLAP,
    Order.OVERLAP: Order.MTP_OVERLAP,
    Order.OVERLAP_ADMIT: Order.MTP_OVERLAP_ADMIT,
    Order.DRAIN: Order.MTP_DRAIN,
    Order.DUMMY: Order.MTP_DUMMY,
    Order.SHARED_DRAIN: Order.MTP_SHARED_DRAIN,
}
_AMONG_RANKS = {
    Order.DRAIN: Order.SHARED_DRAIN,
    Order.MTP_DRAIN: Order.MTP_SHARED_DRAIN,
}


class Reason(Enum):
    """Why an iteration took its order."""

    LEGACY_MODE = "legacy mode"
    STEADY_DECODE = "decode rows only, nothing to admit"
    COUNTS_LATER = "decode rows only, and how many drafts were accepted is waited for beside the next forward"
    ADMITS_BESIDE = "prompts enter the next forward while the pending one runs"
    NO_PENDING_FORWARD = "no forward is pending"
    PREFILL_PENDING = "the pending forward holds prefill rows"
    CHUNK_IN_PROGRESS = "a prompt is being read in chunks"
    PAUSED_ROWS = "rows are paused"
    NOT_ENOUGH_BLOCKS = "not enough blocks for the next token of every row"
    HEAD_ADMISSIBLE = "the head of the queue can be admitted"
    ALL_ROWS_ENDING = "every row ends with the pending forward"
    POLICY = "the order policy refused overlap"
    MODE_SWITCH = "the mode is about to change"
    NOTHING_TO_RUN = "only aborted requests are left"
    OTHERS_WORK = "other ranks have work, and need this one's experts"
