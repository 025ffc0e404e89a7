# SPDX-License-Identifier: MIT
"""Tables as they are served: rows in FP32, FP16, INT8 or INT4, looked up by inference kernels.

INT8 and INT4 scale each row by its own range (FBGEMM's fused row-wise format: numbers, then
scale and least value in FP16). The modules are TorchRec's for inference, over FBGEMM's kernels.
They add vectors up in FP32.

Shapes: E rows, D columns, W bytes of a packed row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from embeddings.collection import EmbeddingLayer

TableFormat = Literal["fp32", "fp16", "int8", "int4"]
FORMATS: tuple[TableFormat, ...] = ("fp32", "fp16", "int8", "int4")
_BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
_TYPES = {
    "fp32": DataType.FP32,
    "fp16": DataType.FP16,
    "int8": DataType.INT8,
    "int4": DataType.INT4,
}
_SCALE_BYTES = 4
_ROWS = 65_536  # packed at a time


def packed_width(width: int, form: TableFormat) -> int:
    """Return W, the bytes of a packed row of `width` numbers."""
    return width * _BITS[form] // 8 + (_SCALE_BYTES if _BITS[form] < 16 else 0)


def pack(weight: Tensor, form: TableFormat) -> Tensor:
    """Return the (E, W) uint8 rows of an (E, D) table."""
    packed = torch.empty(len(weight), packed_width(weight.shape[1], form), dtype=torch.uint8)
    for first in range(0, len(weight), _ROWS):
        rows = weight[first : first + _ROWS].detach().float().contiguous()
        if _BITS[form] < 16:
            found = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, _BITS[form])
        else:
            found = (rows.half() if form == "fp16" else rows).view(torch.uint8)
        packed[first : first + _ROWS] = found
    return packed


def table_of(name: str) -> str:
    """Return the table whose weight a model's state calls `name`; empty if it is no table's."""
    parts = name.split(".")
    is_table = parts[0] == "embeddings" and parts[-1] == "weight"
    return parts[-2] if is_table else ""


def serve_packed(layer: EmbeddingLayer, tables: Mapping[str, Tensor], form: TableFormat) -> None:
    """Put packed tables in the place of a layer's tables, which may be on `meta`.

    Args:
        layer: whose collections are replaced.
        tables: (E, W) uint8 rows by table.
        form: of the rows.
    """
    for name in ("bags", "weighted"):
        bags = getattr(layer, name)
        if bags is not None:
            configs, rows = _packed(bags.embedding_bag_configs(), tables, form)
            cpu = torch.device("cpu")
            module = EmbeddingBagCollection(
                configs, bags.is_weighted(), cpu, table_name_to_quantized_weights=rows
            )
            setattr(layer, name, module)
    for name, collection in layer.collections.items():
        layer.collections[name] = _rows(cast(Any, collection), tables, form)
    for name, dynamic in layer.dynamic.items():
        found = cast(Any, dynamic)
        module = _rows(found._embedding_module, tables, form)
        maps = found._managed_collision_collection.to_empty(device="cpu")
        layer.dynamic[name] = _Frozen(maps, module)


class _Frozen(nn.Module):
    """Dynamic tables that are only looked up."""

    def __init__(self, maps: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self._managed_collision_collection, self._embedding_module = maps, rows

    def forward(self, features: KeyedJaggedTensor) -> tuple[dict[str, JaggedTensor], None]:
        """Return one vector per id of each feature, and None for the rows."""
        return self._embedding_module(self._managed_collision_collection(features)), None


def _rows(collection: Any, tables: Mapping[str, Tensor], form: TableFormat) -> nn.Module:
    configs, rows = _packed(collection.embedding_configs(), tables, form)
    return EmbeddingCollection(configs, torch.device("cpu"), table_name_to_quantized_weights=rows)


def _packed(
    configs: Any, tables: Mapping[str, Tensor], form: TableFormat
) -> tuple[Any, dict[str, Any]]:
    """Return TorchRec's configurations of packed tables, and their numbers and scales by name."""
    configs, rows = copy.deepcopy(configs), {}
    for config in configs:
        config.data_type = _TYPES[form]
        packed = tables[config.name]
        cut = -_SCALE_BYTES if _BITS[form] < 16 else packed.shape[1]
        scales = packed[:, cut:] if _BITS[form] < 16 else None
        rows[config.name] = (packed[:, :cut], scales)
    return configs, rows
