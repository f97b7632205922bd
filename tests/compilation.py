"""How tests compile that compile many small programs, often the same."""

import jax
from jax.experimental.compilation_cache import compilation_cache


def compile_quickly(folder: str | None) -> None:
    """LLVM need not optimise, and what was compiled is read from a folder; None undoes both."""
    jax.config.update("jax_disable_most_optimizations", folder is not None)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if folder else 1.0)
    # JAX decides once, at the first compilation, whether there is such a folder.
    compilation_cache.reset_cache()
