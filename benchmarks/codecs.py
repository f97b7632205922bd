"""How fast codecs encode and decode, against the memory traffic that they cannot do without.

A copy of the array moves its bytes twice. Encoding reads the array (twice where each group's range
must be known before its codes) and writes the code; decoding reads the code and writes the array.
The bound is the time of a copy times the bytes moved over the bytes that a copy moves. All programs
are run in turn, round after round; times are medians. On a CPU they are the seconds that all cores
spend, which other programs on the machine hardly change.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import output
from benchmarks.options import positive
from jact import codecs
from jact.codecs import Codec

COLUMNS: output.Columns = {
    "copy ms": output.number("copy_ms", ".2f"),
    "encode ms": output.number("encode_ms", ".2f"),
    "/ bound": output.number("encode_ratio", ".2f"),
    "decode ms": output.number("decode_ms", ".2f"),
    "/ bound ": output.number("decode_ratio", ".2f"),
}

SHAPES = {"image": (64, 32, 32, 64), "sequence": (16, 512, 512)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command alone."""
    parser.add_argument("--codecs", default="int8,int4,int2,int1,bf16,fp8,pool2,hybrid2,avg4-int2")
    parser.add_argument("--shape", choices=SHAPES, default="image", help="what to encode")
    parser.add_argument("--rounds", type=positive, default=15, help="how often each program runs")


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a result for each codec."""
    shape, dtype = SHAPES[chosen.shape], jnp.dtype(jnp.float32)
    x = jax.random.normal(jax.random.key(0), shape, dtype)
    programs: dict[str, Callable[[], Any]] = {"copy": functools.partial(_compiled(_copy, x), x)}
    chosen_codecs = {name: codecs.resolve(name) for name in chosen.codecs.split(",")}
    for name, codec in chosen_codecs.items():
        output.announce(f"compiling {name}")
        seed = jnp.uint32(1)
        encode = _compiled(codec.encode, x, seed)
        code = encode(x, seed)
        decode = _compiled(lambda code, codec=codec: codec.decode(code, shape, dtype), code)
        programs[f"encode {name}"] = functools.partial(encode, x, seed)
        programs[f"decode {name}"] = functools.partial(decode, code)
    seconds = median_times(programs, chosen.rounds)
    for name, codec in chosen_codecs.items():
        reads, size = passes(codec), math.prod(shape) * dtype.itemsize
        share = codec.nbytes(shape, dtype) / size
        encode, decode = seconds[f"encode {name}"], seconds[f"decode {name}"]
        yield {
            "model": "codecs",
            "label": f"{chosen.shape}\n{dtype}{list(shape)}, {jax.default_backend()}",
            "policy": name,
            "jax": jax.__version__,
            "copy_ms": seconds["copy"] * 1e3,
            "encode_ms": encode * 1e3,
            "encode_ratio": encode / (seconds["copy"] * (reads + share) / 2),
            "decode_ms": decode * 1e3,
            "decode_ratio": decode / (seconds["copy"] * (1 + share) / 2),
        }


def passes(codec: Codec) -> int:
    """How often an encoder must read the array: twice where a range comes before the codes."""
    return 2 if isinstance(codec, codecs.Quantize | codecs.PoolResidual) else 1


def median_times(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median time of each program, in seconds, of as many runs in turn and one to warm up."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, program in programs.items():
            start = clock()
            jax.block_until_ready(program())
            seconds[name].append(clock() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def _copy(x: jax.Array) -> jax.Array:
    # An addition, as XLA returns an array that is only copied without a pass over it.
    return x + 1


def _compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return jax.jit(fun).lower(*args).compile()
