# SPDX-License-Identifier: MIT
"""The number format in which vectors and their gradients travel between ranks.

TorchRec calls a codec around every exchange of vectors. Its own codec divides FP16 gradients by
their loss scale while they are still FP16, which loses again what the scale saved. Here both
directions are plain casts, and an FP16 gradient is multiplied by a power of two before the cast and
divided by it afterwards, in FP32. All ranks know the norm of all gradients at the model's input,
which no element exceeds; the power of two brings this norm to between 16 and 32. Then the sum of
the gradients of an id that occurs 4 million times in a batch does not overflow, and an element is
lost only below a billionth of the norm. The loss scale is taken out before, once.

Rows of a pooled table that is sharded by row are summed in this format on their way.

Source: torchrec.distributed.types.QuantizedCommCodec is the interface.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

WireFormat = Literal["fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OPERATIONS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)
# The norm of all gradients is brought to between 2^(_EXPONENT - 1) and 2^_EXPONENT.
_EXPONENT = 5


class Narrow:
    """A cast to `quantized_dtype` and back to float32, scaled by `scale` (0-d, a power of two)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.quantized_dtype = dtype
        self.scale: Tensor | None = None

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        """Return the tensor that is sent."""
        scaled = input_tensor if self.scale is None else input_tensor * self.scale
        return scaled.to(self.quantized_dtype)

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        """Return the received tensor in float32."""
        wide = input_grad.float()
        return wide if self.scale is None else wide / self.scale

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        """Return how many numbers are sent for `input_len` of them."""
        return input_len

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Return the width, and a padding of 0."""
        return input_tensor.shape[-1], 0

    def create_context(self) -> None:
        """Return None: a cast has no context."""


class Exchange:
    """The number format of one model's exchanges.

    Args:
        wire: format of vectors and gradients between ranks.
    """

    def __init__(self, wire: WireFormat = "fp32") -> None:
        self._forward, self._backward = Narrow(DTYPES[wire]), Narrow(DTYPES[wire])
        self.wire = wire

    @property
    def codecs(self) -> dict[str, QuantizedCommCodecs] | None:
        """The codecs for a sharder; None in fp32."""
        if self.wire == "fp32":
            return None
        pair = QuantizedCommCodecs(cast(Any, self._forward), cast(Any, self._backward))
        return {operation.name: pair for operation in _OPERATIONS}

    def expect(self, norm: Tensor) -> None:
        """Set the scale for gradients of a norm, 0-d and the same on all ranks; it may be 0."""
        if self.wire == "fp16":
            exponent = (_EXPONENT - torch.frexp(norm.double())[1]).clamp(-100, 100)
            power = torch.ldexp(torch.ones_like(norm, dtype=torch.float64), exponent)
            usable = torch.isfinite(norm) & (norm > 0)
            self._backward.scale = torch.where(usable, power, 1.0).float()
