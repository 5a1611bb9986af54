"""New weights in a live engine: it answers as a fresh engine on them would, or says why it does not take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import CheckpointError, EngineError
from engine.invariants import check_device, check_idle
from engine.lifecycle import EngineState
from engine.models.checkpoint import iter_folder_weights
from engine.models.loader import LoadedModel, load_model
from tests.checkpoints import edit_config, write_checkpoint
from tests.gguf_files import write_gguf

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPTS = [[5, 6, 7, 8, 9], [11] * 20, [3]]
LIMITS: dict[str, Any] = {
    "device": "inline",
    "block_size": 4,
    "num_blocks": 60,
    "max_requests": 4,
    "max_batch_tokens": 64,
    "max_sequence_length": 48,
    "graph_non_decode": False,
    "debug_invariants": True,
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("old"), "LlamaForCausalLM", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("new"), "LlamaForCausalLM", seed=2)


def load(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float64, device=torch.device("cpu"))


def engine_on(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, EngineConfig(**{**LIMITS, **options}))


def answers(folder: Path, prompts: list[list[int]], max_tokens: list[int] | int = 12) -> list[tuple[int, ...]]:
    """Of an engine that has had these weights from the first."""
    counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    params = [GREEDY.replace(max_tokens=count) for count in counts]
    return [output.token_ids for output in fresh_engine(folder).generate(prompts, params, progress=False)]


@cache
def fresh_engine(folder: Path) -> Engine:
    return engine_on(load(folder))


def running(engine: Engine, steps: int) -> list[str]:
    ids = [engine.add_request(prompt, GREEDY, stream=True) for prompt in PROMPTS]
    for _ in range(steps):
        engine.step()
    return ids


def drain(engine: Engine) -> dict[str, tuple[int, ...]]:
    done: dict[str, tuple[int, ...]] = {}
    while engine.has_unfinished():
        done.update({output.request_id: output.token_ids for output in engine.step() if output.finished})
    check_idle(engine)
    check_device(engine)
    return done


def pairs(folder: Path) -> list[tuple[str, Tensor]]:
    return list(iter_folder_weights(folder))


class TestAfterRecompute:
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    @pytest.mark.parametrize("options", [{}, {"graphs": (4,)}, {"prefix_caching": True}], ids=str)
    def test_it_goes_on_as_a_fresh_engine_would(
        self, old: Path, new: Path, device: str, mode: str, options: dict[str, Any]
    ) -> None:
        for steps in (1, 5):
            with engine_on(load(old), device=device, mode=mode, **options) as engine:
                ids = running(engine, steps)
                engine.suspend("recompute")
                given = [tuple(engine._live[request_id].output_ids) for request_id in ids]
                engine.load_weights(new)
                engine.resume()
                done = drain(engine)
                later = engine.generate(PROMPTS, GREEDY, progress=False)
                hits = engine.counters.graph_hits
            prompts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, given, strict=True)]
            rest = answers(new, prompts, [12 - len(tokens) for tokens in given])
            assert [done[i] for i in ids] == [(*tokens, *more) for tokens, more in zip(given, rest, strict=True)]
            assert [output.token_ids for output in later] == answers(new, PROMPTS)
            assert (hits > 0) is ("graphs" in options)
        assert answers(old, PROMPTS) != answers(new, PROMPTS)


class TestWithCachesKept:
    @pytest.mark.parametrize("how", ["pause", "persist", "offload"])
    @pytest.mark.parametrize("graphs", [None, (4,)])
    def test_one_token_each_is_the_old_weights_and_new_requests_know_nothing_of_them(
        self, old: Path, new: Path, how: str, graphs: Any
    ) -> None:
        """As in Megatron-LM; a prompt whose prefix the old weights computed is computed anew."""
        before = answers(old, PROMPTS)
        with engine_on(load(old), graphs=graphs, prefix_caching=True) as engine:
            ids = running(engine, 4)
            requests = [engine._live[request_id] for request_id in ids]
            counts = [len(request.output_ids) for request in requests]
            assert engine.pending is not None
            engine.pause() if how == "pause" else engine.suspend(how)
            engine.load_weights(new)
            engine.resume()
            engine.step()
            for request, count, wanted in zip(requests, counts, before, strict=True):
                assert tuple(request.output_ids[: count + 1]) == wanted[: count + 1]
            done = drain(engine)
            assert [done[i] for i in ids] != before
            fresh = engine.generate(PROMPTS, GREEDY, progress=False)
            again = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in fresh] == answers(new, PROMPTS)
        assert [output.num_cached_tokens for output in fresh] == [0, 0, 0]
        assert [output.token_ids for output in again] == answers(new, PROMPTS)
        assert [output.num_cached_tokens for output in again] == [4, 16, 0]

    def test_addresses_stay(self, old: Path, new: Path) -> None:
        """Captured CUDA graphs read weights where they lay."""
        loaded = load(old)
        assert isinstance(loaded.model, torch.nn.Module)
        with engine_on(loaded) as engine:
            before = {name: tensor.data_ptr() for name, tensor in loaded.model.state_dict().items()}
            engine.pause()
            engine.load_weights(new)
            assert {name: tensor.data_ptr() for name, tensor in loaded.model.state_dict().items()} == before

    @pytest.mark.parametrize("how", ["pause", "recompute"])
    def test_forwards_are_traced_anew(self, old: Path, new: Path, how: str) -> None:
        """A trace may have folded any sum of weights into a constant, though not those of this model."""
        loaded = load(old)
        with engine_on(loaded, graphs=(4,)) as engine:
            before = dict(loaded.buckets)
            engine.pause() if how == "pause" else engine.suspend(how)
            engine.load_weights(new)
            engine.resume()
            assert before.keys() == loaded.buckets.keys() != set()
            assert all(loaded.buckets[key] is not bucket for key, bucket in before.items())


class TestEnginesThatShareTheModel:
    @pytest.mark.parametrize("graphs", [None, (4,)])
    def test_follow_in_their_next_iteration(self, old: Path, new: Path, graphs: Any) -> None:
        """Buckets hold weights, and cached blocks what weights made of a prefix."""
        loaded = load(old)
        with (
            engine_on(loaded, graphs=graphs) as first,
            engine_on(loaded, graphs=graphs, prefix_caching=True) as second,
        ):
            assert [o.token_ids for o in second.generate(PROMPTS, GREEDY, progress=False)] == answers(old, PROMPTS)
            first.pause()
            first.load_weights(new)
            first.resume()
            for engine in (second, first):
                found = engine.generate(PROMPTS, GREEDY, progress=False)
                assert [output.token_ids for output in found] == answers(new, PROMPTS)
                assert [output.num_cached_tokens for output in found] == [0, 0, 0]

    def test_follow_when_they_were_suspended_meanwhile(self, old: Path, new: Path) -> None:
        loaded = load(old)
        with (
            engine_on(loaded) as first,
            engine_on(loaded, graphs=(4,), prefix_caching=True) as second,
        ):
            second.generate(PROMPTS, GREEDY, progress=False)
            second.suspend("offload")
            first.pause()
            first.load_weights(new)
            second.resume()
            found = second.generate(PROMPTS, GREEDY, progress=False)
            assert [output.token_ids for output in found] == answers(new, PROMPTS)
            assert [output.num_cached_tokens for output in found] == [0, 0, 0]


class TestSources:
    def test_may_be_a_gguf_file(self, old: Path, new: Path, tmp_path: Path) -> None:
        path = write_gguf(new, tmp_path / "new.gguf")
        with engine_on(load(old)) as engine:
            engine.suspend("recompute")
            engine.load_weights(path)
            engine.resume()
            found = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in found] == answers(new, PROMPTS)

    def test_may_be_pairs_made_as_they_are_read(self, old: Path, new: Path) -> None:
        with engine_on(load(old)) as engine:
            engine.pause()
            engine.load_weights(iter_folder_weights(new))
            engine.resume()
            found = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in found] == answers(new, PROMPTS)

    def test_may_be_several_files_by_name(self, old: Path, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "new", "LlamaForCausalLM", seed=2, shards=True)
        with engine_on(load(old)) as engine:
            engine.suspend()
            engine.load_weights(str(folder))
            engine.load_weights(old)
            engine.load_weights(str(folder))
            engine.resume()
            found = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in found] == answers(folder, PROMPTS)


def without_one(weights: list[tuple[str, Tensor]]) -> Any:
    return weights[:-1]


def one_twice(weights: list[tuple[str, Tensor]]) -> Any:
    return [*weights, weights[0]]


def one_too_many(weights: list[tuple[str, Tensor]]) -> Any:
    return [*weights, ("model.extra.weight", torch.zeros(2))]


def last_misshapen(weights: list[tuple[str, Tensor]]) -> Any:
    return [*weights[:-1], (weights[-1][0], weights[-1][1][:-1])]


def last_of_integers(weights: list[tuple[str, Tensor]]) -> Any:
    return [*weights[:-1], (weights[-1][0], weights[-1][1].to(torch.int32))]


def names_alone(weights: list[tuple[str, Tensor]]) -> Any:
    return dict(weights)


class TestBadSources:
    @pytest.mark.parametrize("state", ["pause", "persist", "offload", "recompute"])
    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (without_one, r"new weights: checkpoint lacks tensor model\."),
            (one_twice, "new weights: checkpoint holds tensor .* twice"),
            (one_too_many, r"checkpoint holds tensor model\.extra\.weight, which this model has no place for"),
            (last_misshapen, "must have shape"),
            (last_of_integers, "must be float16, bfloat16, float32 or float64, got torch.int32"),
            (names_alone, r"\(checkpoint name, tensor\) pairs, got str"),
        ],
    )
    def test_leave_the_old_weights_whole(
        self, old: Path, new: Path, state: str, spoil: Callable[[Any], Any], message: str
    ) -> None:
        with engine_on(load(old)) as engine:
            ids = running(engine, 3)
            engine.pause() if state == "pause" else engine.suspend(state)
            with pytest.raises(CheckpointError, match=message) as caught:
                engine.load_weights(spoil(pairs(new)))
            assert "\n" not in str(caught.value)
            engine.resume()
            done = drain(engine)
        assert [done[i] for i in ids] == answers(old, PROMPTS)

    @pytest.mark.parametrize(
        ("edits", "message"),
        [
            ({"rms_norm_eps": 1e-3}, "rms_norm_eps must be the model's, 1e-06, got 0.001"),
            ({"num_hidden_layers": 2}, "num_layers must be the model's, 3, got 2"),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope must be the model's"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings must be the model's, False, got True"),
        ],
    )
    def test_of_another_model_are_refused_by_what_differs(
        self, old: Path, tmp_path: Path, edits: dict[str, Any], message: str
    ) -> None:
        folder = write_checkpoint(tmp_path / "other", "LlamaForCausalLM", seed=2)
        edit_config(folder, **edits)
        with engine_on(load(old)) as engine:
            engine.pause()
            with pytest.raises(CheckpointError, match=f"{folder}: {message}"):
                engine.load_weights(folder)
            engine.resume()
            found = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in found] == answers(old, PROMPTS)

    def test_with_another_limit_of_positions_are_taken(self, old: Path, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "other", "LlamaForCausalLM", seed=2, max_position_embeddings=256)
        with engine_on(load(old)) as engine:
            engine.pause()
            engine.load_weights(folder)

    def test_that_are_no_checkpoint_are_named(self, old: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with engine_on(load(old)) as engine:
            engine.pause()
            for path, message in (
                (tmp_path / "none", "must be a checkpoint folder, a .gguf file or"),
                (tmp_path / "empty", "cannot read .*config.json"),
                (tmp_path / "none.gguf", "cannot read .*none.gguf"),
            ):
                with pytest.raises(CheckpointError, match=message):
                    engine.load_weights(path)

    def test_are_not_read_by_an_engine_that_runs(self, old: Path, new: Path) -> None:
        with engine_on(load(old)) as engine:
            with pytest.raises(EngineError, match=r"call pause\(\) or suspend\(\) first"):
                engine.load_weights(new)
            engine.close()
            with pytest.raises(EngineError, match="closed"):
                engine.load_weights(new)

    @pytest.mark.parametrize("state", ["pause", "offload"])
    def test_that_fail_while_they_are_copied_keep_the_engine_still(
        self, old: Path, new: Path, state: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of each: nothing may be computed with those."""
        loaded = load(old)
        with engine_on(loaded, graphs=(4,)) as engine:
            engine.pause() if state == "pause" else engine.suspend(state)
            real = loaded.model.load_weights  # type: ignore[attr-defined]

            def torn(weights: Any) -> None:
                real(weights)
                raise KeyboardInterrupt

            monkeypatch.setattr(loaded.model, "load_weights", torn)
            with pytest.raises(KeyboardInterrupt):
                engine.load_weights(new)
            monkeypatch.undo()
            for call in (engine.resume, engine.reset):
                with pytest.raises(EngineError, match="copying new weights was interrupted"):
                    call()
            assert engine.state is not EngineState.RUNNING
            engine.load_weights(new)
            engine.resume()
            found = engine.generate(PROMPTS, GREEDY, progress=False)
        assert [output.token_ids for output in found] == answers(new, PROMPTS)
