# SPDX-License-Identifier: MIT
"""DIN: a history summed with weights that a small network gives each event for the target.

Source: Zhou et al., Deep Interest Network, KDD 2018, equations 3 (the pooling), 4 and 5 (PReLU and
Dice). For events e_j and a target v

    u(v) = Σ_j a(e_j, v) e_j,

with the activation unit a: a network of [v, e_j, v - e_j, v ⊙ e_j] with one number out, which is
not normalised, so that the size of u says how strong an interest is (section 4.3). A perceptron of
[fields, u(v), v] is the output. Dice is s·p(s) + α s (1 - p(s)) with p = σ((s - mean) / √(var + ε))
over the batch; here over real events alone, never over padding.

The paper's figure writes the unit's extra input as an outer product, the authors' code as
difference and product; that is what this is, and public implementations are. Events have no
position vectors, as in the paper. An event and a target are maps of all their features each.

Left open: initial values (Xavier here, α 0.25 for PReLU and 0 for Dice), the share by which Dice's
running moments move (.01 here). With `dice`, ranks take moments of their own rows, so two ranks do
not train exactly like one; with `prelu` they do.

Shapes: B examples, F fields, L columns of events, V targets, D token width, H units.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.attention.padding import PaddedHistory, read_stream
from models.layers import check_choices, widen, xavier_linear
from models.stream import Stream
from models.tower import StreamTowerConfig, Tower


@dataclass(frozen=True, kw_only=True)
class DINConfig(StreamTowerConfig):
    """DIN's settings.

    Args:
        attention_units: widths of the activation unit's hidden layers.
        hidden_units: widths of the perceptron.
        activation: of all layers, `prelu` or `dice`.
        softmax: whether an example's weights are normalised; the paper's are not.
        dropout: probability, in the perceptron.
    """

    attention_units: tuple[int, ...] = (36,)
    hidden_units: tuple[int, ...] = (200, 80)
    activation: Literal["prelu", "dice"] = "prelu"
    softmax: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_choices(self, "din")
        if not self.attention_units or not self.hidden_units or self.max_length < 1:
            raise ValueError(
                "din: attention_units and hidden_units need a width each and max_length must be "
                f"positive; got {self.attention_units}, {self.hidden_units} and {self.max_length}"
            )

    def build(self, num_fields: int, token_dim: int) -> DIN:
        """Return the tower for streams of `num_fields` fields and width `token_dim`."""
        return DIN(self, num_fields, token_dim)


class DIN(Tower):
    """Weighted history, target and fields in a perceptron: (B, V, hidden_units[-1])."""

    def __init__(self, config: DINConfig, num_fields: int, token_dim: int) -> None:
        super().__init__()
        self.config, self.num_fields, self.token_dim = config, num_fields, token_dim
        self.history = PaddedHistory(config.max_length, token_dim, config.num_actions, places=False)
        self.unit = _Layers(4 * token_dim, config.attention_units, config.activation)
        self.weigh = xavier_linear(self.unit.output_dim, 1)
        width = (num_fields + 2) * token_dim
        self.deep = _Layers(width, config.hidden_units, config.activation, config.dropout)
        self.output_dim = self.deep.output_dim

    def fsdp_units(self) -> list[nn.Module]:
        """Return none: the layers' parts run one by one."""
        return []

    def forward(self, stream: Stream) -> Tensor:
        """Return the outputs (B, V, hidden_units[-1]) at the targets.

        Raises ValueError if the stream does not fit the tower's fields, width or actions.
        """
        stream = read_stream(
            stream, self.num_fields, self.token_dim, self.config.num_actions, "din"
        )
        events, present = self.history(stream)
        targets_BVD = stream.targets
        shape = (-1, targets_BVD.shape[1], events.shape[1], -1)
        target, event = targets_BVD[:, :, None].expand(shape), events[:, None].expand(shape)
        pairs = torch.cat([target, event, target - event, target * event], dim=-1)
        seen = present[:, None].expand(shape[:-1])  # (B, V, L)
        weights = self.weigh(self.unit(pairs, seen))[..., 0]
        if self.config.softmax:
            weights = widen(weights, "din").masked_fill(~seen, -1e9).softmax(-1)
        interest = (weights * seen).to(events.dtype) @ events  # (B, V, D)
        fields = stream.fields.flatten(1)[:, None].expand(-1, shape[1], -1)
        return self.deep(torch.cat([fields, interest.to(fields.dtype), targets_BVD], dim=-1))


class Dice(nn.Module):
    """s·p(s) + α s (1 - p(s)) with moments over rows, (..., H) to (..., H)."""

    mean: Tensor
    variance: Tensor

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(num_units))
        self.register_buffer("mean", torch.zeros(num_units))
        self.register_buffer("variance", torch.ones(num_units))

    def forward(self, inputs: Tensor, present: Tensor | None = None) -> Tensor:
        """Return (..., H) of (..., H). present: (...), the rows that moments are taken of."""
        inputs = widen(inputs, "dice")
        mean, variance = self.mean, self.variance
        if self.training:
            weights = inputs.new_ones(inputs.shape[:-1]) if present is None else present
            weights = weights.to(inputs.dtype)[..., None]
            axes, total = tuple(range(inputs.dim() - 1)), weights.sum().clamp(min=1)
            mean = (inputs * weights).sum(axes) / total
            variance = ((inputs - mean).square() * weights).sum(axes) / total
            with torch.no_grad():
                self.mean.lerp_(mean.to(self.mean.dtype), 0.01)
                self.variance.lerp_(variance.to(self.variance.dtype), 0.01)
        share = ((inputs - mean) * (variance + 1e-9).rsqrt()).sigmoid()
        return inputs * (share + self.alpha * (1 - share))


class _Layers(nn.Module):
    """Linear layers with PReLU or Dice after each: (..., D) to (..., widths[-1])."""

    def __init__(
        self, in_features: int, widths: tuple[int, ...], activation: str, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = pairwise([in_features, *widths])
        self.linears = nn.ModuleList(xavier_linear(before, after) for before, after in sizes)
        self.dice = nn.ModuleList(Dice(width) for width in widths if activation == "dice")
        slopes = [] if self.dice else [torch.full((width,), 0.25) for width in widths]
        self.slopes = nn.ParameterList(slopes)
        self.dropout, self.output_dim = dropout, widths[-1]

    def forward(self, inputs: Tensor, present: Tensor | None = None) -> Tensor:
        """Return (..., widths[-1]) of (..., D). present: as in `Dice`."""
        for number, linear in enumerate(self.linears):
            inputs = linear(inputs)
            if self.dice:
                inputs = self.dice[number](inputs, present)
            else:
                slope = self.slopes[number].to(inputs.dtype)
                inputs = torch.where(inputs > 0, inputs, slope * inputs)
            if self.dropout:
                inputs = functional.dropout(inputs, self.dropout, self.training)
        return inputs
