"""Adaptation: how much each residual's compression hurts the gradient, and what to do about it."""

from jact.adapt.allocate import InfeasibleBudgetError
from jact.adapt.fit import InfeasibleMemoryError
from jact.adapt.history import Adaptation
from jact.adapt.probe import Probe
from jact.adapt.sensitivity import sensitivity
from jact.adapt.table import Layout, Sensitivities

__all__ = [
    "Adaptation",
    "InfeasibleBudgetError",
    "InfeasibleMemoryError",
    "Layout",
    "Probe",
    "Sensitivities",
    "sensitivity",
]
