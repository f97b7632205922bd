"""The memory of compiled functions, on devices that are here and on devices that are not."""

from jact.memory.max_batch import Largest, MaxBatch, max_batch
from jact.memory.peak import MemoryAnalysis, analyze, peak
from jact.memory.targets import TARGETS, MissingPluginError, Target, mesh
from jact.memory.timeline import Buffer, Timeline, timeline

__all__ = [
    "TARGETS",
    "Buffer",
    "Largest",
    "MaxBatch",
    "MemoryAnalysis",
    "MissingPluginError",
    "Target",
    "Timeline",
    "analyze",
    "max_batch",
    "mesh",
    "peak",
    "timeline",
]
