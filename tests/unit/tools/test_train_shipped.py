"""The training of the shipped model: what it computes, what it learns from, and what it writes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.models.loader import load_model
from engine.tokenizer import Tokenizer
from tools.train_shipped.architecture import Architecture
from tools.train_shipped.byte_tokens import SEPARATOR
from tools.train_shipped.card import Run, command, model_card
from tools.train_shipped.corpus import Corpus, SourceFile, collect, near_copies, pack, split, subject, unpack
from tools.train_shipped.curve import curve_csv, curve_svg
from tools.train_shipped.evaluation import (
    EvaluationOptions,
    Told,
    _windows,
    count_accepted,
    generate,
    measure,
    read,
)
from tools.train_shipped.mixers import Memory
from tools.train_shipped.model import ShippedModel
from tools.train_shipped.optimiser import Average, learning_rate, orthogonalise
from tools.train_shipped.saving import load_folder, round_weights, save_folder
from tools.train_shipped.training import Pace, Trained, TrainingOptions, make_model, train
from tools.train_shipped.windows import Windows, encode

TINY = Architecture(
    hidden_size=32,
    pattern="M*E-M",
    draft_pattern="*-",
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mamba_heads=4,
    mamba_head_dim=8,
    state_size=8,
    num_groups=2,
    chunk_size=8,
    num_experts=4,
    expert_size=16,
    shared_size=16,
    mlp_size=32,
    max_position=256,
)
CPU = torch.device("cpu")
FAST = TrainingOptions(steps=30, batch_tokens=1024, length=64, long_length=128, warmup_steps=5, peak_rate=1e-2)


def tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def step_by_step(model: ShippedModel, tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] of one token after the other."""
    memories: list[Memory] = []
    found = []
    for tokens_B in tokens_BT.unbind(1):
        logits, memories = model.step(tokens_B, memories)
        found.append(logits)
    return torch.stack(found, dim=1)


def counting_text(repeats: int) -> list[bytes]:
    """A text whose next byte is always known."""
    return [bytes(range(65, 91)) * repeats] * 2


class TestModel:
    @pytest.mark.parametrize("length", [1, 7, 8, 29])
    @torch.no_grad()
    def test_whole_sequences_compute_what_single_steps_do(self, length: int) -> None:
        model = make_model(TINY, 0, CPU).double().eval()
        tokens_BT = tokens(2, length)

        together = model.logits(model(tokens_BT).main_BTE)

        torch.testing.assert_close(together, step_by_step(model, tokens_BT), rtol=0, atol=1e-11)

    @torch.no_grad()
    def test_a_later_byte_changes_no_earlier_position_of_any_head(self) -> None:
        model = make_model(TINY, 0, CPU).double().eval()
        one = tokens(1, 24)
        other = one.clone()
        other[0, 15] = (other[0, 15] + 1) % 256

        before, after = model(one), model(other)

        for first, (x, y) in enumerate(zip((before[0], *before[1]), (after[0], *after[1]), strict=True)):
            torch.testing.assert_close(x[:, : 15 - first], y[:, : 15 - first], rtol=0, atol=1e-12)
            assert (x[:, 15 - first] - y[:, 15 - first]).abs().max() > 1e-6

    @torch.no_grad()
    def test_a_head_hangs_on_the_hidden_state_before_and_the_token_at_its_position(self) -> None:
        """Head 0 at p: hidden of p - 1, token p. Head 1: the first head's output of p - 1, token p."""
        model = make_model(TINY, 0, CPU).double().eval()
        tokens_BT = tokens(1, 12)
        hidden = model(tokens_BT)
        embedded = model.embed(tokens_BT)

        first = model._draft(0, embedded[:, 1:], hidden.main_BTE[:, :-1])
        second = model._draft(1, embedded[:, 2:], first[:, :-1])

        torch.testing.assert_close(hidden.drafts, (first, second), rtol=0, atol=0)

    @torch.no_grad()
    def test_losses_are_those_of_each_positions_next_token(self) -> None:
        model = make_model(TINY, 0, CPU).double().eval()
        tokens_BT = tokens(2, 20)
        hidden = model(tokens_BT)

        losses = model.losses(tokens_BT)

        seen = 20 - 1 - 2
        for first, (states, loss) in enumerate(
            zip((hidden.main_BTE, *hidden.drafts), (losses.main, *losses.drafts), strict=True)
        ):
            log = model.logits(states[:, :seen]).log_softmax(-1)
            expected = -log.gather(-1, tokens_BT[:, first + 1 : first + 1 + seen, None]).mean()
            assert loss.item() == pytest.approx(expected.item(), abs=1e-6)

    def test_the_default_fits_six_megabytes_with_two_draft_heads(self) -> None:
        model = ShippedModel(Architecture())
        count = sum(parameter.numel() for parameter in model.parameters())
        assert 2 * count < 5.7e6
        assert {"M", "*", "E"} <= set(model.arch.pattern)
        assert model.arch.num_draft_heads == 2

    def test_a_pattern_with_an_unknown_letter_is_refused(self) -> None:
        with pytest.raises(ValueError, match="pattern must be made of"):
            replace(TINY, pattern="MX")


class TestExperts:
    def test_the_correction_bias_evens_out_the_load(self) -> None:
        model = make_model(TINY, 0, CPU).train()
        router = model.expert_layers()[0].gate
        x = torch.randn(512, TINY.hidden_size) + 1.0  # leaning to one side, so that some experts win everywhere
        router(x)
        before = router.balance(0.0)
        for _ in range(300):
            router(x)
            share = router.balance(2e-2)
        assert share.max() - share.min() < 0.5 * (before.max() - before.min())

    def test_the_correction_bias_chooses_but_does_not_weigh(self) -> None:
        router = make_model(TINY, 0, CPU).eval().expert_layers()[0].gate
        x = torch.randn(64, TINY.hidden_size)
        router.e_score_correction_bias[:] = torch.tensor([5.0, 5.0, 0.0, 0.0])
        score = torch.nn.functional.linear(x, router.weight).sigmoid()[:, :2]
        torch.testing.assert_close(router(x)[:, :2], score / score.sum(-1, keepdim=True))


class TestTraining:
    def test_thirty_steps_lower_the_loss_of_model_and_heads(self) -> None:
        model = make_model(TINY, 0, CPU)
        text = encode(counting_text(40))
        before = model.losses(text[None, :200].long())

        trained = train(model, text, FAST)

        after = model.losses(text[None, :200].long())
        assert after.main < 0.5 * before.main
        assert all(new < 0.8 * old for new, old in zip(after.drafts, before.drafts, strict=True))
        assert trained.steps == 30
        assert trained.curve[-1].step == 30

    def test_heads_learn_the_token_behind_the_one_they_are_given(self) -> None:
        """On a text where each byte says the next, a head that is told of another place would be never right."""
        model = make_model(TINY, 0, CPU)
        text = encode(counting_text(40))
        train(model, text, replace(FAST, steps=60))

        told = read(model, text[None, 1:53].long())

        following = text[None, 2:53].long()
        for first, draft in enumerate(told.drafts, start=1):
            right = draft[:, first:-1] == following[:, first:]
            assert right.double().mean() > 0.9

    def test_the_same_seed_gives_the_same_weights(self) -> None:
        text = encode(counting_text(40))

        def weights(seed: int) -> list[Tensor]:
            model = make_model(TINY, seed, CPU)
            train(model, text, replace(FAST, steps=3, seed=seed))
            return [tensor.detach() for tensor in model.state_dict().values()]

        one, again, other = weights(1), weights(1), weights(2)
        assert all(torch.equal(x, y) for x, y in zip(one, again, strict=True))
        assert not all(torch.equal(x, y) for x, y in zip(one, other, strict=True))

    def test_by_the_clock_the_rate_reaches_its_end_when_the_time_is_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr("tools.train_shipped.training.time.monotonic", lambda: now)
        pace = Pace(TrainingOptions(minutes=1, warmup_steps=5), started=90.0)
        assert pace.progress(4) == 0.0
        now = 110.0
        assert pace.progress(5) == 0.0, "the way begins behind the warm-up"
        now = 130.0
        assert pace.progress(9) == pytest.approx(0.5)
        now = 150.0
        assert pace.progress(10) == 1.0
        assert learning_rate(1.0, 0.1) == 0.0

    @pytest.mark.parametrize("given", [{}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"minutes": -1.0}])
    def test_either_steps_or_minutes_must_be_given(self, given: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="steps"):
            TrainingOptions(**given)  # type: ignore[arg-type]

    def test_windows_of_an_epoch_lie_apart_and_some_begin_with_a_file(self) -> None:
        text = encode([bytes([number]) * 50 for number in range(100)])
        batch = Windows(text, seed=0).batch(60, 20)
        assert (batch[:, 0] == SEPARATOR).sum() >= 3
        assert batch.dtype == torch.int64

    def test_a_text_shorter_than_two_windows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="too few for windows of 64"):
            Windows(encode([b"short"]), seed=0).batch(1, 64)

    def test_orthogonalised_matrices_have_singular_values_about_one(self) -> None:
        matrices = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(0))
        for found in (orthogonalise(matrices), orthogonalise(matrices.mT).mT):
            values = torch.linalg.svdvals(found)
            assert values.min() > 0.5
            assert values.max() < 1.5

    def test_averaged_weights_lie_between_those_averaged(self) -> None:
        model = torch.nn.Linear(2, 2)
        first = model.weight.detach().clone()
        average = Average(model)
        with torch.no_grad():
            model.weight += 4
        average.update(0.25)
        average.into_model()
        torch.testing.assert_close(model.weight.detach(), first + 1)


class TestCorpus:
    def test_tests_belong_to_the_subject_that_they_test(self) -> None:
        names = ["json/decoder.py", "test/test_json/test_scanner.py", "_strptime.py", "test/test_strptime.py"]
        assert [subject(name) for name in names] == ["json", "json", "strptime", "strptime"]

    def test_nothing_held_out_is_in_training_nor_its_subject_nor_a_copy(self, tmp_path: Path) -> None:
        for number in range(200):
            body = "".join(f"value_{number}_{line} = compute_something({line})\n" for line in range(20))
            (tmp_path / f"module{number}.py").write_text(body)
            (tmp_path / "test").mkdir(exist_ok=True)
            (tmp_path / "test" / f"test_module{number}.py").write_text(f"import module{number}\n" + body.upper())
        held_out = [file for file in split(collect(tmp_path)) if file.is_held_out]
        assert held_out
        # A copy under another name, with a line changed, and a file in two places.
        stolen = held_out[0].content.replace(b"value", b"worth", 1)
        (tmp_path / "stolen.py").write_bytes(stolen)
        (tmp_path / "zzz.py").write_bytes((tmp_path / "module0.py").read_bytes())

        files = split(collect(tmp_path))

        training = {file.path for file in files if not file.is_held_out}
        assert "stolen.py" not in training
        assert len({file.content for file in files}) == len(files)
        subjects = [{subject(file.path) for file in files if file.is_held_out is part} for part in (True, False)]
        assert not subjects[0] & subjects[1]
        assert near_copies(files) == set()
        share = sum(len(file.content) for file in files if file.is_held_out) / sum(len(file.content) for file in files)
        assert 0.02 < share < 0.05

    def test_only_text_of_the_library_itself_is_collected(self, tmp_path: Path) -> None:
        for name in ("a.py", "site-packages/b.py", "encodings/c.py", "_sysconfigdata__linux.py", "data.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"# {name}\n")
        (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
        assert [file.path for file in collect(tmp_path)] == ["a.py"]

    def test_a_packed_corpus_comes_back_whole(self) -> None:
        files = (SourceFile("a.py", b"x = 1\n"), SourceFile("b.py", "é\n".encode(), is_held_out=True))
        corpus = Corpus(files, "CPython 3.11.7")
        again = unpack(pack(corpus))
        assert again == corpus
        assert again.sha256 == corpus.sha256

    @pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"no " + packed])
    def test_a_damaged_packed_corpus_is_refused(self, damage: object) -> None:
        packed = pack(Corpus((SourceFile("a.py", b"x = 1\n"),), "CPython 3.11.7"))
        with pytest.raises(ValueError, match="no packed corpus"):
            unpack(damage(packed))  # type: ignore[operator]


class TestSavedFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        model = make_model(TINY, 0, CPU)
        for mixer in model.expert_layers():
            mixer.gate.e_score_correction_bias.normal_(std=0.3)
        save_folder(model, tmp_path / "saved")
        return tmp_path / "saved"

    @torch.no_grad()
    def test_transformers_reads_it_and_gives_the_same_logits(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        tokens_BT = tokens(2, 40)
        ours = load_folder(folder, TINY, CPU)

        theirs = model.eval()(tokens_BT).logits

        assert type(model).__name__ == "NemotronHForCausalLM"
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        torch.testing.assert_close(theirs, ours.logits(ours(tokens_BT).main_BTE), rtol=0, atol=1e-4)

    @torch.no_grad()
    def test_our_engine_reads_it_and_gives_the_same_tokens_and_log_probabilities(self, folder: Path) -> None:
        loaded = load_model(folder, dtype=torch.float32)
        ours = load_folder(folder, TINY, CPU)
        config = EngineConfig(mode="legacy", device="inline", max_sequence_length=64, num_blocks=16, max_requests=2)
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1)
        with Engine(loaded, config) as engine:
            (output,) = engine.generate(["def f("], params, progress=False)

        whole = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        log = ours.logits(ours(whole).main_BTE).log_softmax(-1)[0]

        assert whole[0, :7].tolist() == [SEPARATOR, *b"def f("]
        assert output.logprobs is not None
        for place, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True), start=6):
            assert token == log[place].argmax()
            assert found[token] == pytest.approx(float(log[place, token]), abs=1e-4)

    def test_rounded_weights_are_those_that_come_back(self, folder: Path) -> None:
        model = make_model(TINY, 0, CPU)
        round_weights(model)
        again = load_folder(folder, TINY, CPU)
        for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other), name

    def test_draft_heads_are_stored_as_nemotron_does(self, folder: Path) -> None:
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", "pt") as file:
            names = {name for name in file.keys() if name.startswith("mtp.")}  # noqa: SIM118
        config = json.loads((folder / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == 2
        assert config["mtp_hybrid_override_pattern"] == "*-"
        for first, last in ((0, 1), (2, 3)):
            parts = {f"mtp.layers.{first}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "norm")}
            assert parts | {f"mtp.layers.{last}.final_layernorm.weight"} <= names

    def test_everyone_may_read_the_files(self, folder: Path) -> None:
        assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())

    def test_another_architecture_is_refused(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="differs from the architecture in n_groups"):
            load_folder(folder, replace(TINY, num_groups=1), CPU)

    def test_our_tokenizer_gives_every_text_back(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None
        chooser = random.Random(0)
        texts = [
            "",
            " a  b\n\tc ",
            "naïve — 🐍\r\n\x00\x7f",
            "".join(chr(chooser.randrange(1, 0x800)) for _ in range(500)),
        ]
        for text in texts:
            ids = tokenizer.encode(text)
            assert ids == [SEPARATOR, *text.encode()]
            assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_ids == (SEPARATOR,)

    def test_every_byte_has_a_token_of_its_own(self, folder: Path) -> None:
        from tokenizers.pre_tokenizers import ByteLevel

        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None
        spellings = [tokenizer.token(byte) for byte in range(256)]
        assert set(spellings) == set(ByteLevel.alphabet())
        assert bytes(range(256)).decode("latin-1") == "".join(
            tokenizer.decode([*chr(byte).encode()]) for byte in range(256)
        )

    def test_transformers_reads_the_tokenizer_as_we_do(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
        assert ours is not None
        text = "def f( x ):\n    return 'a , b' # ok ?\n"
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text


class TestEvaluation:
    def test_a_place_counts_only_behind_accepted_drafts_that_the_text_follows(self) -> None:
        text = torch.tensor([[1, 2, 3, 4, 5, 6]])
        main = torch.tensor([[2, 3, 4, 5, 6, 7]])
        first = torch.tensor([[-1, 3, 4, 9, 6, 7]])  # wrong at 3
        second = torch.tensor([[-1, -1, 4, 5, 9, 7]])  # wrong at 4
        counts = torch.tensor([[True, True, True, True, True, False]])

        accepted = count_accepted(Told(torch.zeros(1, 6), main, (first, second)), text, counts)

        # Place 1 at 1, 2, 3, 4: three right. Place 2 behind 1, 2 and 4, at 2, 3 and 5: all right.
        assert accepted.tried == [4, 3]
        assert accepted.taken == [3, 3]
        assert accepted.tokens_a_step() == pytest.approx(1 + 3 / 4 + 3 / 4)

    @pytest.mark.parametrize("length", [33, 64, 200])
    def test_every_next_token_is_counted_once(self, length: int) -> None:
        text = torch.arange(length)
        counted = torch.cat([tokens_BT[counts_BT] + 1 for tokens_BT, counts_BT in _windows(text, 32, 8)])
        assert counted.tolist() == list(range(1, length))

    @torch.no_grad()
    def test_greedy_texts_are_what_the_whole_pass_finds_likeliest(self) -> None:
        model = make_model(TINY, 0, CPU).double().eval()
        own = generate(model, tokens(2, 5), 12)
        told = read(model, own)
        assert torch.equal(told.main[:, 4:-1], own[:, 5:])

    def test_measured_numbers_reach_the_card(self) -> None:
        model = make_model(TINY, 0, CPU)
        corpus = Corpus(
            tuple(SourceFile(f"{n}.py", text, n > 0) for n, text in enumerate(counting_text(40))), "CPython 3.11.7"
        )
        options = replace(FAST, steps=60)
        trained = train(model, encode(corpus.training), options)
        evaluation = EvaluationOptions(window=128, overlap=32, num_texts=2, prompt=16, new_tokens=24)

        measured = measure(model, corpus.held_out, evaluation)
        card = model_card(Run.of(options, trained, corpus, model, evaluation, CPU), measured)

        assert measured.held_out_bytes == len(corpus.held_out[0])
        assert measured.bits_a_byte < 1
        assert measured.on_own.rates()[0] > 0.9
        assert f"| this model | {measured.bits_a_byte:.3f} |" in card
        assert corpus.sha256 in card
        assert "--steps 60 --seed 0" in card

    def test_the_card_repeats_a_run_by_the_clock_by_its_steps(self) -> None:
        options = TrainingOptions(minutes=3, seed=7, peak_rate=1e-3, compiles=True)
        corpus = Corpus((SourceFile("a.py", b"x"),), "CPython 3.11.7")
        model = make_model(Architecture(), 0, CPU)
        run = Run.of(options, Trained(steps=1234), corpus, model, EvaluationOptions(), CPU)
        assert command(run).endswith("--corpus corpus.xz --steps 1234 --seed 7 --rate 0.001 --compile")

    def test_the_curve_is_drawn_and_listed(self) -> None:
        trained = train(make_model(TINY, 0, CPU), encode(counting_text(40)), replace(FAST, steps=25))
        lines = curve_csv(trained.curve).splitlines()
        assert lines[0] == "step,seconds,tokens,rate,bits,draft_1_bits,draft_2_bits"
        assert [line.split(",")[0] for line in lines[1:]] == ["20", "25"]
        assert curve_svg(trained.curve).count("<polyline") == 3
