"""How tests compile that compile many small programs, often the same."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compiled_into(folder: str | None) -> Iterator[None]:
    """LLVM need not optimise, and what was compiled is read from a folder; None: as users do."""
    before = jax.config.jax_compilation_cache_dir
    _set(folder)
    try:
        yield
    finally:
        _set(before)


def _set(folder: str | None) -> None:
    jax.config.update("jax_disable_most_optimizations", folder is not None)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if folder else 1.0)
    # JAX decides once, at the first compilation, whether there is such a folder.
    compilation_cache.reset_cache()
