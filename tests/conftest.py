"""Settings for all tests: devices, strict numerics, and where they must be relaxed."""

import os
from collections.abc import Iterator

# JAX reads these when it is imported. Eight devices serve the sharding tests and cost little.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT_FLAG = "--xla_force_host_platform_device_count"
if _COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}=8".strip()
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.compilation import compiled_into  # noqa: E402

# An implicit promotion in jact's own code would change a gradient's dtype unnoticed.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of each shape compiles, which takes longer than any deadline; and the same
# examples on every run keep a failure in CI reproducible.
hypothesis.settings.register_profile("jact", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("jact")

#: Their tests compile hundreds of small programs, often the same, and run each once. LLVM need not
#: optimise them (it comes after what decides on memory), and what one test has compiled another one
#: reads from a folder. The tests marked `oldest` of the engine compile as users do.
QUICK = ("codecs", "engine", "flax", "transform")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def _compile_quickly(request: pytest.FixtureRequest, compiled: str) -> Iterator[None]:
    folder = request.path.parent.name
    as_users_do = folder == "engine" and request.node.get_closest_marker("oldest") is not None
    if folder not in QUICK or as_users_do:
        yield
        return
    with compiled_into(compiled):
        yield


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Relaxes promotion for tests marked `standard_promotion`.

    Flax's normalisation layers in bfloat16 and Optax's schedules mix dtypes on purpose; float32
    models pass under the strict rules.
    """
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
