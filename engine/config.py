"""What an engine is built with. API, command line and configuration files share these fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from engine.errors import ConfigError

Mode = Literal["async", "legacy"]
DeviceKind = Literal["cpu", "inline", "cuda"]
DTypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
GraphDistribution = Literal["exponential", "linear", "hybrid"]
ExpertDispatch = Literal["all_gather", "all_to_all"]
GraphSizes = Literal["auto"] | int | Sequence[int] | None
SuspendMode = Literal["persist", "offload", "recompute"]
RoutingReplayMode = Literal["record", "replay"]
StateRewind = Literal["auto", "stored", "replayed"]
StateDType = Literal["auto", "float32", "bfloat16", "float16"]

MODES: tuple[str, ...] = get_args(Mode)
DEFAULT_MODE: Mode = "async"


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_mode(mode: str) -> Mode:
    """Return ``mode`` if it is one of the two; raise ConfigError naming both otherwise."""
    if mode not in MODES:
        raise ConfigError(f"mode must be 'async' or 'legacy', got {mode!r}")
    return mode  # type: ignore[return-value]


def check_routing_mode(routing_replay: str | None, mode: str) -> None:
    """Raise ConfigError if choices of experts are to be kept in a mode that cannot."""
    if routing_replay is not None and mode != "legacy":
        raise ConfigError(
            f"routing_replay={routing_replay!r} needs mode='legacy', got mode={mode!r}: what a row recorded is fetched "
            "before anything else is launched"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Every field has the same name in YAML files and, with dashes, as a flag."""

    mode: Mode = DEFAULT_MODE
    """Scheduling mode. ``async`` hides host work behind the pending forward; ``legacy`` does not."""
    device: DeviceKind = "cpu"
    """``cpu``: thread device, worker threads as streams. ``inline``: runs at enqueue, for debuggers. ``cuda``."""
    dtype: DTypeName = "auto"
    """Weights, activations and cache. ``auto``: float32 on CPU, bfloat16 on CUDA. float64 for exact studies."""
    block_size: int = 16
    """Tokens of one KV block."""
    num_blocks: int | None = None
    """Usable KV blocks, the dummy block not counted. None: from ``kv_cache_gb``, else room for
    ``max_requests`` sequences of ``max_sequence_length``, at most 1 GiB, on CUDA half of what is free."""
    kv_cache_gb: float | None = None
    """KV pool size in GiB; exclusive with ``num_blocks``."""
    max_requests: int = 64
    """Rows of the request table: requests that may hold blocks at once."""
    max_batch_tokens: int = 2048
    """Tokens of one forward. Without chunked prefill it bounds ``max_sequence_length``."""
    max_sequence_length: int | None = None
    """Prompt plus output of one request. None: the model's limit, at most ``max_batch_tokens`` unless prompts are read
    in chunks."""
    sampling_backend: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    """``torch`` is the reference and runs everywhere. On CUDA ``triton`` draws rows without filters by kernels of its
    own, and ``flashinfer`` finds the filters' borders as well. Same stream in all of them."""
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    """``torch`` is the reference and runs everywhere. ``triton``: CUDA, bfloat16 and float16; the operations around
    attention are fused kernels then, too. ``flashinfer``: FlashInfer's kernels, XQA for decode rows, and FA3 for
    prefill rows, planned in prepare; rows of several tokens (drafts) and few decode rows are left to Triton.
    ``auto``: triton where it runs, as it is the faster."""
    ssm_backend: Literal["auto", "torch", "triton", "mamba_ssm"] = "auto"
    """What computes the recurrence of state-space layers. ``torch`` is the reference and runs everywhere; ``triton``
    and ``mamba_ssm`` (mamba-ssm's own kernels) need CUDA. ``auto``: triton there, else torch."""
    graphs: GraphSizes = "auto"
    """Captured forwards: None or 0 = none, a count of sizes, -1 = a count by the largest size, or a list of token
    counts. ``auto``: none on the CPU devices; on CUDA decode forwards of 1, 2, 4, 8, 16, 24, .. rows, without which
    launches from Python would keep the GPU waiting. On the CPU devices a graph is a traced and frozen forward of fixed
    shape, called a bucket: one for each size, mix of rows (``graph_non_decode``) and power-of-two length of the cache,
    so name few sizes there."""
    graph_distribution: GraphDistribution = "exponential"
    """How graph sizes are spaced when ``graphs`` is a count."""
    graph_non_decode: bool = True
    """Also capture forwards that hold prefill rows."""
    graph_all_prefills: bool = False
    """Graph-aware admission (upstream: cuda_graph_all_prefills): a prompt enters whole, or with ``chunked_prefill`` in
    a chunk cut down to a captured forward, and waits while there is none for it. Prompts that want log probabilities,
    chunks behind the first and requests that come back with output run eagerly where nothing fits, and with
    ``expert_parallel`` forwards that fit a graph here, but none beside what other ranks have. Takes effect with
    ``graph_non_decode`` and captured graphs."""
    chunked_prefill: bool = False
    """Read prompts that exceed what a forward's token budget leaves in chunks, beside decode rows, one at a time. It
    lets ``max_sequence_length`` exceed ``max_batch_tokens``."""
    prefix_caching: bool = False
    """Reuse KV blocks of equal prefixes: prompts that begin alike are computed once. Blocks are told apart by what they
    hold and by ``cache_salt`` of ``Engine.add_request``."""
    eviction_policy: Literal["lru", "ref_zero"] = "lru"
    """What becomes of a cached block that nobody holds. ``lru``: it stays until its place is needed, and the least
    recently used one that no cached block follows goes first. ``ref_zero``: it is free at once."""
    capacity_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    """When there are blocks enough to admit a request. ``guaranteed_no_evict``: if the pool could hold every live
    request at its longest output, so that none ever gives way. ``max_utilization``: if it holds its prompt; when blocks
    run out rows pause, and the newest go back to the queue and are computed again."""
    paused_blocks: int | None = None
    """Blocks that paused rows may hold together; None: a quarter of the pool. Beyond it they go back to the queue. Only
    with ``max_utilization``."""
    overlap_admission: bool = True
    """In async mode, let prompts enter the next forward while the pending one still runs: admission, chunks and first
    tokens cost no exposed iteration. That a row has ended is noticed a forward later, as wherever forwards overlap.
    False: as upstream, an admission resolves first, and what it launches is not overlapped either."""
    speculative_tokens: int = 0
    """Tokens that the model's own draft heads (MTP layers) propose for each decode row and step, at most as many as it
    has. The next forward reads them beside the newest token and verifies them: outputs are those of 0, only faster."""
    late_rewind: bool = True
    """With ``speculative_tokens``, in async mode: launch the next forward before it is known how many drafts were
    accepted, and wait for that beside it. The device counts lengths itself, the host reckons with the most there may
    be; a row that ends within its accepted drafts is noticed a forward later, as wherever forwards overlap. Without
    drafts, in legacy mode and with ``expert_parallel`` it changes nothing: ranks draft before they agree on the next
    forward, so that none waits for another (decision 0019)."""
    mamba_cache_gb: float | None = None
    """With ``prefix_caching``, on models with recurrent layers: GiB for snapshots of their states at block borders,
    without which no prefix can be skipped. 0: none. None: as many snapshots as ``max_requests``."""
    state_rewind: StateRewind = "auto"
    """With ``speculative_tokens``, on models with recurrent layers: how their states go back behind rejected drafts.
    ``stored``: a slot holds a state for each token of a step, and the next forward goes on from the right one.
    ``replayed``: it holds the one before the step and small inputs of the step's tokens; the next forward lets the
    accepted ones enter it first. Less memory, and one state written a step. ``auto``: replayed, where the model and
    ``ssm_backend`` can."""
    mamba_state_dtype: StateDType = "auto"
    """In which type Mamba2 layers keep their states between forwards; sums within one are float32 at least. Halves are
    half the memory and traffic, and round a state once a step. ``auto``: float32, float64 in float64 models."""
    suspend_mode: SuspendMode | None = None
    """What ``Engine.suspend`` does unless it is told. ``persist``: memory stays as it is.
    ``offload``: the device's memory is given back, what requests need of it waits in pinned host memory. ``recompute``:
    it is given back, and every request is computed again from its tokens. None: ``persist``."""
    routing_replay: RoutingReplayMode | None = None
    """In legacy mode, on models with experts. ``record``: outputs tell which experts each token went to in each layer.
    ``replay``: as well, and requests may bring such choices with them (``routing`` of ``Engine.add_request``), which
    are used in place of the router's. See docs/routing_replay.md."""
    expert_parallel: int = 1
    """Ranks that share a model's experts: each holds a part of every layer's and serves requests of its own. They are
    started by ``torchrun`` or a ``Cluster``, all with the same options."""
    expert_dispatch: ExpertDispatch = "all_gather"
    """With ``expert_parallel``, how tokens come to experts. ``all_gather``: all to every rank, and results are summed
    (reduce-scatter); sizes are agreed on, so graphs can hold it. ``all_to_all``: to the ranks of their experts only;
    how many is waited for, so it needs ``graphs`` None."""
    rank_timeout_s: float = 60.0
    """With ``expert_parallel``, how long a rank waits for the others before it gives up. What stands still between two
    phases for longer, in a debugger say, needs more."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """``raw``: log-softmax of the model's logits. ``processed``: after penalties, temperature and filters."""
    launch_ending_rows: bool = False
    """Keep rows that are known to end by length in the next forward, as upstream does; one wasted row each."""
    debug_invariants: bool = False
    """Check ``engine/invariants.py`` after every phase and poison void buffers. Voids timings."""
    seed: int = 0
    """Seeds requests that bring none: request number k samples with a hash of (seed, k)."""
    op_sleep_s: float = 0.0
    """CPU devices only: extra seconds each forward takes on the device, for overlap studies. For other work, pass
    ``ThreadDevice(op_sleep_s={"sample": 0.001})`` to the engine."""

    def __post_init__(self) -> None:
        check_mode(self.mode)
        self._check_choices()
        self._check_counts()
        check_routing_mode(self.routing_replay, self.mode)

    def _check_choices(self) -> None:
        for name, allowed in (
            ("device", get_args(DeviceKind)),
            ("dtype", get_args(DTypeName)),
            ("graph_distribution", get_args(GraphDistribution)),
            ("sampling_backend", ("auto", "torch", "triton", "flashinfer")),
            ("attention_backend", ("auto", "torch", "triton", "flashinfer")),
            ("ssm_backend", ("auto", "torch", "triton", "mamba_ssm")),
            ("state_rewind", get_args(StateRewind)),
            ("expert_dispatch", get_args(ExpertDispatch)),
            ("mamba_state_dtype", get_args(StateDType)),
            ("logprobs_mode", ("raw", "processed")),
            ("eviction_policy", ("lru", "ref_zero")),
            ("capacity_policy", ("guaranteed_no_evict", "max_utilization")),
            ("suspend_mode", (None, *get_args(SuspendMode))),
            ("routing_replay", (None, *get_args(RoutingReplayMode))),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}; got {getattr(self, name)!r}")
        if self.dtype == "float64" and self.device == "cuda" and self.attention_backend not in ("auto", "torch"):
            raise ConfigError("dtype=float64 needs attention_backend=torch")

    def _check_counts(self) -> None:
        for name in (
            "graph_non_decode",
            "graph_all_prefills",
            "chunked_prefill",
            "prefix_caching",
            "overlap_admission",
            "launch_ending_rows",
            "late_rewind",
            "debug_invariants",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("kv_cache_gb", "mamba_cache_gb", "op_sleep_s", "rank_timeout_s"):
            value = getattr(self, name)
            if value is not None and not _is_finite(value):
                raise ConfigError(f"{name} must be a finite number, got {value!r}")
        if not self.rank_timeout_s > 0:
            raise ConfigError(f"rank_timeout_s must be above 0, got {self.rank_timeout_s!r}")
        if self.expert_dispatch == "all_to_all" and self.graphs not in ("auto", None, 0):
            raise ConfigError(
                "expert_dispatch=all_to_all waits for how many tokens go where, so graphs cannot hold it; use "
                "graphs=None, or all_gather"
            )
        sizes = ("block_size", "max_requests", "max_batch_tokens", "num_blocks", "max_sequence_length")
        for name in (*sizes, "expert_parallel"):
            value = getattr(self, name)
            if value is None and name in ("num_blocks", "max_sequence_length"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive whole number, got {value!r}")
        if self.num_blocks is not None and self.kv_cache_gb is not None:
            raise ConfigError("num_blocks and kv_cache_gb exclude each other; give one")
        if self.kv_cache_gb is not None and not self.kv_cache_gb > 0:
            raise ConfigError(f"kv_cache_gb must be above 0, got {self.kv_cache_gb!r}")
        if self.mamba_cache_gb is not None and not (self.mamba_cache_gb >= 0 and self.prefix_caching):
            raise ConfigError("mamba_cache_gb must be at least 0, and is of use with prefix_caching only; set both")
        self._check_paused_blocks()
        self._check_drafts()
        self._check_graphs()
        if self.max_batch_tokens < self.max_requests:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_requests ({self.max_requests}), "
                "so that every row can decode; raise the one or lower the other"
            )
        if self.chunked_prefill and self.max_batch_tokens < self.max_requests + 2:
            raise ConfigError(
                f"chunked_prefill: max_batch_tokens ({self.max_batch_tokens}) must be at least max_requests + 2 "
                f"({self.max_requests + 2}), so that a chunk has room beside all other rows; raise it"
            )
        if self.op_sleep_s < 0 or (self.op_sleep_s and self.device == "cuda"):
            raise ConfigError("op_sleep_s must be 0 or more, and works on the CPU devices only")

    def _check_drafts(self) -> None:
        count = self.speculative_tokens
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < self.block_size:
            raise ConfigError(
                f"speculative_tokens must be a whole number from 0 to block_size - 1 ({self.block_size - 1}), "
                f"got {count!r}"
            )
        if count and self.max_batch_tokens < self.max_requests * self.decode_width + 2 * self.chunked_prefill:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_requests * (speculative_tokens + 1) "
                f"({self.max_requests * self.decode_width}), so that every row can decode; raise the one or lower the "
                "others"
            )

    @property
    def decode_width(self) -> int:
        """Tokens of a decode row in a forward: the newest one, and its drafts."""
        return 1 + self.speculative_tokens

    @property
    def counts_lengths(self) -> bool:
        """Whether decode rows' lengths, and the states they go on from, are worked out on the device."""
        return self.late_rewind and self.speculative_tokens > 0 and not self.has_ranks

    @property
    def has_ranks(self) -> bool:
        """Whether other ranks hold experts of the model."""
        return self.expert_parallel > 1

    @property
    def replays_states(self) -> bool:
        """Whether recurrent states go back behind rejected drafts by replaying the accepted tokens."""
        return self.state_rewind == "replayed" and self.speculative_tokens > 0

    @property
    def states_per_row(self) -> int:
        """States that a row's slot holds, on models with recurrent layers."""
        return 1 if self.replays_states else self.decode_width

    @property
    def lookahead(self) -> int:
        """Positions behind those in the cache that a decode row's next step may write.

        The tokens it reads, and those that its draft heads read behind them.
        """
        return 1 + 2 * self.speculative_tokens

    def _check_paused_blocks(self) -> None:
        count = self.paused_blocks
        if count is None:
            return
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"paused_blocks must be a whole number, at least 0, got {count!r}")
        if self.capacity_policy != "max_utilization":
            raise ConfigError("paused_blocks: no row ever pauses with guaranteed_no_evict; set capacity_policy too")

    def _check_graphs(self) -> None:
        if self.graphs == "auto":
            return
        is_list = isinstance(self.graphs, Sequence) and not isinstance(self.graphs, str)
        is_count = isinstance(self.graphs, int) and not isinstance(self.graphs, bool) and self.graphs >= -1
        if not (self.graphs is None or is_list or is_count):
            raise ConfigError(f"graphs must be auto, None, a count, -1 or a list of sizes; got {self.graphs!r}")
        if self.graphs is not None and not isinstance(self.graphs, int):
            sizes = tuple(self.graphs)
            if not sizes or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
                raise ConfigError(f"graphs as a list holds positive token counts, got {self.graphs!r}")
            object.__setattr__(self, "graphs", sizes)

    @classmethod
    def from_mapping(cls, values: dict[str, Any], *, source: str = "config") -> EngineConfig:
        """Build from plain values, as read from YAML; unknown names are refused with the nearest known one."""
        import difflib

        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{source}: unknown option {name!r}{hint}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> EngineConfig:
        """Read a YAML mapping of fields; ``overrides`` (flags) win over the file."""
        import yaml

        try:
            text = Path(path).read_text(encoding="utf-8")
            values = yaml.safe_load(text) or {}
        except OSError as error:
            raise ConfigError(f"cannot read config file {path}: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not YAML: {error}".replace("\n", " ")) from error
        if not isinstance(values, dict):
            raise ConfigError(f"config file {path} must hold a mapping of options")
        return cls.from_mapping({**values, **overrides}, source=str(path))

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with ``changes`` applied and checked."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON and for :meth:`from_mapping`."""
        return {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value for f in fields(self)
        }


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An :class:`EngineConfig` with every automatic value settled for one model and device."""

    config: EngineConfig
    """What was asked for."""
    dtype: str
    """A torch dtype name."""
    num_blocks: int
    """Usable blocks; the pool tensor has one more, the dummy block."""
    max_sequence_length: int
    """Prompt plus output of one request."""
    vocab_size: int
    """Rows of the model's output."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a request unless it says ignore_eos."""
    sampling_backend: str
    """The sampler in use."""
    attention_backend: str
    """The attention in use."""
    model: str
    """The name the model was loaded by."""
    state_dtype: str = ""
    """The type that recurrent states are kept in; empty where the model has none."""
    num_snapshots: int = 0
    """States of recurrent layers that the prefix cache can keep; 0 where the model has none, or the cache is off."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Versions and hardware, filled by the workbench."""

    @property
    def max_blocks_per_row(self) -> int:
        """Columns of a block table; drafts may lie beyond the end of a sequence."""
        longest = self.max_sequence_length + 2 * self.config.speculative_tokens
        return -(-longest // self.config.block_size)

    @property
    def dummy_slot(self) -> int:
        """State slots: ``states_per_row`` for each row, the snapshots', and this one, which padding uses."""
        return self.config.max_requests * self.config.states_per_row + self.num_snapshots

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the asked-for options with the settled ones laid over them."""
        settled = {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value
            for f in fields(self)
            if f.name not in ("config", "extra")
        }
        return {**self.config.to_dict(), **settled, **self.extra}
