"""The one table of models that the benchmarks and the tests share.

To add a model, write a file with a function `(batch, layers, dtype, remat) -> Task`, and a line
here.
"""

import dataclasses
import functools
from collections.abc import Callable

from benchmarks.models.bert import bert
from benchmarks.models.convnet import convnet
from benchmarks.models.graph import gcn
from benchmarks.models.graph_attention import gat
from benchmarks.models.lstm import lstm
from benchmarks.models.mlp import mlp
from benchmarks.models.resnet import resnet
from benchmarks.models.resnet20 import resnet20
from benchmarks.models.scanned import ScannedTransformer
from benchmarks.models.swin import swin
from benchmarks.models.task import DTYPES, Task, Wrap
from benchmarks.models.text import character_transformer
from benchmarks.models.transformer import transformer
from benchmarks.models.unet import unet
from benchmarks.models.vit import vit

__all__ = ["DTYPES", "MODELS", "Model", "Task"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its usual size.

    Attributes:
        build: Takes the keyword arguments of `task`, all of them given, and returns the task.
        batch: The usual number of examples (of nodes, for a graph).
        layers: The usual number of repeated blocks: of levels for `unet`, of blocks in the third
            stage for `swin_tiny`.
    """

    build: Callable[..., Task]
    batch: int
    layers: int

    def task(
        self,
        *,
        batch: int | None = None,
        layers: int | None = None,
        dtype: str = "f32",
        remat: Wrap = False,
    ) -> Task:
        """Builds the model; no parameter is allocated before `Task.init` is called.

        Args:
            batch: Number of examples; the model's own if None.
            layers: Number of repeated blocks; the model's own if None.
            dtype: What the model computes in, "f32" or "bf16"; parameters are always float32.
            remat: Whether each block is wrapped in `nn.remat`; or a function of the block's class
                that wraps it instead.

        Returns:
            The task.

        Raises:
            ValueError: If `dtype` is unknown, or a size is not positive.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        sizes = {
            "batch": self.batch if batch is None else batch,
            "layers": self.layers if layers is None else layers,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        return self.build(**sizes, dtype=dtype, remat=remat)


# The width and heads of BERT base.
transformer_base = functools.partial(transformer, width=768, heads=12, length=512)

MODELS: dict[str, Model] = {
    "mlp": Model(mlp, batch=256, layers=4),
    "convnet": Model(functools.partial(convnet, channels=64), batch=128, layers=16),
    "convnet_small": Model(functools.partial(convnet, channels=32), batch=64, layers=6),
    "transformer": Model(transformer_base, batch=16, layers=12),
    "transformer4": Model(transformer_base, batch=16, layers=4),
    "transformer_scanned": Model(
        functools.partial(transformer_base, stack=ScannedTransformer), batch=16, layers=12
    ),
    "transformer_small": Model(
        functools.partial(transformer, width=256, heads=4, length=256), batch=8, layers=4
    ),
    "resnet50": Model(resnet, batch=64, layers=16),
    "resnet20": Model(resnet20, batch=64, layers=9),
    "bert_large": Model(bert, batch=8, layers=24),
    "vit_b16": Model(vit, batch=32, layers=12),
    "swin_tiny": Model(swin, batch=32, layers=6),
    "unet": Model(unet, batch=16, layers=4),
    "lstm": Model(lstm, batch=64, layers=2),
    "gcn": Model(gcn, batch=1797, layers=2),
    "gat": Model(gat, batch=1797, layers=2),
    "char_transformer": Model(character_transformer, batch=32, layers=3),
}
