"""A session: one engine with a clock, arrivals to come, and everything that happened, driven at any grain.

Here are driving, stopping and starting over; requests come in through :mod:`workbench.submitting`, and what there is to
see is in :mod:`workbench.looking`. ``step_phase``, ``step``, ``run`` and ``run_async`` go through the engine's one code
path (:mod:`workbench.driver`), so what is stepped is what is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine.admission import AdmissionPolicy, first_come_first_served
from engine.config import EngineConfig
from engine.controller import Border
from engine.engine import Engine, Failure
from engine.graphs import GraphListPolicy, captured_by_default
from engine.lifecycle import EngineState, Suspension, WeightSource
from engine.models.loader import LoadedModel
from engine.parallel.ranks import Ranks
from engine.phases import Phase, Reason
from engine.policy import OrderPolicy, prefer_overlap
from engine.progress import CaptureBar
from engine.request import RequestOutput
from tracing.recorder import Recorder
from tracing.trace import Trace
from workbench.arrivals import Submission
from workbench.background import Background, BackgroundRun, show_error
from workbench.breakpoints import Breakpoint, Breakpoints, Condition
from workbench.clock import IterationsClock, make_clock
from workbench.debugging import debug_phase, revive_breakpoint
from workbench.delays import Delays
from workbench.desk import Desk
from workbench.driver import Driver, Script
from workbench.events import EventLog, suspension_text
from workbench.expert_load import ExpertCounter
from workbench.expressions import Expressions, WatchExpression
from workbench.history import ChangeRecorder, History
from workbench.loading import load_for, session_config
from workbench.looking import Looking
from workbench.peek import SessionError as SessionError
from workbench.policies import Policies
from workbench.snapshot import Snapshot
from workbench.stops import RunOutcome, Stop
from workbench.submitting import Submitting
from workbench.watch import BorderWatch

if TYPE_CHECKING:
    from workbench.panel.panel import Panel
    from workbench.replays import Replay

_session_ids = itertools.count(1)


class Session(Submitting, Looking):
    """One engine under a person's hands. Needs no notebook; close it, or use it in a ``with`` block.

    Args:
        model: A folder, a GGUF file, ``shipped``, ``smollm2``, ``shape:NAME``, ``oracle``, or a model loaded before
            (two sessions may share one). None: ``shipped``, the one that comes with the package.
        mode: ``async`` or ``legacy``. None: the configuration's, which is ``async`` unless it says otherwise.
        config: Options of the engine.
        clock: What arrivals are measured on: ``virtual``, ``iterations`` or ``wall``; see :mod:`workbench.clock`.
        policy: May refuse overlap where it is legal.
        admission: Whose turn it is; by default first come, first served.
        graph_list: Which forwards are captured; by default what ``graphs`` and ``graph_distribution`` say.
        recorder: The instrument; None makes one that is on.
        expert_load: Count the tokens that each expert is sent, for :meth:`expert_load` and the panel.
        ranks: With ``expert_parallel``, this rank's connection to the others; None joins those that ``torchrun``
            started together with this process. All ranks are to be driven alike; a
            :class:`~workbench.cluster.Cluster` does so.
        progress: Show, in a notebook or on a terminal, that weights are loaded and graphs captured; elsewhere nothing.
        **engine_options: Fields of :class:`engine.config.EngineConfig`; they win over ``config``.

    Raises:
        CheckpointError: the model cannot be loaded; for ``smollm2`` the message holds the command that installs it.
        ConfigError: an option is unknown or does not fit.
        SessionError: ``expert_load`` is asked of a model without experts.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        mode: str | None = None,
        config: EngineConfig | None = None,
        *,
        clock: str = "virtual",
        policy: OrderPolicy = prefer_overlap,
        admission: AdmissionPolicy = first_come_first_served,
        graph_list: GraphListPolicy = captured_by_default,
        recorder: Recorder | None = None,
        expert_load: bool = False,
        ranks: Ranks | None = None,
        progress: bool = True,
        **engine_options: Any,
    ) -> None:
        self.config = session_config(config, mode, engine_options)
        own_clock = make_clock(clock, self._iterations_begun)
        self.recorder = recorder or Recorder(session_id=next(_session_ids))
        loaded = load_for(self.config, model, ranks=ranks, progress=progress)
        self._experts = ExpertCounter(loaded, wanted=expert_load)
        self.engine = Engine(
            loaded,
            self.config,
            recorder=self.recorder,
            policy=policy,
            admission=admission,
            graph_list=graph_list,
            ranks=ranks,
            progress=CaptureBar() if progress else None,
        )
        self._forget_load()  # of forwards that were run to be captured
        self._watch = BorderWatch(self.engine.controller.watch, is_inline=self.config.device == "inline")
        self.engine.controller.watch = self._watch
        self._desk = Desk(self.engine, own_clock, lambda: self._driver.seat.is_taken)
        self._own_clock = own_clock
        self._policies = Policies(order=policy, admission=admission, graph_list=graph_list)
        self._changes = ChangeRecorder(self.engine)
        self.events = EventLog(self._iterations_begun)
        """What happened, in order; ``events.listen(function)`` is told of what is to come."""
        self.breakpoints = Breakpoints(self, self._desk.book)
        """All of them; :meth:`break_on` makes one."""
        self.watches = Expressions()
        """All watch expressions; :meth:`watch` makes one."""
        self.history = History(self.recorder, self._changes, self.watches)
        """Past iterations: ``history[7]``, ``history[-1]``, ``history.diff(7, "prepare")``."""
        self._driver = Driver(self, self._desk, self._watch, self.breakpoints, self.watches, self.events)
        self._delays = Delays(self.engine)
        self._background = Background(self._driver, lambda: self.state, show_error)
        revive_breakpoint()

    def _iterations_begun(self) -> int:
        return self.engine.controller.next_index

    # -- driving ---------------------------------------------------------------------------------------------------

    def step_phase(self) -> Border | None:
        """Run one phase and stand still behind it; None when nothing is left to do.

        A breakpoint before the first phase of an iteration holds it there, with nothing run: the border's side is then
        ``before``, and :attr:`stopped` says why.

        The iteration's times are void, and a virtual clock stands still.
        """
        return self._driver.step_phase()

    def begin_iteration(self) -> Border | None:
        """Begin an iteration and stand before its first phase, with nothing run; times are void as by hand.

        What :meth:`step_phase` does first. Apart from it, ranks that are stepped together can wait for one another here
        before any of them waits in a phase.

        Returns:
            The border; None when nothing is left to do, or an iteration is in hand.
        """
        return self._driver.begin_iteration()

    def step(self) -> list[RequestOutput]:
        """Run one iteration, or finish the one in hand; returns its outputs, none when nothing is left to do.

        A breakpoint on the way holds it in mid iteration; :attr:`stopped` then says so.
        """
        return self._driver.step()

    def run(self, n: int | None = None) -> RunOutcome:
        """Run ``n`` iterations, or until nothing is left to do; a breakpoint ends it earlier.

        Returns:
            A list of the requests that ended meanwhile, whose ``stopped`` says why it stopped.

        Raises:
            SessionError: ``n`` is negative.
        """
        return self._driver.run(n)

    def run_until(self, predicate: Condition, *, limit: int = 10_000) -> int:
        """Run whole iterations until ``predicate(session)`` is true; an iteration in hand is finished first.

        Returns:
            The number of iterations it took, 0 if it was true at once. A breakpoint may end it earlier, see
            :attr:`stopped`.

        Raises:
            SessionError: it is not true after ``limit`` iterations, or when nothing is left to do.
        """
        return self._driver.run_until(predicate, limit)

    def run_to(self, phase: Phase | str, *, limit: int = 10_000) -> Snapshot:
        """Run on until just before ``phase``, and stand there; nothing runs if it stands there already.

        That is in the iteration in hand, or else in the next one that has the phase. Iterations without it run
        whole, and their times count. To stand before the first phase of an order is to stand between iterations.
        A breakpoint on the way ends it earlier.

        Args:
            phase: ``admit``, ``prepare``, ``forward``, ``sample``, ``resolve`` or ``emit``; with drafting also
                ``verify``, ``draft`` and ``rewind``, in place of ``sample``.
            limit: The most iterations to run through.

        Returns:
            What there is to see there.

        Raises:
            SessionError: no phase has that name, none comes within ``limit`` iterations, or nothing is left to do.
        """
        self._driver.run_to(phase, limit)
        return self.snapshot()

    async def run_async(self, n: int | None = None, *, until: Condition | None = None) -> RunOutcome:
        """:meth:`run` for an event loop: other cells and button clicks have their turn every few milliseconds.

        ``await`` it in a notebook cell; :meth:`pause` ends it behind the iteration in hand, as do a breakpoint and
        ``until(session)``, which is asked between iterations. While it runs, everything that does not drive is allowed.

        Raises:
            SessionError: ``n`` is negative, or the session is driven already.
        """
        return await self._background.run(n, until)

    def start(self, n: int | None = None, *, until: Condition | None = None) -> BackgroundRun:
        """Begin :meth:`run_async` as a task of the running loop and return at once; :attr:`pace_s` slows it down.

        What a phase raises is shown, :attr:`state` is ``failed``, and :meth:`recover` or :meth:`reset` go on.

        Raises:
            SessionError: no event loop is running, or the session is driven already.
        """
        run = self._background.start(n, until)
        self.events.tell("started", "in the background")
        return run

    def pause(self) -> None:
        """Let a run in the background stop behind the iteration in hand; nothing happens if none runs."""
        self._background.pause()

    @property
    def pace_s(self) -> float:
        """How long a run in the background rests behind each iteration, in seconds, so that a person can follow it.

        May be set at any time, in a run in progress too. Iterations with a pace are void (``paced``): the device stands
        idle between them, which is nobody's fault.

        Raises:
            SessionError: on setting, it is negative or no finite number.
        """
        return self._background.pace_s

    @pace_s.setter
    def pace_s(self, pace_s: float) -> None:
        if not 0 <= pace_s < float("inf"):
            raise SessionError(f"pace_s is a time in seconds, at least 0 (0: no rest); got {pace_s!r}")
        self._background.pace_s = pace_s

    def capture(self, n: int | None = None) -> list[RequestOutput]:
        """Run ``n`` iterations, or until nothing is left to do, for a profiler that waits for the range ``capture``.

        At its end it waits for the device once, so that the profiler sees the work of the last iteration too.
        ``docs/metrics.md`` has the command lines; without a profiler this is :meth:`run`.

        Returns:
            The requests that ended meanwhile.

        Raises:
            MidIterationError: an iteration is in hand, and the profiler would see half of it.
            SessionError: ``n`` is negative.
        """
        self.engine.require_border("capture")
        with self.recorder.capture():
            done = self.run(n)
            self.engine.device.synchronize()
        return done

    def capture_button(self, n: int = 100) -> Any:
        """A button for the notebook that runs :meth:`capture`, beside a field for the number of iterations."""
        from workbench.capture_button import CaptureButton

        return CaptureButton(self, n).widget

    def panel(self, *, max_spans: int = 100_000) -> Panel:
        """The notebook application: buttons and keys that drive this session, and all there is to see of it.

        Several panels may show one session, and cells may drive it beside them.

        Args:
            max_spans: The most that its timeline keeps in the browser; the newest win.

        Raises:
            SessionError: ipywidgets or anywidget is not installed.
        """
        try:
            from workbench.panel.panel import Panel
        except ImportError as error:
            raise SessionError(
                f"a panel needs {error.name}; install the notebook's packages with: pip install -e '.[notebook]'"
            ) from error
        return Panel(self, max_spans=max_spans)

    @property
    def state(self) -> str:
        """``running``, ``failed``, ``finished`` (nothing is left to do) or ``paused``."""
        if self._driver.seat.is_taken:
            return "running"
        if self.last_failure is not None:
            return "failed"
        return "finished" if self.finished else "paused"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: every request has ended and none is to come."""
        return self._desk.finished

    @property
    def mode(self) -> str:
        """The mode in force. Setting it drains the pending forward and goes on, from the next iteration border."""
        return self.engine.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.engine.set_mode(mode)
        self.events.tell("mode", f"{mode} from the next iteration border on")

    # -- stopping where it matters ---------------------------------------------------------------------------------

    def break_on(
        self,
        phase: Phase | str | None = None,
        *,
        when: Condition | None = None,
        request: str | None = None,
        reason: Reason | str | None = None,
        graph_miss: bool = False,
        bubble_longer_than_us: float | None = None,
    ) -> Breakpoint:
        """Make runs and steps stand still where all that is given holds.

        Args:
            phase: Before this phase. Without it the place follows from the rest: a reason is known before an
                iteration's first phase, a graph miss before forward, a bubble behind the iteration it is seen in.
            when: ``when(session)`` is true. Alone it is asked at every border, and stops where it *becomes* true.
            request: With a phase, a reason or a graph miss: the phase works on this request. Alone: where its state
                changes (it arrives, is admitted, has its first token, ends).
            reason: The iteration took its order for this :class:`~engine.phases.Reason`.
            graph_miss: The iteration's forward runs eagerly although graphs are captured.
            bubble_longer_than_us: A longer bubble became known, in microseconds. Device work is known when it has
                ended, so it is seen about an iteration late. Bubbles that began before this call, or before the session
                was driven on after its last stop, do not count.

        Raises:
            SessionError: nothing is given, or it could never happen.
        """
        return self.breakpoints.add(
            phase=phase,
            when=when,
            request=request,
            reason=reason,
            graph_miss=graph_miss,
            bubble_longer_than_us=bubble_longer_than_us,
        )

    @property
    def stopped(self) -> Stop | None:
        """Why the last run stopped; after a step None, unless a breakpoint or a failure held it."""
        return self._driver.stopped

    def watch(self, name: str, function: Condition) -> WatchExpression:
        """Note ``function(session)`` at the end of every iteration, in :attr:`history` too.

        Let it return a value rather than something that goes on changing. What it raises is noted in its place.
        """
        return self.watches.add(name, function)

    @contextmanager
    def delayed(self, delays_s: Mapping[str, float]) -> Iterator[None]:
        """While it is entered, some work takes longer: a slower scheduler, or a slower device.

        The delay of a phase is its first work, so that its span and blame show it; tokens stay the same. Runs that
        were recorded meanwhile say so in ``trace.environment["delays_s"]``. :meth:`tracing.trace.Trace.what_if`
        predicts from a run without the delay what one with it shows.

        Args:
            delays_s: Seconds by phase, such as ``{"resolve": 0.002}``, or on the CPU devices by device work, such as
                ``{"device forward": 0.01}``.

        Raises:
            SessionError: there is no such work, or a delay is negative.
        """
        with self._delays.delayed(delays_s):
            yield

    def pdb(self, phase: Phase | str, *, limit: int = 10_000) -> Border | None:
        """Run to ``phase``, and through it under a debugger that stops at its first line.

        IPython's debugger in IPython, ``pdb`` elsewhere. ``s`` steps into what the phase calls; ``q`` and ``c`` let the
        phase go on to its end. On ``device="inline"`` no other thread runs. None where a breakpoint came before.
        """
        return debug_phase(self, phase, limit)

    # -- standing still --------------------------------------------------------------------------------------------

    def suspend(self, mode: str | None = None) -> Suspension:
        """Give memory of the device back until :meth:`resume`; see :meth:`engine.engine.Engine.suspend`.

        Driving raises EnginePausedError meanwhile; requests may be submitted and aborted.

        Args:
            mode: ``persist``, ``offload`` or ``recompute``; None: the option ``suspend_mode``.

        Raises:
            SessionError: the session is being driven.
            MidIterationError: an iteration is in hand.
        """
        with self._undriven("suspend"):
            suspension = self.engine.suspend(mode)
            self.events.tell("suspended", suspension_text(suspension))
            return suspension

    def resume(self) -> None:
        """Run again after :meth:`suspend`; see :meth:`engine.engine.Engine.resume`.

        Raises:
            ConfigError: the memory cannot be had any more.
        """
        with self._undriven("resume"):
            stood_still = self.engine.state is not EngineState.RUNNING
            self.engine.resume()
            if stood_still:
                self.events.tell("awake", "the memory is there again, iterations go on")

    def load_weights(self, source: WeightSource) -> None:
        """Copy new weights into the suspended model; see :meth:`engine.engine.Engine.load_weights`.

        Raises:
            CheckpointError: the source does not fit the model, whose weights are whole.
            EngineError: the engine is not suspended.
        """
        with self._undriven("load_weights"):
            self.engine.load_weights(source)
            self.events.tell("weights", "replaced while suspended")

    @contextmanager
    def _undriven(self, what: str) -> Iterator[None]:
        claim = self._driver.seat.claim(what)
        try:
            yield
        finally:
            self._driver.seat.release(claim)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; what runs goes on undisturbed. Not recorded: a replay does not repeat it.

        Returns:
            Cached blocks that are free now; 0 without prefix caching.
        """
        freed = self.engine.reset_prefix_cache()
        self.events.tell("forgot", f"cached prefixes; {freed} of their blocks are free now")
        return freed

    # -- after a failure, starting over ----------------------------------------------------------------------------

    @property
    def last_failure(self) -> Failure | None:
        """What stopped the engine, with the phase it happened in; None once it was recovered or reset."""
        return self.engine.failure

    def recover(self) -> None:
        """Go on after a failed iteration; no token is lost or changed.

        Raises:
            SessionError: nothing has failed.
        """
        if self.last_failure is None:
            raise SessionError("recover: nothing has failed")
        self._background.cancel()
        self.engine.recover()
        self.events.tell("recovered", "every row is computed again from its tokens")

    def reset(self) -> list[RequestOutput]:
        """Drop everything, in mid iteration too: requests, trace, history, counters, clock; ends a replay.

        Breakpoints and watch expressions stay. Returns the aborted requests.
        """
        self._desk.clock, self.engine.controller.policy = self._own_clock, self._policies.order
        self._driver.script = Script()
        outputs = self._clear()
        self.events.tell("reset", f"{len(outputs)} requests aborted")
        return outputs

    def _clear(self) -> list[RequestOutput]:
        self._background.cancel()
        self._driver.stopped = None
        outputs = self.engine.reset()
        self._desk.clear()
        self._watch.clear()
        self.recorder.clear()
        for part in (self._changes, self.watches, self._delays):
            part.clear()
        self._forget_load()
        self.breakpoints.start_over()
        return outputs

    def _forget_load(self) -> None:
        if self._experts.is_counting:
            self.engine.device.synchronize()
            self._experts.clear()

    def _enter(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            self._desk.enter(submission)

    def restart(self) -> None:
        """Start over with the same requests, seeds and arrivals; an iteration in hand is discarded.

        A request submitted during the run arrives where the clock then stood. Aborts are not repeated, and the mode
        stays what it is; a replay begins again. On the ``iterations`` clock, or where all arrive at once, the schedule
        is the same again.
        """
        submissions = self.submissions
        self._clear()
        self._enter(submissions)
        self._driver.script.begin()
        self.events.tell("restarted", f"{len(submissions)} requests")

    def replay(self, run: Trace | str | Path) -> Replay:
        """Drop everything and repeat a recorded run: its requests, arrivals, aborts, mode switches and orders.

        Drive the session as ever; each iteration's tokens are compared with the record. What is returned shows the
        record's true times beside it, whatever the session's device. :meth:`reset` ends the replay.

        Args:
            run: A trace, or the folder of a saved one.

        Raises:
            ReplayError: the run lacks something, or this session could not give the same tokens. While it is driven:
                a token or an end differs.
        """
        from workbench.replays import Replay, read_script

        script = read_script(run, self.resolved_config())
        self._clear()
        self._desk.clock = IterationsClock(self._iterations_begun)
        replay = Replay(self, script)
        self.engine.controller.policy = replay.policy
        self._driver.script = replay
        self._enter(script.submissions)
        replay.begin()
        self.events.tell("replay", script.run.name)
        return replay

    def close(self) -> None:
        """Stop the engine's threads; what was recorded can still be read."""
        self._background.cancel()
        self.engine.close()
        self.events.tell("closed", "")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._background.cancel()
        self.engine.__exit__(kind, error, trace)  # with an error it tells other ranks, rather than work on for them
        self.close()
