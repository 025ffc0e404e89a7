# SPDX-License-Identifier: MIT
"""Number formats, and a backward that tables survive.

Fused optimizers update the tables inside backward, so a loss scale would reach them unremoved, and
one overflow would leave NaN in every touched row for good. Backward therefore runs in two phases:

1. Embeddings are cut off at the tokenizer's input. Backward of the scaled loss fills the gradients
   of the dense weights (averaged over ranks by DDP) and of the cut.
2. All ranks decide together, in one all-reduce, whether every gradient is finite. If so, gradients
   are unscaled and clipped, the dense optimizer steps, and the cut's gradients go on into the
   tables, whose backward runs the fused update. If not, nothing changes anywhere, and the scale
   halves.

The decision stays on the device, so the host queues a step without waiting for the one before. The
dense optimizer's kernel reads the decision there. The tables get zeros in place of gradients, which
change no bit of a table or of its optimizer's state. `SparseOptimizerConfig.zero_is_no_update` says
for which optimizers that holds.

The same all-reduce carries the weights of the ranks' losses. A rank's loss is the mean over its own
weight w_r. The run's loss is the mean over the weight of all ranks, W. DDP and TorchRec both divide
by R, so a rank's gradient is multiplied by w_r * R / W. That is exact for uneven batches.

Source: loss scaling as in Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
Shapes: B examples, R ranks, K tasks.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.collection import Embeddings
from embeddings.sharding.exchange import Exchange
from trainer.distributed.dense import Dense
from trainer.distributed.loss_scale import (
    MAX_SCALE,
    HostCopy,
    LossScale,
    Step,
    StepNumbers,
    StopVote,
    power_of_two,
)
from trainer.runtime.runtime import RunError, Runtime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions that multiply matrices of bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("avx512_bf16", "amx_bf16"))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number format of computation (weights and tables stay fp32), loss scale and clipping.

    Attributes:
        dtype: number format of computation. `auto` is bf16 where all ranks' devices multiply in it
            (CPUs with avx512_bf16 or AMX, GPUs from compute capability 8.0 on), else fp32; a run
            records what it was.
        initial_scale: loss scale of fp16 at the start. Must stay at its default for fp32 and bf16.
        growth_interval: good steps until the scale doubles. Must stay at its default for fp32 and
            bf16.
        max_norm: largest global gradient norm, 0 for no clipping.
        clip: the norm is that of the `dense` gradient, or of `all`, which includes the embeddings
            at the model's input.
        max_consecutive_skips: the run fails after so many steps in a row without a finite gradient.
    """

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    initial_scale: float = 65536.0
    growth_interval: int = 2000
    max_norm: float = 0.0
    clip: Literal["dense", "all"] = "dense"
    max_consecutive_skips: int = 50

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.dtype not in ("auto", *DTYPES):
            expected = ["auto", *DTYPES]
            raise ValueError(f"precision.dtype: expected one of {expected}, got {self.dtype!r}")
        if self.clip not in ("dense", "all"):
            raise ValueError(f"precision.clip: expected 'dense' or 'all', got {self.clip!r}")
        if not 0 < self.initial_scale <= MAX_SCALE:
            raise ValueError(
                f"precision.initial_scale: expected a number in (0, {MAX_SCALE:g}], got "
                f"{self.initial_scale}"
            )
        if self.growth_interval < 1 or self.max_consecutive_skips < 1:
            raise ValueError(
                "precision: growth_interval and max_consecutive_skips must be at least 1, got "
                f"{self.growth_interval} and {self.max_consecutive_skips}"
            )
        if not (math.isfinite(self.max_norm) and self.max_norm >= 0):
            raise ValueError(f"precision.max_norm: expected a number >= 0, got {self.max_norm}")
        if self.clip == "all" and not self.max_norm:
            raise ValueError("precision.clip: 'all' has no effect without max_norm; set max_norm")
        scaling, default = (self.initial_scale, self.growth_interval), type(self)
        if self.dtype != "fp16" and scaling != (default.initial_scale, default.growth_interval):
            raise ValueError(
                "precision: initial_scale and growth_interval have no effect on dtype "
                f"{self.dtype!r}; remove them, or use 'fp16'"
            )

    def settled(self, runtime: Runtime) -> PrecisionConfig:
        """Return these settings with the number format in place of `auto`. Collective if it is."""
        if self.dtype != "auto":
            return self
        able = torch.tensor(int(multiplies_bf16(runtime.device)))
        dist.all_reduce(able, op=dist.ReduceOp.MIN, group=runtime.group)
        return dataclasses.replace(self, dtype="bf16" if able else "fp32")

    def build(
        self,
        model: nn.Module,
        dense: Dense,
        zero_is_no_update: bool = True,
        exchange: Exchange | None = None,
    ) -> Precision:
        """Return the Precision of `model`, whose tokenizer's input becomes the cut.

        Args:
            model: unwrapped.
            dense: the weights outside the tables.
            zero_is_no_update: whether a gradient of zeros leaves a table and its optimizer as they
                are (`SparseOptimizerConfig.zero_is_no_update`).
            exchange: how gradients travel to the tables.
        """
        return Precision(self, model, dense, zero_is_no_update, exchange or Exchange())


class Precision:
    """Runs the two-phase backward of one model. See the module for why."""

    def __init__(
        self,
        config: PrecisionConfig,
        model: nn.Module,
        dense: Dense,
        zero_is_no_update: bool,
        exchange: Exchange,
    ) -> None:
        self.config, self.dense, self._group = config, dense, dense.group
        self._zero_is_no_update, self._exchange = zero_is_no_update, exchange
        self._device = next(iter(dense.parameters.values())).device
        half = config.dtype == "fp16"
        self.scaling = LossScale(
            config.initial_scale if half else 1.0, half, config.growth_interval, self._device
        )
        # A power of two near W / R: keeps scaled losses near loss * scale and rounds nothing.
        self._usual_weight = torch.zeros((), dtype=torch.float64, device=self._device)
        self._knows_weight = False
        self._consecutive: HostCopy | None = None
        self.stop = StopVote()
        self._outputs: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._local = torch.zeros(2, dtype=torch.float64, device=self._device)
        tokenizer = model.get_submodule("tokenizer")
        # The hook runs first, so that an engine's own hooks act on the dense side of the cut.
        self._hook = tokenizer.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True)

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self.scaling.scale.item()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.scaling.scale.fill_(value)

    @property
    def num_skipped(self) -> int:
        """Steps skipped for overflow so far."""
        return int(self.scaling.num_skipped.item())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model's forward runs."""
        dtype = DTYPES[self.config.dtype]
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)

    def backward(self, loss: Tensor, weight_sum: Tensor) -> None:
        """Run phase 1.

        Args:
            loss: 0-d, mean over this rank's weight.
            weight_sum: 0-d, that weight; 0 for a rank whose batch is all padding.
        """
        weight = weight_sum.detach().double()
        if not self._knows_weight:
            total = weight.clone()
            dist.all_reduce(total, group=self._group)
            self._usual_weight = power_of_two(total / self._group.size())
            self._knows_weight = True
        self._local = torch.stack((weight, loss.detach().double() * weight))  # [2] float64
        factor = (weight * (self.scaling.scale / self._usual_weight)).to(loss.dtype)
        self.dense.backward(loss * factor)

    def apply(self) -> Step:
        """Run phase 2: decide, and update dense weights and tables, or nothing.

        Raises:
            RunError: too many steps in a row, up to the one before, without a finite gradient.
        """
        self._check_skips()
        # A leaf that the model did not use still takes part, because its backward is a collective.
        cut = [torch.zeros_like(x) if x.grad is None else x.grad for x in self._leaves]
        # 0-d float64 each. Finite if every element is (and their norm, in fp32).
        dense_square, cut_square = self.dense.square(), get_total_norm(cut).double() ** 2
        bad = ~torch.isfinite(dense_square + cut_square)
        squares = (torch.where(bad, 0.0, part) for part in (cut_square, dense_square))
        stop = torch.full_like(cut_square, float(self.stop.wanted))
        shared = torch.stack((*self._local, *squares, bad.double(), stop))  # [6] float64
        dist.all_reduce(shared, group=self._group)
        weight, weighted_loss, cut_total, dense_total, num_bad, num_stop = shared.unbind()  # 0-d
        overflow, empty = num_bad > 0, weight == 0
        skip, used_scale, ranks = overflow | empty, self.scaling.scale, self._group.size()
        unscale = ranks * self._usual_weight / (weight * used_scale)
        norm = unscale * dense_total.sqrt()
        if self.config.clip == "all":
            norm = torch.hypot(norm, unscale / ranks * cut_total.sqrt())
        factor = unscale
        if self.config.max_norm:
            factor = unscale * (self.config.max_norm / norm).clamp(max=1.0)
        self.dense.step(factor, skip)
        of_tables = factor if self.config.clip == "all" else unscale
        self._exchange.expect(of_tables * cut_total.sqrt())
        self._update_tables(cut, of_tables, skip)
        self._outputs, self._leaves = [], []
        self.scaling.update(overflow)
        self._consecutive = HostCopy(self.scaling.consecutive_skips)
        self.stop.count(num_stop)
        self._usual_weight = torch.where(
            empty, self._usual_weight, power_of_two(torch.where(empty, 1.0, weight / ranks))
        )
        numbers = StepNumbers(
            loss=torch.where(empty, 0.0, weighted_loss / weight),
            weight_sum=weight,
            skipped=skip.double(),
            gradient_norm=torch.where(overflow, math.inf, torch.where(empty, 0.0, norm)),
            loss_scale=used_scale,
            num_skipped=self.scaling.num_skipped,
        )
        return Step(numbers)

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs to continue bit by bit."""
        return {**self.scaling.state_dict(), "usual_weight": self._usual_weight.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`. The scale is taken over only between runs in fp16."""
        self.scaling.load_state_dict(state)
        self._usual_weight.fill_(float(state["usual_weight"]))
        self._knows_weight = bool(state["usual_weight"])

    def _update_tables(self, cut: list[Tensor], factor: Tensor, skip: Tensor) -> None:
        """Send the cut's gradients times `factor` on into the tables, or nothing.

        Where an optimizer takes a gradient of zeros for no update, zeros are sent on and the
        decision stays on the device; the others wait for it here.
        """
        if not cut or (not self._zero_is_no_update and bool(skip)):
            return
        scalar = factor.to(cut[0].dtype)
        gradients = [torch.where(skip, 0.0, gradient * scalar) for gradient in cut]
        torch.autograd.backward(self._outputs, gradients)

    def _check_skips(self) -> None:
        """Fail if the steps up to the one before were skipped too often in a row.

        Reading that number does not stall: the device already works on the step after it.
        """
        skips = 0 if self._consecutive is None else int(self._consecutive.read())
        if skips >= self.config.max_consecutive_skips:
            raise RunError(
                f"precision: no finite gradient in {skips} steps in a row (dtype "
                f"{self.config.dtype}, loss scale now {self.loss_scale:g}); look for NaN in the "
                "data, lower the learning rate or set precision.dtype to 'bf16' or 'fp32'"
            )

    def _cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace Embeddings among the tokenizer's arguments, in training by leaves."""
        self._outputs, self._leaves = [], []
        training = module.training and torch.is_grad_enabled()
        args = tuple(self._cut_value(value, training) for value in args)
        kwargs = {name: self._cut_value(value, training) for name, value in kwargs.items()}
        if training and not self._outputs:
            raise RuntimeError(
                "precision: expected the tokenizer to be called with Embeddings that need a "
                "gradient, got none; pass the output of EmbeddingLayer on unchanged"
            )
        return args, kwargs

    def _cut_value(self, value: Any, training: bool) -> Any:
        """Return `value` with the tensors of Embeddings replaced."""
        if not isinstance(value, Embeddings):
            return value
        sequences = {
            name: JaggedTensor(
                values=self._cut_tensor(rows.values(), training),
                lengths=rows.lengths_or_none(),
                offsets=rows.offsets_or_none(),
            )
            for name, rows in value.sequences.items()
        }
        return Embeddings(self._cut_tensor(value.pooled, training), sequences)

    def _cut_tensor(self, output: Tensor, training: bool) -> Tensor:
        """Return a new fp32 leaf for `output`, cast after the cut so that its gradient is fp32."""
        if training and output.requires_grad:
            leaf = output.detach().requires_grad_()
            self._outputs.append(output)
            self._leaves.append(leaf)
            output = leaf
        return output.to(DTYPES[self.config.dtype])
