"""Policies by name: those that use several codecs, and those of the papers that jact builds on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jact import policy
from jact.codecs import Codec, Offload, Pool, Quantize
from jact.policy import Policy, Rule

__all__ = ["MIXED", "NAMES", "PAPERS", "POLICIES", "on_convolutions"]


def on_convolutions(codec: Codec | str, default: Codec | str) -> Policy:
    """One codec for the images between convolutions, another for everything else.

    Averaging over neighbours makes sense for images, `[batch, height, width, channels]`. It makes
    none for queries and keys, which have four axes as well: so the rule asks for a convolution's
    name, too.

    Args:
      codec: stores the results of convolutions with four axes, and what follows from them. Say a
        `Pool` with `axes=(-2, -1)` if channels come second.
      default: stores everything else; a codec, a preset's name or "keep".

    Example:
      >>> from jact import presets
      >>> policy = presets.on_convolutions("pool2", default="int8")
      >>> policy.action("Net/Conv_0/conv_general_dilated", (64, 32, 32, 16), "float32").name
      'pool2'
      >>> policy.action("Net/query/dot_general", (64, 32, 32, 16), "float32").name
      'int8'
    """
    # Nobody chose these rules for a model, so it is no mistake if a model has no convolution.
    rule = Rule("*conv_general_dilated*", codec, rank=4, required=False)
    return Policy(rules=(rule,), default=default)


MIXED: Mapping[str, Policy] = MappingProxyType(
    {
        # What is not an image takes about as many bits per element as a float32 image does.
        "pool2": on_convolutions("pool2", default="int8"),
        "pool4": on_convolutions("pool4", default="int2"),
        "pool2-int8": on_convolutions("pool2-int8", default="int2"),
        "pool2-int4": on_convolutions("pool2-int4", default="int1"),
        "hybrid2": on_convolutions("hybrid2", default="int2"),
    }
)
"""Policies whose codec is for images alone, and what stores everything else."""

PAPERS: Mapping[str, Policy] = MappingProxyType(
    {
        "gact-l1": Policy(default=Quantize(bits=4, group_size=256)),
        "gact-l1.1": Policy(default=Quantize(bits=8, group_size=256)),
        "gact-l1.2": Policy(default=Quantize(bits=2, group_size=256)),
        "gact-swap": Policy(default=Offload()),
        "barley-2x2": on_convolutions(Pool(window=2), default="keep"),
        "barley-4x4": on_convolutions(Pool(window=4), default="keep"),
        "blpa-8": Policy(default=Quantize(bits=8, zero_edge=True, stochastic=False)),
        "blpa-4": Policy(default=Quantize(bits=4, zero_edge=True, stochastic=False)),
    }
)
"""The levels of three papers, as near as jact comes to them.

What is saved is chosen by jact in every case: the results of expensive operations, with masks and
small arrays exact. So all of them save fewer values than the originals, and a gradient is nearer to
the exact one.

`gact-l1`, `gact-l1.1`, `gact-l1.2` (Liu et al., "GACT", ICML 2022: 4, 8 and 2 bits in groups of
256, stochastic): groups lie along axes instead of the flattened array, ranges are rounded outwards
before the codes are made. `gact-swap`: arrays as they are, in host memory; what is fetched when is
XLA's choice, where GACT prefetches one layer ahead at level 3.

`barley-2x2`, `barley-4x4` (Barley and Fröning, "Less Memory Means Smaller GPUs", arXiv 2409.11902:
average-pooled inputs of convolutions, everything else exact): an input of a convolution is made
again from the pooled output of the one before it, which normalisation and its gradient therefore
see pooled, too; there they see exact values. This saves more and errs more.

`blpa-8`, `blpa-4` (Chakrabarti and Moseley, "Backprop with Approximate Activations", NeurIPS 2019:
a bin edge at zero, to the nearest): each group has its own range, where theirs is six standard
deviations of the channel, known from normalisation. So nothing is cut off, and any layer can be
stored, at the price of 24 or 32 bits per group.
"""

POLICIES: Mapping[str, Policy] = MappingProxyType({**MIXED, **PAPERS})
"""All policies that have a name and more than one codec, or that of a paper."""

NAMES: tuple[str, ...] = (*policy.PRESETS, *POLICIES)
"""Every name that `policy=` understands."""
