"""A run of a torch model on worker threads, stepped again on the inline device: bit for bit the same."""

from __future__ import annotations

from pathlib import Path

from workbench import Session
from workbench.workloads import parse_workload

OPTIONS = {"max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96, "num_blocks": 24}


def test_a_saved_run_of_a_torch_model_is_stepped_again_inline(tmp_path: Path) -> None:
    with Session("shape:tiny", clock="iterations", device="cpu", **OPTIONS) as session:
        vocab_size = session.engine.resolved.vocab_size
        text = "fixed:requests=6,input=9,output=12,arrive=1,temperature=0.8"
        session.submit_workload(parse_workload(text, vocab_size=vocab_size))
        session.run(5)
        session.mode = "legacy"
        session.run()
        session.save(tmp_path / "run")
        expected = {name: output.token_ids for name, output in session.outputs.items()}

    with Session("shape:tiny", device="inline", **OPTIONS) as session:
        replay = session.replay(tmp_path / "run")
        while session.step_phase() is not None:
            assert replay.record is not None

        assert {name: output.token_ids for name, output in session.outputs.items()} == expected
        assert replay.differing_orders == []
