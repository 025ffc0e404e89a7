# SPDX-License-Identifier: MIT
"""Number formats, and a backward that tables survive.

Fused optimizers update the tables inside backward, so a loss scale would reach them unremoved, and
one overflow would leave NaN in every touched row for good. Backward therefore runs in two phases:

1. Embeddings are cut off at the tokenizer's input. Backward of the scaled loss fills the gradients
   of the dense weights (averaged over ranks by DDP) and of the cut.
2. All ranks decide together, in one all-reduce, whether every gradient is finite. If so, gradients
   are unscaled and clipped, the dense optimizer steps, and the cut's gradients go on into the
   tables, whose backward runs the fused update. If not, nothing has changed anywhere, and the scale
   halves.

The same all-reduce carries the weights of the ranks' losses: a rank's loss is a mean over its own
weight w_r, and the run's loss is the mean over all of it, W, so each rank's gradient counts w_r * R
/ W (DDP and TorchRec both divide by R). That is exact for uneven batches and costs nothing more.

Source: loss scaling as in Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
Shapes: B examples, R ranks, K tasks.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torchrec.sparse.jagged_tensor import JaggedTensor

from embeddings.collection import Embeddings
from trainer.runtime import RunError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_SCALE = 2.0**32


class Step(NamedTuple):
    """What a step did, the same on all ranks.

    loss: mean over the weight of all ranks. weight_sum: that weight. skipped: nothing was changed.
    gradient_norm: of the unscaled gradient, before clipping. loss_scale: the one used. num_skipped:
    steps skipped since the run began.
    """

    loss: float
    weight_sum: float
    skipped: bool
    gradient_norm: float
    loss_scale: float
    num_skipped: int


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number format of computation (weights and tables stay fp32), loss scale and clipping.

    initial_scale: loss scale of fp16 at the start; growth_interval: good steps until it doubles.
      Without effect on fp32 and bf16, where they must stay at their defaults.
    max_norm: largest global gradient norm, 0 for no clipping.
    clip: the norm is that of the `dense` gradient, or of `all`, embeddings at the model's input
      included.
    max_consecutive_skips: the run fails after so many steps in a row without a finite gradient.
    """

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    initial_scale: float = 65536.0
    growth_interval: int = 2000
    max_norm: float = 0.0
    clip: Literal["dense", "all"] = "dense"
    max_consecutive_skips: int = 50

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"precision.dtype: expected one of {list(_DTYPES)}, got {self.dtype!r}"
            )
        if self.clip not in ("dense", "all"):
            raise ValueError(f"precision.clip: expected 'dense' or 'all', got {self.clip!r}")
        if not 0 < self.initial_scale <= _MAX_SCALE:
            raise ValueError(
                f"precision.initial_scale: expected a number in (0, {_MAX_SCALE:g}], got "
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
        scaling = (self.initial_scale, self.growth_interval)
        if self.dtype != "fp16" and scaling != (
            type(self).initial_scale,
            type(self).growth_interval,
        ):
            raise ValueError(
                "precision: initial_scale and growth_interval have no effect on dtype "
                f"{self.dtype!r}; remove them, or use 'fp16'"
            )

    def build(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
    ) -> Precision:
        """Return the Precision of `model`, whose tokenizer's input becomes the cut.

        Args:
            model: the unwrapped model, with a `tokenizer` that takes Embeddings.
            optimizer: of the dense weights, which are the gradients that are checked.
            group: all ranks.
        """
        return Precision(self, model, optimizer, group)


class Precision:
    """Runs the two-phase backward of one model. See the module for why."""

    def __init__(
        self,
        config: PrecisionConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
    ) -> None:
        self.config = config
        self.loss_scale = config.initial_scale if config.dtype == "fp16" else 1.0
        self.num_skipped = 0
        self._optimizer = optimizer
        self._group = group
        self._dense = [p for part in optimizer.param_groups for p in part["params"]]
        self._device = self._dense[0].device
        self._good_steps = 0
        self._consecutive_skips = 0
        # A power of two near W / R: keeps scaled losses near loss * scale and rounds nothing.
        self._usual_weight = 0.0
        self._outputs: list[Tensor] = []
        self._leaves: list[Tensor] = []
        self._local = torch.zeros(2, dtype=torch.float64, device=self._device)
        tokenizer = model.get_submodule("tokenizer")
        self._hook = tokenizer.register_forward_pre_hook(self._cut, with_kwargs=True)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the model's forward runs."""
        dtype = _DTYPES[self.config.dtype]
        return torch.autocast(self._device.type, dtype=dtype, enabled=dtype != torch.float32)

    def backward(self, loss: Tensor, weight_sum: Tensor) -> None:
        """Run phase 1.

        Args:
            loss: 0-d, mean over this rank's weight.
            weight_sum: 0-d, that weight; 0 for a rank whose batch is all padding.
        """
        weight = weight_sum.detach().double()
        if not self._usual_weight:
            total = weight.clone()
            dist.all_reduce(total, group=self._group)
            self._usual_weight = _power_of_two(total.item() / self._group.size())
        self._local = torch.stack((weight, loss.detach().double() * weight))
        factor = (weight * (self.loss_scale / self._usual_weight)).to(loss.dtype)
        (loss * factor).backward()

    def apply(self) -> Step:
        """Run phase 2: decide, and update dense weights and tables, or nothing.

        Raises:
            RunError: too many steps in a row without a finite gradient.
        """
        dense = [p.grad for p in self._dense if p.grad is not None]
        # A leaf that the model did not use still takes part, because its backward is a collective.
        cut = [torch.zeros_like(x) if x.grad is None else x.grad for x in self._leaves]
        # Finite if every element is (and their norm, in fp32).
        dense_square, cut_square = (get_total_norm(part).double() ** 2 for part in (dense, cut))
        finite = torch.isfinite(dense_square + cut_square)
        zero = torch.zeros_like(cut_square)
        shared = torch.stack(
            (*self._local, torch.where(finite, cut_square, zero), (~finite).double())
        )
        dist.all_reduce(shared, group=self._group)
        weight, weighted_loss, cut_total, bad, dense_total = [*shared.tolist(), dense_square.item()]
        ranks, used_scale = self._group.size(), self.loss_scale
        skipped = bad > 0 or weight == 0
        unscale = ranks * self._usual_weight / (weight * used_scale) if weight else 0.0
        norm = unscale * math.sqrt(dense_total) if math.isfinite(dense_total) else math.inf
        if self.config.clip == "all":
            norm = math.hypot(norm, unscale / ranks * math.sqrt(cut_total))
        if not skipped:
            limit = self.config.max_norm
            factor = unscale * (limit / norm if limit and norm > limit else 1.0)
            of_cut = factor if self.config.clip == "all" else unscale
            torch._foreach_mul_(dense, factor)  # pyright: ignore[reportPrivateImportUsage]
            self._optimizer.step()
            if cut:
                torch._foreach_mul_(cut, of_cut)  # pyright: ignore[reportPrivateImportUsage]
                torch.autograd.backward(self._outputs, cut)
        self._outputs, self._leaves = [], []
        self._update(overflow=bad > 0)
        if weight:
            self._usual_weight = _power_of_two(weight / ranks)
        return Step(
            loss=weighted_loss / weight if weight else 0.0,
            weight_sum=weight,
            skipped=skipped,
            gradient_norm=norm if bad == 0 else math.inf,
            loss_scale=used_scale,
            num_skipped=self.num_skipped,
        )

    def step(self, loss: Tensor, weight_sum: Tensor) -> Step:
        """Run both phases. Gradients must be zero before: `optimizer.zero_grad()`."""
        self.backward(loss, weight_sum)
        return self.apply()

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs to continue bit by bit."""
        return {
            "loss_scale": self.loss_scale,
            "good_steps": self._good_steps,
            "num_skipped": self.num_skipped,
            "consecutive_skips": self._consecutive_skips,
            "usual_weight": self._usual_weight,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`. The scale is taken over only between runs in fp16."""
        if self.config.dtype == "fp16":
            self.loss_scale = float(state["loss_scale"])
            self._good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])
        self._consecutive_skips = int(state["consecutive_skips"])
        self._usual_weight = float(state["usual_weight"])

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
        return output.to(_DTYPES[self.config.dtype])

    def _update(self, overflow: bool) -> None:
        """Move the scale and count skipped steps."""
        if not overflow:
            self._consecutive_skips = 0
            self._good_steps += 1
            if self.config.dtype == "fp16" and self._good_steps >= self.config.growth_interval:
                self.loss_scale = min(2.0 * self.loss_scale, _MAX_SCALE)
                self._good_steps = 0
            return
        self._good_steps = 0
        self.num_skipped += 1
        self._consecutive_skips += 1
        if self.config.dtype == "fp16":
            self.loss_scale *= 0.5
        if self._consecutive_skips >= self.config.max_consecutive_skips:
            raise RunError(
                f"precision: no finite gradient in {self._consecutive_skips} steps in a row (dtype "
                f"{self.config.dtype}, loss scale now {self.loss_scale:g}); look for NaN in the "
                "data, lower the learning rate or set precision.dtype to 'bf16' or 'fp32'"
            )


def _power_of_two(value: float) -> float:
    """Return the power of two nearest below `value`; 1 for 0."""
    return 2.0 ** math.floor(math.log2(value)) if value > 0 else 1.0
