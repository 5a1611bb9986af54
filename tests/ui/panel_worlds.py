"""Views as a session in mid run would send them, for pictures and tests of the panel's front-end."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from engine.phases import Reason
from tracing.records import PHASE_COLOURS
from workbench.panel.messages import (
    COMMANDS,
    BarView,
    BlocksPane,
    ChangesPane,
    ExpertsPane,
    GraphsPane,
    HistoryPane,
    LogPane,
    RequestRow,
    RequestsView,
    StatesCell,
    StopsPane,
    StripView,
    ValueCell,
)
from workbench.report_data import ORDER_COLOURS

WORDS = (
    "Once·upon·a·time·in·a·small·village·by·the·sea·there·lived·an·old·clockmaker·who·never·slept·and·counted·"
    "every·tick·of·every·clock·in·his·shop"
)
TOKENS = [f"·{word}" for word in WORDS.split("·")]


def bar_view(**changes: Any) -> BarView:
    view: BarView = {
        "state": "paused",
        "headline": "1,204 overlap · before forward (after sample)",
        "place": "1205 forward",
        "stopped": "breakpoint 2 (before forward, for story-7): iteration 1,204 stands before forward",
        "model": "SmolLM2-135M",
        "device": "cpu",
        "clock": "wall 12.4 s",
        "iterations": 1_205,
        "mode": "async",
        "wanted_mode": "async",
        "other_mode": "legacy",
        "switch_text": "To legacy: one more iteration resolves the pending forward (5 rows), then each forward is "
        "sampled in the iteration that launched it. No token is lost or changed.",
        "can": {name: name != "recover" for name in COMMANDS},
        "badges": [{"text": "stepped: times void", "title": "Iteration 1,204 is stepped by hand; run() counts again."}],
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def strip_view(**changes: Any) -> StripView:
    states = {"prepare": "done", "sample": "last", "forward": "next", "resolve": "coming", "emit": "coming"}
    view: StripView = {
        "iteration": 1_204,
        "is_in_hand": True,
        "order": "overlap",
        "colour": ORDER_COLOURS["overlap"],
        "reason": "decode rows only, nothing to admit",
        "why": "Iteration 1,204 takes overlap (prepare → sample → forward → resolve → emit) because all rows of the "
        "pending forward decode and nothing could be admitted. It loses the overlap once a waiting request fits, the "
        "pending forward holds a prompt, or blocks run out.",
        "phases": [
            {"name": name, "colour": PHASE_COLOURS[name], "state": state, "title": f"What {name} does"}  # type: ignore[typeddict-item]
            for name, state in states.items()
        ],
        "next_phase": "forward",
        "next_order": None,
        "forwards": [
            {
                "role": "sampled",
                "iteration": 1_203,
                "on_device": "runs",
                "text": "5 decode rows, 5 tokens, bucket of 8",
                "budget": {"limit": 64, "decode": 5, "prompt": 0, "padding": 3},
            },
        ],
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def request_row(number: int, state: str = "decode", **changes: Any) -> RequestRow:
    runs = state in ("decode", "prefill")
    output = (7 * number) % 90 + 3 if state not in ("waiting", "coming", "prefill") else 0
    first = 10 * number
    tokens = [TOKENS[(number + place) % len(TOKENS)] for place in range(min(output, 12))]
    row: RequestRow = {
        "request_id": f"story-{number}",
        "state": state,
        "row": number if runs else None,
        "hue": number % 12,
        "prompt_tokens": 12 + 31 * number % 200,
        "cached_tokens": 16 * (number % 3) if runs else 0,
        "output_tokens": output,
        "max_tokens": 96,
        "kv_len": 0 if not runs else 12 + 31 * number % 200 + output,
        "blocks": [*range(first, first + 4), first + 7] if runs else [],
        "in_pending": runs and number % 2 == 0,
        "tokens": tokens,
        "token_ids": [900 + at for at in range(len(tokens))],
        "logprobs": [],
        "num_new": 1 if tokens else 0,
        "accepted": [],
        "rejected": [],
        "drafts": "",
        "why": {"waiting": "needs 9 blocks, 4 are free", "finished": "stop: '\\n'", "aborted": "aborted by hand"}.get(
            state, ""
        ),
        "queue_ms": None if state in ("waiting", "coming") else 0.4 + 3.3 * number,
        "ttft_ms": 31.26 + 17 * number if output else None,
        "tpot_ms": 8.421 + number / 10 if output > 1 else None,
        "is_void": number == 2,
        "why_void": "stepped by hand" if number == 2 else "",
        "can_abort": state not in ("finished", "aborted"),
    }
    return {**row, **changes}  # type: ignore[typeddict-item]


def requests_view(count: int = 14, **changes: Any) -> RequestsView:
    states = ["decode"] * 5 + ["prefill"] + ["waiting"] * 3 + ["finished"] * (count - 10) + ["aborted"]
    rows = [request_row(number, state) for number, state in enumerate(states[:count])]
    view: RequestsView = {
        "rows": rows,
        "left_out": 212,
        "hint": "No requests yet. Submit… hands one in, or session.submit('Once upon a time').",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def packed(values: Any, kind: str = "u1") -> str:
    return b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")


def blocks_view(num_blocks: int = 512, *, has_prefixes: bool = True) -> BlocksPane:
    """Nine holders, each with blocks in a row; with prefixes the last two share their first ones with the first."""
    kinds, refs = np.full(num_blocks, 255), np.zeros(num_blocks, dtype=np.int64)
    partly, holders = [], []
    at = 0
    for number in range(9):
        count = max(1, (num_blocks // 14) * (1 + number % 3) // 2)
        blocks = list(range(at, min(at + count, num_blocks)))
        at += count + number % 2 * 5
        shared = list(range(3)) if has_prefixes and number > 6 else []
        kinds[blocks] = number
        refs[shared + blocks] += 1
        partly += [blocks[-1], 7]
        holders.append(
            {
                "request_id": f"story-{number}",
                "hue": number,
                "blocks": packed(shared + blocks, "<u4"),
                "tokens": 16 * len(shared + blocks) - 9,
            }
        )
    if has_prefixes:
        kinds[-num_blocks // 6 : -num_blocks // 12] = 254
    named = np.isin(kinds, (0, 254))
    return {
        "block_size": 16,
        "num_blocks": num_blocks,
        "num_free": int((kinds == 255).sum()),
        "num_shared": int((refs > 1).sum()),
        "num_cached": int((kinds == 254).sum()) if has_prefixes else None,
        "kinds": packed(kinds),
        "refs": packed(refs) if has_prefixes else "",
        "named": packed(np.packbits(named, bitorder="little")) if has_prefixes else "",
        "partly": partly,
        "holders": holders,  # type: ignore[typeddict-item]
        "facts": [["prefix hits", "38 % (12,416 of 32,700 tokens)"], ["cached blocks evicted", "214"]]
        if has_prefixes
        else [],
        "states": None,
    }


def states_cell() -> StatesCell:
    """Five of eight slots live; of three snapshots one may give way."""
    return {
        "text": "5 of 8 live, 3 states each: one behind every draft; 1.12 MiB a state",
        "slots": [{"request_id": f"story-{n}" if n < 5 else "", "hue": n if n < 5 else -1} for n in range(8)],
        "snapshots": [
            {"slot": 30, "block": 90, "num_tokens": 64, "hue": -1, "text": "a prefix, cached: may give way"},
            {
                "slot": 31,
                "block": 2,
                "num_tokens": 48,
                "hue": 0,
                "text": "the first 48 tokens of story-0, held by story-0",
            },
            {
                "slot": 29,
                "block": None,
                "num_tokens": None,
                "hue": 4,
                "text": "a prefix of nobody here, held by story-4",
            },
        ],
        "snapshots_text": "3 of 8 kept, 5 free",
    }


def experts_view(**changes: Any) -> ExpertsPane:
    counts = np.array([[(7 * layer + 13 * expert) % 61 for expert in range(16)] for layer in range(6)])
    view: ExpertsPane = {
        "layers": [1, 3, 5, 7, 9, 11],
        "num_experts": 16,
        "counts": packed(counts, "<u8"),
        "imbalances": (counts.max(axis=1) / counts.mean(axis=1)).round(4).tolist(),
        "summary": "6 layers of 16 experts",
        "hint": "Tokens are not counted by expert: make the session with expert_load=True.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def drafting_rows() -> list[RequestRow]:
    """Two requests: drafts accepted and turned down, and one whose drafts were all accepted."""
    told = {"drafts": "12 of 20 drafts accepted (60 %)"}
    earlier = {"at": 4, "place": 3, "tokens": ["·a"], "token_ids": [800]}
    newest = {"at": 9, "place": 2, "tokens": ["·or", "·<b>if</b>"], "token_ids": [801, 802]}
    return [
        request_row(1, accepted=[0, 3, 8], num_new=2, rejected=[earlier, newest], **told),
        request_row(2, accepted=[6, 7], num_new=3, **told),
    ]


def graphs_view(**changes: Any) -> GraphsPane:
    sizes = (1, 2, 4, 8, 16, 24, 32, 64)
    hits = (41, 120, 388, 512, 74, 9, 2, 0)
    view: GraphsPane = {
        "label": "CUDA graph",
        "graphs": [
            {
                "name": f"{size} tokens, {size} decode rows",
                "num_tokens": size,
                "num_prefill": 0,
                "num_decode": size,
                "hits": count,
                "padding_tokens": count * (size // 5),
                "is_pending": size == 8,
                "awaited_by": "story-12" if size == 32 else "",
            }
            for size, count in zip(sizes, hits, strict=True)
        ],
        "hits": sum(hits),
        "misses": {"holds prefill rows": 37, "more tokens than the largest captured size": 11, "captured too few": 2},
        "deferrals": 3,
        "padding_share": 0.083,
        "memory": "capturing took 214 MiB and 3.2 s",
        "hint": "No sizes are captured: Session(..., graphs='full') captures some.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def value(name: str, number: int, new: str, old: str = "", **changes: Any) -> ValueCell:
    cell: ValueCell = {
        "name": name,
        "request_id": f"story-{number}" if number >= 0 else "",
        "hue": number,
        "old": old,
        "new": new,
        "is_stale": False,
        "note": "",
    }
    return {**cell, **changes}  # type: ignore[typeddict-item]


def changes_view(**changes: Any) -> ChangesPane:
    view: ChangesPane = {
        "recording": True,
        "iteration": 1_204,
        "title": "iteration 1,204, overlap: 3 of 5 phases so far",
        "cards": [
            {
                "phase": "prepare",
                "colour": PHASE_COLOURS["prepare"],
                "read": [value("kv_len", 0, "57"), value("kv_len", 1, "104"), value("free blocks", -1, "121")],
                "wrote": [
                    value("block_ids", 0, "3, 4, 5, 6, 17", "3, 4, 5, 6", note="a block more"),
                    value("slot", 0, "272", "99"),
                    value("slot", 1, "104", "103"),
                    value("staged positions[0:5]", -1, "57, 104, 80, 33, 12", "56, 103, 79, 32, 11"),
                ],
                "enqueued": [],
            },
            {
                "phase": "sample",
                "colour": PHASE_COLOURS["sample"],
                "read": [value("logits", -1, "[5, 49152] bfloat16"), value("seed", 1, "17")],
                "wrote": [
                    value("newest token", 0, "on the device", "1,204 ·sea", note="read it below"),
                    value("newest token", 2, "on the device", "88 ·by", is_stale=True),
                ],
                "enqueued": ["sample", "fetch of samples"],
            },
            {
                "phase": "resolve",
                "colour": PHASE_COLOURS["resolve"],
                "read": [value("samples", 0, "1,204"), value("samples", 3, "311", is_stale=True, note="it ended")],
                "wrote": [value("state", 3, "finished", "decode"), value("output_tokens", 0, "46", "45")],
                "enqueued": [],
            },
        ],
        "device_values": ["last_token", "sampled", "seq_lens"],
        "device_value": "last_token int32 [8] = 1204, 311, 88, 17, 2042, 0, 0, 0",
        "hint": "Nothing was recorded. Switch recording on, then step.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def history_view(**changes: Any) -> HistoryPane:
    view: HistoryPane = {
        "first": 0,
        "last": 1_203,
        "chosen": 871,
        "title": "iteration 871, no_overlap: a prompt is being read in chunks",
        "why": "Iteration 871 took no_overlap (sample → resolve → emit → admit → prepare → forward) because a prompt "
        "was being read in chunks: its next chunk's place is known only once the last one was resolved.",
        "facts": [
            ["length", "14.2 ms"],
            ["host", "3.1 ms, of which 1.9 ms waiting"],
            ["device", "11.8 ms"],
            ["sampled", "iteration 870: 4 decode rows"],
            ["launched", "64 tokens: 1 prefill row, 4 decode rows"],
            ["ran", "eagerly: holds prefill rows"],
            ["new tokens", "4"],
            ["blocks free", "38 of 512"],
        ],
        "watched": [["s.row(0).output_tokens", "31"], ["len(s.queue)", "3"]],
        "table": [
            ["row", "request", "state", "prompt", "output", "KV", "blocks", "newest"],
            ["0", "story-0", "decode", "12", "31/96", "43", "3", "·sea"],
            ["1", "story-1", "decode", "43", "12/96", "55", "4", "·clock"],
            ["2", "story-2", "decode", "74", "60/96", "134", "9", "·tick"],
            ["3", "story-3", "decode", "105", "2/96", "107", "7", "·upon"],
            ["4", "story-4", "prefill", "136", "0/96", "64", "4", ""],
        ],
        "hint": "No iteration yet. Submit a request, then press Step or Run.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def stops_view(**changes: Any) -> StopsPane:
    view: StopsPane = {
        "rows": [
            {"id": 1, "text": "reason PREFILL_PENDING", "enabled": True, "hits": 12, "is_hit": False},
            {"id": 2, "text": "before forward, for story-7", "enabled": True, "hits": 1, "is_hit": True},
            {"id": 4, "text": "bubble longer than 500 µs", "enabled": False, "hits": 0, "is_hit": False},
            {"id": 5, "text": "when s.row(0).output_tokens >= 8", "enabled": True, "hits": 3, "is_hit": False},
        ],
        "phases": ["admit", "prepare", "forward", "sample", "resolve", "emit"],
        "reasons": [[reason.name, reason.value] for reason in Reason],
        "hint": "No breakpoints. Name at least one thing above: runs stand still where all of it holds.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def log_view(count: int = 24, **changes: Any) -> LogPane:
    kinds = {
        "stopped": "breakpoint 2 (before forward, for story-7)",
        "started": "in the background",
        "ended": "story-9: stop, 41 tokens",
        "mode": "async from the next iteration border on",
        "submitted": "story-9, story-10, story-11",
        "aborted": "story-13",
        "paused": "story-4, story-5: no block for the next token, 0 blocks free",
        "evicted": "story-5: back to the queue, to be computed again; 9 blocks free",
        "failed": "RuntimeError in forward: injected",
        "recovered": "every row is computed again from its tokens",
    }
    names = list(kinds)
    view: LogPane = {
        "rows": [
            {"iteration": 1_204 - 9 * at, "kind": names[at % len(names)], "text": kinds[names[at % len(names)]]}
            for at in range(count)
        ],
        "left_out": 310,
        "hint": "Nothing has happened yet.",
    }
    return {**view, **changes}  # type: ignore[typeddict-item]


def everything() -> dict[str, Any]:
    """Every trait of both widgets."""
    return {
        "bar": bar_view(),
        "strip": strip_view(),
        "notice": {
            "number": 3,
            "level": "info",
            "text": "breakpoint 2 is hit",
            "detail": "",
            "command": "",
            "place": "1205 forward",
        },
        "requests": requests_view(),
        "blocks": blocks_view(),
        "graphs": graphs_view(),
        "experts": experts_view(),
        "changes": changes_view(),
        "history": history_view(),
        "stops": stops_view(),
        "events": log_view(),
    }
