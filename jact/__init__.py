"""jact: trains JAX and Flax models in a fraction of the activation memory."""

from jact import codecs, memory, presets
from jact.memory.report import Report, report
from jact.plan import Plan
from jact.policy import Policy, Rule
from jact.transform import compress, grad, make_plan, value_and_grad

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "Policy",
    "Report",
    "Rule",
    "codecs",
    "compress",
    "grad",
    "make_plan",
    "memory",
    "presets",
    "report",
    "value_and_grad",
]
