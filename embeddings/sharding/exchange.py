# SPDX-License-Identifier: MIT
"""The number format in which vectors and their gradients travel between ranks.

TorchRec asks a codec around every exchange of vectors. Its own divides FP16 gradients by their loss
scale while they are still FP16, where what the scale had saved is lost again. Here both ways are
plain casts, and an FP16 gradient is multiplied by a power of two before and divided by it after, in
FP32. That power follows the step: all ranks know the norm of all gradients at the model's input,
which no element exceeds, so it is brought to between 16 and 32. Then nothing overflows, not even
the sum of the gradients of an id that 4 million places of a batch read, and an element is lost only
below a billionth of the norm. Gradients arrive as they were sent: the loss scale was taken out
before, once, and nothing here is left in.

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
# The norm of all gradients is brought to between half of two to this power and all of it.
_EXPONENT = 5


class Narrow:
    """A cast to `quantized_dtype` and back to float32, `scale` (0-d, a power of two) between."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.quantized_dtype = dtype
        self.scale: Tensor | None = None

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        """Return what travels."""
        scaled = input_tensor if self.scale is None else input_tensor * self.scale
        return scaled.to(self.quantized_dtype)

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        """Return what arrived, in float32."""
        wide = input_grad.float()
        return wide if self.scale is None else wide / self.scale

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        """Return how many numbers travel for so many."""
        return input_len

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Return the width and what is added to it: nothing."""
        return input_tensor.shape[-1], 0

    def create_context(self) -> None:
        """Return nothing: a cast needs to know nothing."""


class Exchange:
    """How the vectors of one model travel."""

    def __init__(self, wire: WireFormat = "fp32") -> None:
        self._forward, self._backward = Narrow(DTYPES[wire]), Narrow(DTYPES[wire])
        self.wire = wire

    @property
    def codecs(self) -> dict[str, QuantizedCommCodecs] | None:
        """What a sharder is given; None in fp32."""
        if self.wire == "fp32":
            return None
        pair = QuantizedCommCodecs(cast(Any, self._forward), cast(Any, self._backward))
        return {operation.name: pair for operation in _OPERATIONS}

    def expect(self, norm: Tensor) -> None:
        """Prepare for gradients of this norm (0-d, the same on all ranks), or for zeros."""
        if self.wire == "fp16":
            exponent = (_EXPONENT - torch.frexp(norm.double())[1]).clamp(-100, 100)
            power = torch.ldexp(torch.ones_like(norm, dtype=torch.float64), exponent)
            usable = torch.isfinite(norm) & (norm > 0)
            self._backward.scale = torch.where(usable, power, 1.0).float()
