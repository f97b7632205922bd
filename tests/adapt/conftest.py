"""These tests compile many small programs, often the same, and run each a few times.

LLVM need not optimise them, and what one test has compiled the next one reads from a folder. The
tests marked `oldest` compile as users do.
"""

from collections.abc import Iterator

import pytest

from tests.adapt.steps import CONTROLLERS
from tests.compilation import compiled_into


# Of the whole module, so that what its fixtures compile rounds as what its tests do.
@pytest.fixture(scope="module", autouse=True)
def _compile_quickly(compiled: str) -> Iterator[None]:
    with compiled_into(compiled):
        yield


@pytest.fixture(autouse=True)
def _compile_as_users_do(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("oldest") is None:
        yield
        return
    with compiled_into(None):
        yield


@pytest.fixture(autouse=True)
def _finish_background_work() -> Iterator[None]:
    """Else a test that replaces `Program.compile` would hear from an earlier test's controller."""
    yield
    for controller in CONTROLLERS:
        pending = controller._at.pending
        if pending is not None and pending.future is not None:
            pending.future.exception()
    CONTROLLERS.clear()
