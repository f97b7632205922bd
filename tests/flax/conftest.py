"""These tests compile hundreds of small programs and run each once: LLVM need not optimise them."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
