"""State-space backends behind one interface (``base.py``), and the factory that picks one."""

from __future__ import annotations

from engine.ssm.backends import BACKENDS, make_ssm, ssm_name
from engine.ssm.base import ScanInputs, ScanWeights, StateSpace
from engine.ssm.torch import TorchStateSpace

__all__ = ["BACKENDS", "ScanInputs", "ScanWeights", "StateSpace", "TorchStateSpace", "make_ssm", "ssm_name"]
