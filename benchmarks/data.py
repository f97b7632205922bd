"""Real data that is there without a download."""

import functools
import gzip
import pathlib
from typing import Any

import numpy as np

FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts its files."""


class MissingDataError(Exception):
    """A data set is not installed; the message says how to install it."""


@functools.lru_cache
def fashion_mnist(
    folder: pathlib.Path = FASHION_MNIST,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads Fashion-MNIST (Xiao, Rasul & Vollgraf, arXiv 1708.07747).

    Args:
        folder: where its four files are.

    Returns:
        "train" (60,000) and "test" (10,000): images `[n, 28, 28, 1]`, float32, the training
        images of mean zero and variance one; and labels `[n]`, int32.

    Raises:
        MissingDataError: one of the files is not there.
    """
    images = {part: _read(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k")}
    labels = {part: _read(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")}
    mean, std = images["train"].mean(), images["train"].std()

    def pair(part: str) -> tuple[np.ndarray, np.ndarray]:
        scaled = ((images[part] - mean) / std).astype(np.float32)
        return scaled[..., None], labels[part].astype(np.int32)

    return {"train": pair("train"), "test": pair("t10k")}


def _read(path: pathlib.Path) -> np.ndarray:
    """Reads an IDX file of bytes: two zeros, the type, the rank, the sizes, the numbers."""
    if not path.is_file():
        raise MissingDataError(
            f"{path} is missing: install Fashion-MNIST by `apt install dataset-fashion-mnist`, or "
            "leave out the tasks that begin with fashion_"
        )
    data = gzip.decompress(path.read_bytes())
    rank = data[3]
    shape = np.frombuffer(data, ">u4", rank, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def halved(images: np.ndarray) -> np.ndarray:
    """Averages `[n, height, width, channels]` over squares of 2 x 2."""
    n, height, width, channels = images.shape
    return images.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))


@functools.lru_cache
def help_text() -> np.ndarray:
    """The help on Python's own topics, half a million characters, as numbers below 128.

    It differs a little between versions of Python. What is not ASCII becomes 0.
    """
    from pydoc_data import topics

    pages: dict[str, Any] = topics.topics
    text = "\n".join(pages[name] for name in sorted(pages))
    numbers = np.array([ord(character) for character in text], np.int32)
    return np.where(numbers < 128, numbers, 0)
