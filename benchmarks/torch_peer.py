"""What PyTorch offers, on the two models that `python -m benchmarks peers` measures in JAX.

    python benchmarks/torch_peer.py --json benchmarks/results/torch_peer.json

Needs PyTorch (2.13.0 under Python 3.11) and NumPy, and imports neither JAX nor jact, so that it
runs in an environment of its own. Three ways to a gradient: plain; `torch.utils.checkpoint` around
each block; and `torch.autograd.graph.saved_tensors_hooks` that store what autograd saves in 4 bits,
as GACT (Liu et al., 2022, section 3) and ActNN (Chen et al., 2021, section 3) describe it:
flattened, in groups of 256, each with its minimum and scale, rounded at random. Parameters, small
tensors and what is not float32 stay as they are.

Saved bytes are those of the distinct tensors that autograd holds between the passes. The peak is
how far the process's resident memory rises above where it was before the gradient, each way in a
process of its own: PyTorch has no counter for the CPU. Times are medians of interleaved rounds of
processor time on one thread, relative to plain.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

MODES = ("plain", "checkpoint", "hooks-4bit")
GROUP, LEVELS, LEAST_BYTES = 256, 15, 16384


class BasicBlock(nn.Module):
    """As in `benchmarks/models/resnet20.py`."""

    def __init__(self, before, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = None
        if before != channels:
            conv = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Block(nn.Module):
    """As in `benchmarks/models/transformer.py`, attention written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (p(y).reshape(split).transpose(1, 2) for p in (self.query, self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Chain(nn.Module):
    """A stem, blocks, and a head; blocks may be checkpointed."""

    def __init__(self, stem, blocks, head):
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x, checkpointed=False):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return self.head(x)


def resnet20():
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    sizes = [16] * 3 + [32] * 3 + [64] * 3
    blocks = [
        BasicBlock(before, own, 2 if own != before else 1)
        for before, own in zip([16, *sizes], sizes)  # noqa: B905
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    x, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    return Chain(stem, blocks, head), x, lambda y: F.cross_entropy(y, labels)


def transformer_small():
    blocks = [Block(256, 4) for _ in range(4)]
    x, target = torch.randn(8, 256, 256), torch.randn(8, 256, 256)
    return Chain(nn.Identity(), blocks, nn.Identity()), x, lambda y: F.mse_loss(y, target)


MODELS = {"resnet20": resnet20, "transformer_small": transformer_small}


class Counter:
    """Saved-tensor hooks that count bytes, and encode if asked to."""

    def __init__(self, model, encode):
        self.kept = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.encode, self.seen, self.bytes = encode, {}, 0

    def pack(self, x):
        pointer = x.untyped_storage().data_ptr()
        if pointer in self.kept:
            return x
        coded = self.encode and x.dtype == torch.float32 and x.nbytes >= LEAST_BYTES
        if not coded:
            if pointer not in self.seen:
                self.bytes += x.untyped_storage().nbytes()
                # The tensor is held, so that no other one is given its place.
                self.seen[pointer] = x.detach()
            return x
        code = quantize(x)
        self.bytes += sum(part.nbytes for part in code[1:])
        return code

    def unpack(self, saved):
        return saved if isinstance(saved, torch.Tensor) else dequantize(*saved)


def quantize(x):
    flat = x.detach().reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
    low, high = padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)
    scale = LEVELS / (high - low + 2e-6)
    steps = ((padded - low) * scale + torch.rand_like(padded)).floor_().clamp_(0, LEVELS)
    codes = steps.to(torch.uint8).reshape(-1, 2)
    return x.shape, codes[:, 0] | codes[:, 1] << 4, scale, low


def dequantize(shape, packed, scale, low):
    steps = torch.stack([packed & 15, packed >> 4], 1).reshape(-1, GROUP)
    return (steps / scale + low).reshape(-1)[: shape.numel()].reshape(shape)


def gradient(model, x, objective, mode, counter=None):
    """Fills the parameters' gradients; returns the bytes that autograd saved if it counts."""
    model.zero_grad()
    hooks = contextlib.nullcontext()
    if mode == "hooks-4bit" or counter:
        counter = counter or Counter(model, mode == "hooks-4bit")
        hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack)
    with hooks:
        loss = objective(model(x, mode == "checkpoint"))
    saved = counter.bytes if counter else None
    loss.backward()
    return saved


def flat(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def measure(name, rounds):
    torch.manual_seed(0)
    model, x, objective = MODELS[name]()
    seconds = {mode: [] for mode in MODES}
    for i in range(rounds + 1):
        for mode in MODES:
            start = time.process_time()
            gradient(model, x, objective, mode)
            if i:
                seconds[mode].append(time.process_time() - start)
    gradient(model, x, objective, "plain")
    exact = flat(model)
    plain = seconds["plain"]
    for mode in MODES:
        saved = gradient(model, x, objective, mode, Counter(model, mode == "hooks-4bit"))
        ratios = [own / other for own, other in zip(seconds[mode], plain)]  # noqa: B905
        yield {
            "framework": f"PyTorch {torch.__version__}",
            "model": name,
            "policy": mode,
            "saved_bytes": saved,
            "peak_bytes": peak(name, mode),
            "time_ratio": statistics.median(ratios),
            "relative_error": float((flat(model) - exact).norm() / exact.norm()),
        }


def peak(name, mode):
    """The rise of the resident memory during one gradient, in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", name, mode]
    # Freed memory goes back to the system at once, rather than to be used again later.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | own)
    return int(done.stdout)


def print_peak(name, mode):
    torch.manual_seed(0)
    model, x, objective = MODELS[name]()
    # Libraries allocate at their first call: a small one goes before.
    gradient(model, x[:1], lambda y: y.square().mean(), mode)
    # Linux then counts the highest resident memory anew.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    gradient(model, x, objective, mode)
    print(status("VmHWM") - before)


def status(key):
    """The bytes that Linux gives for this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak-of", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.peak_of:
        print_peak(*chosen.peak_of)
        return
    rows = [row for name in MODELS for row in measure(name, chosen.rounds)]
    for row in rows:
        print(
            f"{row['model']:18} {row['policy']:12} saved {row['saved_bytes'] / 2**20:7.1f} MiB  "
            f"peak {row['peak_bytes'] / 2**20:7.1f} MiB  time {row['time_ratio']:.2f}  "
            f"error {row['relative_error']:.1e}"
        )
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
