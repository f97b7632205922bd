"""Two processes that train one model together, as on two hosts."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jact

port, rank, count, result = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
assert jax.process_count() == count and jax.device_count() == 2

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
params = [rng.normal(size=(32, 32)).astype("float32") / 6 for _ in range(3)]
batch = rng.normal(size=(64, 32)).astype("float32")
everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
params = [jax.make_array_from_process_local_data(everywhere, p) for p in params]
rows = 64 // count
batch = jax.make_array_from_process_local_data(split, batch[rank * rows : (rank + 1) * rows])

def loss(params, x):
    h = x
    for p in params:
        h = jax.nn.gelu(h @ p)
    return jnp.mean((h - x) ** 2)

policy = jact.Policy(default=jact.codecs.Quantize(bits=4, group_size=8), min_bytes=256)

@jax.jit
def step(params, x):
    grads = jact.grad(loss, policy=policy)(params, x)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

assert jact.report(loss, policy)(params, batch).saved_bytes < 4 * 3 * 64 * 32 / 2
for _ in range(5):
    params = step(params, batch)

# What processes decide each for itself, they decide alike.
controller = jact.Controller(
    bits=5, codecs=("int8", "int4"), every=3, switch_after=1, policy=policy
)

@controller.jit
def adaptive_step(params, x):
    grads = jact.grad(loss, policy=controller)(params, x)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

for _ in range(6):
    params = adaptive_step(params, batch)
assert [a.reason for a in controller.history] == ["first", "confirm", "periodic"]
plan = np.frombuffer(controller.plan.to_json().encode(), np.uint8)
plans = multihost_utils.process_allgather(plan).reshape(count, -1)
assert (plans == plan).all()
if rank == 0:
    np.savez(result, *(np.asarray(p.addressable_data(0)) for p in params))
"""


def train(folder: pathlib.Path, count: int) -> list[np.ndarray]:
    """The parameters after some steps on two devices, which `count` processes share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, result = folder / "train.py", folder / f"{count}.npz"
    script.write_text(PROGRAM)
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // count}",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}",
    }
    # Into files, as a full pipe would stop one process, and the other would wait for it.
    logs = [(folder / f"{count}_{rank}.log").open("w+") for rank in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(rank), str(count), str(result)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        statuses = [process.wait(timeout=300) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    assert statuses == [0] * count, [pathlib.Path(log.name).read_text() for log in logs]
    with np.load(result) as arrays:
        return [arrays[name] for name in arrays.files]


def test_two_processes_train_the_same_model(tmp_path: pathlib.Path) -> None:
    alone, together = train(tmp_path, 1), train(tmp_path, 2)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
