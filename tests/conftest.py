"""What all tests share: one thread for torch, hypothesis profiles, and tests that need a GPU skipped without one."""

from __future__ import annotations

import os

# Before anything imports a Hugging Face library: no test may reach for the network, and forked workers stay quiet.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent

# The machine has two cores and several test processes; small tensors gain nothing from threads and lose order.
torch.set_num_threads(1)

# No deadline anywhere: a first call traces or imports, and a loaded machine is not a fault.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under ``tests/gpu`` as ``gpu``, so that the folder alone decides."""
    for item in items:
        if item.path.is_relative_to(TESTS / "gpu"):
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
