"""These tests compile many small programs, often the same, and run each a few times.

LLVM need not optimise them, and what one test has compiled the next one reads from a folder. The
tests marked `oldest` compile as users do.
"""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.adapt.steps import CONTROLLERS


def _configure(folder: str | None) -> None:
    jax.config.update("jax_disable_most_optimizations", folder is not None)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if folder else 1.0)
    # JAX decides once, at the first compilation, whether there is such a folder.
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


# Of the whole module, so that what its fixtures compile rounds as what its tests do.
@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(_compiled: str) -> Iterator[None]:
    _configure(_compiled)
    yield
    _configure(None)


@pytest.fixture(autouse=True)
def _compile_as_users_do(request: pytest.FixtureRequest, _compiled: str) -> Iterator[None]:
    if request.node.get_closest_marker("oldest") is None:
        yield
        return
    _configure(None)
    yield
    _configure(_compiled)


@pytest.fixture(autouse=True)
def _finish_background_work() -> Iterator[None]:
    """Else a test that replaces `Program.compile` would hear from an earlier test's controller."""
    yield
    for controller in CONTROLLERS:
        if controller._at.pending is not None and controller._at.pending.future is not None:
            controller._at.pending.future.exception()
    CONTROLLERS.clear()
