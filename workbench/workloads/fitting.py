"""Whether a workload's requests fit an engine's limit on their length."""

from __future__ import annotations

from workbench.workloads.workload import Workload, WorkloadError


def length_notes(workload: Workload, max_sequence_length: int) -> tuple[str, ...]:
    """See :meth:`workbench.workloads.Workload.length_notes`.

    A prompt that does not fit is refused and not cut: whoever measures a trace must know what it has become. The
    option ``max_length`` cuts, and says so.
    """
    lengths = [
        (len(spec.prompt), spec.params.max_tokens) for spec in workload.requests if not isinstance(spec.prompt, str)
    ]
    total, limit = len(workload.requests), max_sequence_length
    over = [prompt for prompt, _ in lengths if prompt >= limit]
    if over:
        raise WorkloadError(
            f"workload {workload.name!r}: {len(over)} of {total} prompts leave no room for output within "
            f"max_sequence_length={limit}, the longest has {max(over)} tokens; cut them with max_input= or max_length= "
            "in the workload, or raise max_sequence_length"
        )
    short = sum(prompt + output > limit for prompt, output in lengths)
    if not short:
        return ()
    return (f"{short} of {total} outputs end early: with their prompts they exceed max_sequence_length={limit}",)
