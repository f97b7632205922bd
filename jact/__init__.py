"""jact: trains JAX and Flax models in a fraction of the activation memory."""

import importlib
from typing import TYPE_CHECKING, Any

from jact import codecs, memory, presets
from jact.adapt.controller import Controller
from jact.adapt.sensitivity import sensitivity
from jact.adapt.table import Sensitivities
from jact.memory.report import Report, report
from jact.plan import Plan
from jact.policy import Policy, Rule
from jact.transform import compress, grad, make_plan, value_and_grad

if TYPE_CHECKING:
    from jact import nnx

__version__ = "0.1.0"

__all__ = [
    "Controller",
    "Plan",
    "Policy",
    "Report",
    "Rule",
    "Sensitivities",
    "codecs",
    "compress",
    "grad",
    "make_plan",
    "memory",
    "nnx",
    "presets",
    "report",
    "sensitivity",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    # Importing Flax takes a second, and not everybody has NNX modules.
    if name == "nnx":
        return importlib.import_module("jact.nnx")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
