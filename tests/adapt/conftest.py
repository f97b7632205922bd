"""These tests compile many small programs and run each a few times: LLVM need not optimise them."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    quickly = request.node.get_closest_marker("oldest") is None
    jax.config.update("jax_disable_most_optimizations", quickly)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
