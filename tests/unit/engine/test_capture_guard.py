"""What CUDA graphs are captured beside; that they are is shown by tests/gpu."""

from __future__ import annotations

import gc

import pytest

from engine.device_cuda import _no_collection


def fails_in_capture() -> None:
    with _no_collection():
        assert not gc.isenabled()
        raise RuntimeError("a capture fails")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_left_alone_and_then_collected_as_before(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="a capture fails"):
            fails_in_capture()
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()
