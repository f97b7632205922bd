"""Adaptation: how much each residual's compression hurts the gradient, and what to do about it."""

from jact.adapt.probe import Probe
from jact.adapt.sensitivity import sensitivity
from jact.adapt.table import Layout, Sensitivities

__all__ = ["Layout", "Probe", "Sensitivities", "sensitivity"]
