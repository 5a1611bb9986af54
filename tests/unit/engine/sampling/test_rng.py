from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.rng import _GOLDEN, DrawKind, _mix_host, derive_seed, to_int64, uniform, uniform_host
from tests.sampling_reference import chi_square_limit

SEEDS = [0, 1, 2, 42, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0x9E3779B97F4A7C15]


def draws(seeds: list[int], positions: list[int], kind: DrawKind = DrawKind.TARGET) -> np.ndarray:
    seed = torch.tensor([to_int64(s) for s in seeds])
    return np.asarray(uniform(seed, torch.tensor(positions), kind))


def check_is_uniform(values: np.ndarray, bins: int = 64) -> None:
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(bins - 1)
    gaps = np.abs(np.sort(values) - (np.arange(len(values)) + 0.5) / len(values))
    assert gaps.max() * len(values) ** 0.5 < 2.3  # Kolmogorov-Smirnov, about 1 in 20,000


class TestUniform:
    @pytest.mark.parametrize("kind", list(DrawKind))
    def test_device_and_host_give_the_same_bits(self, kind: DrawKind) -> None:
        pairs = [(seed, position) for seed in SEEDS for position in (0, 1, 2, 1000, 2**31, 2**40)]
        device = draws([s for s, _ in pairs], [p for _, p in pairs], kind)

        assert device.tolist() == [uniform_host(s, p, kind) for s, p in pairs]

    def test_stays_the_same_for_ever(self) -> None:
        assert [uniform_host(7, p, DrawKind.TARGET).hex() for p in (0, 1, 2)] == FROZEN

    def test_hash_is_that_of_splitmix64(self) -> None:
        published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # state 1234567
        assert [_mix_host(1234567 + _GOLDEN * i) for i in (1, 2, 3)] == published

    def test_lies_in_the_half_open_unit_interval(self) -> None:
        values = draws(list(range(100_000)), [0] * 100_000)

        assert values.min() >= 0.0
        assert values.max() < 1.0

    @pytest.mark.parametrize("seed", [0, 1, 123456789, -5])
    def test_is_uniform_along_a_stream(self, seed: int) -> None:
        check_is_uniform(draws([seed] * 50_000, list(range(50_000))))

    @pytest.mark.parametrize("position", [0, 1, 77])
    def test_is_uniform_over_neighbouring_seeds(self, position: int) -> None:
        check_is_uniform(draws(list(range(50_000)), [position] * 50_000))

    def test_streams_of_seeds_positions_and_kinds_are_unrelated(self) -> None:
        n = 50_000
        base = draws([5] * n, list(range(n)))
        others = {
            "next seed": draws([6] * n, list(range(n))),
            "next position": draws([5] * n, list(range(1, n + 1))),
            "draft": draws([5] * n, list(range(n)), DrawKind.DRAFT),
            "accept": draws([5] * n, list(range(n)), DrawKind.ACCEPT),
            "seed and position swapped": draws(list(range(n)), [5] * n),
        }

        for name, other in others.items():
            assert abs(np.corrcoef(base, other)[0, 1]) < 5 / n**0.5, name
            cells = np.bincount((base * 8).astype(int) * 8 + (other * 8).astype(int), minlength=64)
            assert ((cells - n / 64) ** 2 / (n / 64)).sum() < chi_square_limit(63), name

    def test_does_not_depend_on_the_row(self) -> None:
        seeds = [1111, 2222, 3333, 4444]
        alone = [draws([seed], [9])[0] for seed in seeds]

        assert draws(seeds[::-1], [9] * 4).tolist() == alone[::-1]
        assert len(set(alone)) == 4


class TestSeeds:
    def test_signed_and_unsigned_spelling_of_a_seed_are_one(self) -> None:
        assert uniform_host(-1, 3, DrawKind.TARGET) == uniform_host(2**64 - 1, 3, DrawKind.TARGET)
        assert to_int64(2**64 - 1) == -1
        assert to_int64(2**63 - 1) == 2**63 - 1

    def test_derived_seeds_differ_and_fit_a_signed_column(self) -> None:
        seeds = [derive_seed(engine_seed, number) for engine_seed in (0, 1, -7) for number in range(2000)]

        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_first_draws_of_derived_seeds_are_uniform(self) -> None:
        values = [uniform_host(derive_seed(0, number), 0, DrawKind.TARGET) for number in range(20_000)]
        check_is_uniform(np.array(values))


FROZEN = ["0x1.7169852efd579p-1", "0x1.4ca60bfa671d9p-1", "0x1.1947976d94c62p-1"]
