"""Reading device tensors for a person's eyes; the caller marks the iteration whose times this spoils."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.engine import Engine
from engine.errors import ConfigError

READABLE = ("last_token", "drafts", "block_table", "ints", "floats", "logits")
"""Names that :func:`read_device_value` knows; ``engine/columns.py`` has the map of all but the last."""


def read_device_value(engine: Engine, name: str) -> NDArray[Any] | None:
    """Wait for the device and copy one tensor to the host.

    Args:
        engine: Whose device.
        name: One of :data:`READABLE`; ``logits`` are those of the pending forward, one row a batch row.

    Returns:
        A copy, without the dummy row; None for ``logits`` while no forward is pending, and for ``drafts`` without
        drafting.

    Raises:
        ConfigError: the name is unknown.
        DeviceError: work on the device raised.
    """
    if name not in READABLE:
        raise ConfigError(f"read_device knows {', '.join(READABLE)}; got {name!r}")
    engine.device.synchronize()
    if name == "logits":
        pending = engine.pending
        return None if pending is None or pending.logits.rows is None else _copied(pending.logits.rows)
    columns = engine.runner.columns
    values = getattr(columns, name)
    return None if values is None else _copied(values[: columns.dummy_row])


def _copied(tensor: Tensor) -> NDArray[Any]:
    values = tensor.detach().cpu()
    return np.array((values if values.dtype.itemsize > 2 else values.float()).numpy())
