from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from engine.device_host import copy_keeping_the_interpreter


@pytest.fixture
def patient_interpreter() -> Iterator[None]:
    """A thread that asks for the interpreter waits far longer than the test takes, unless somebody lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    yield
    sys.setswitchinterval(before)


class TestCopyKeepingTheInterpreter:
    def test_copies(self) -> None:
        target, source = torch.zeros(40_000, dtype=torch.uint8), torch.arange(40_000).to(torch.uint8)
        copy_keeping_the_interpreter(target, source)()
        assert torch.equal(target, source)

    @pytest.mark.usefixtures("patient_interpreter")
    def test_no_other_thread_runs_meanwhile(self) -> None:
        """Once ``numpy.copyto`` let go of it, and a step's publish then lasted as long as the host's work beside it."""
        size = 1 << 23  # long enough for a waiting thread to wake
        copy = copy_keeping_the_interpreter(torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8))
        gate, ran = threading.Lock(), []
        gate.acquire()
        other = threading.Thread(target=lambda: (gate.acquire(), ran.append(True)))
        other.start()
        gate.release()  # from here on the other thread wants the interpreter
        for _ in range(20):
            copy()
        overtaken = bool(ran)
        other.join()
        assert not overtaken
