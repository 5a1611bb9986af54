"""What requests and numbers look like in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.request import RequestOutput, SamplingParams
from workbench.arrivals import Submission


def request_dict(output: RequestOutput) -> dict[str, Any]:
    """One request for JSON; times in nanoseconds on one clock of no particular origin."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "output_token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": None if output.logprobs is None else [dict(row) for row in output.logprobs],
        "prompt_logprobs": None if output.prompt_logprobs is None else list(output.prompt_logprobs),
        "timings": asdict(output.timings),
    }


def asked_dict(submission: Submission) -> dict[str, Any]:
    """What was asked for beside the prompt, so that a saved run can be run again; its seed is settled."""
    return {
        "params": asdict(submission.params),
        "stream": submission.stream,
        "arrival": submission.arrival,
        "cache_salt": submission.cache_salt,
    }


def asked_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters that :func:`asked_dict` wrote, read from JSON.

    Raises:
        TypeError: a name is unknown.
        RequestError: a value does not fit.
    """
    bias = values.get("logit_bias")
    stops = {name: tuple(values[name]) for name in ("stop", "stop_token_ids") if values.get(name)}
    return SamplingParams(
        **{**values, **stops, "logit_bias": bias and {int(key): value for key, value in bias.items()}}
    )


def jsonable(value: Any) -> Any:
    """``value`` as strict JSON holds it: NaN and the infinities become None, keys strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value
