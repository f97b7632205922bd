"""The memory of compiled functions, on devices that are here and on devices that are not."""

from jact.memory.peak import MemoryAnalysis, analyze, peak
from jact.memory.targets import TARGETS, MissingPluginError, Target

__all__ = ["TARGETS", "MemoryAnalysis", "MissingPluginError", "Target", "analyze", "peak"]
