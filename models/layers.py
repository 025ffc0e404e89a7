# SPDX-License-Identifier: MIT
"""Layers shared by the towers: norms, multi-layer perceptrons, per-token weights.

Ranking towers give every token its own feed-forward weights, because tokens have different meanings
(a user, an item, a context). The weights of all tokens are one parameter and one batched matrix
product. A loop over tokens would launch T small products instead. The gated form is RankElastor's
(equation 4). With `extra_gate` and biases it is the form of that paper's released code.

Shapes: B examples, T tokens, D token width, M hidden width, K terms of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Literal["gelu", "relu", "silu"]
NormKind = Literal["layer", "rms", "none"]

# Epsilon of RankElastor's released code.
RMS_EPS = 1e-12

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


def activate(kind: Activation, values: Tensor) -> Tensor:
    """Return the activation `kind` of values (...)."""
    return _ACTIVATIONS[kind](values)


def check_choices(config: object, section: str) -> None:
    """Raise ValueError if a `Literal` field of the dataclass `config` holds another value.

    Args:
        config: dataclass instance.
        section: name of the configuration in the message.
    """
    for name, hint in get_type_hints(type(config)).items():
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        value = getattr(config, name)
        if choices and value not in choices:
            expected = ", ".join(map(str, choices))
            raise ValueError(f"{section}: {name} must be one of {expected}; got {value!r}")


class Measured(nn.Identity):
    """Identity that marks a tensor for the rank diagnostics.

    Args:
        kind: what the tensor is: `layer`, `mixing`, `attention` or `ffn`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.measured_as = kind


def read_tokens(tokens: Tensor, num_tokens: int, token_dim: int, tower: str) -> Tensor:
    """Check (B, T, D) tokens and widen half precision to float32.

    Args:
        tokens: the tokenizer's output.
        num_tokens: T that the tower was built for.
        token_dim: D that the tower was built for.
        tower: name of the tower, for messages.

    Raises:
        ValueError: tokens are not floating-point numbers of shape (B, num_tokens, token_dim).
    """
    shape = tuple(tokens.shape)
    if len(shape) != 3 or shape[1:] != (num_tokens, token_dim):
        raise ValueError(
            f"{tower}: built for tokens of shape (B, {num_tokens}, {token_dim}), got {shape}; "
            "build the tower with the num_tokens and token_dim of the tokenizer that feeds it"
        )
    return widen(tokens, tower)


def widen(values: Tensor, tower: str) -> Tensor:
    """Convert half-precision values to float32; return others unchanged.

    Half precision comes from tables in half precision, or from a tokenizer under autocast. Autocast
    still computes a tower's matrix products in half precision. Residual sums and norms stay in
    float32. A norm of half-precision values with float32 gains would not use the fused kernel.

    Raises:
        ValueError: values are not floating-point numbers.
    """
    if not values.is_floating_point():
        raise ValueError(
            f"{tower}: reads vectors of floating-point numbers, got {values.dtype}; ids become "
            "vectors in the tables first"
        )
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class LayerNorm(nn.LayerNorm):
    """LayerNorm that takes float32 rows under half-precision gains: (..., D) to (..., D).

    DeepSpeed's half-precision engines keep weights in half precision, and towers keep residual sums
    in float32. torch's kernel for CPUs refuses this pair, so the gains are widened.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., D) of (..., D)."""
        wide = torch.promote_types(self.weight.dtype, input.dtype)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class GainRMSNorm(nn.RMSNorm):
    """RMSNorm that takes float32 rows under half-precision gains: (..., D) to (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) of (..., D)."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, x.dtype))
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm of rows by `normed_rows`: (..., D) to (..., D)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=RMS_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) of (..., D)."""
        return normed_rows(x) * self.weight


def normed_rows(rows: Tensor) -> Tensor:
    """Return rows (..., D) over their root mean square; a row of zeros stays 0, without gradient.

    Tokens of an empty history are zero. With epsilon 1e-12, the gradient of a plain RMSNorm at zero
    is 1e6, multiplied by every following norm.
    """
    rows = widen(rows, "rms norm")
    square = rows.square().mean(-1, keepdim=True)
    return rows * torch.where(square > 0, (square + RMS_EPS).rsqrt(), 0.0)


class PerTokenRMSNorm(nn.Module):
    """RMSNorm with separate gains per token, (T, B, D) to (T, B, D)."""

    def __init__(self, num_tokens: int, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_tokens, 1, dim))

    def forward(self, tokens_TBD: Tensor) -> Tensor:
        """Return (T, B, D) of (T, B, D)."""
        return normed_rows(tokens_TBD) * self.gain


def make_norm(kind: NormKind, dim: int, eps: float) -> nn.Module:
    """Return a norm over the last `dim` coordinates: LayerNorm, RMSNorm (with gain) or identity."""
    if kind == "layer":
        return LayerNorm(dim, eps=eps)
    if kind == "rms":
        return GainRMSNorm(dim, eps=eps)
    return nn.Identity()


def xavier_linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer with Xavier-normal weights and zero bias."""
    linear = nn.Linear(in_features, out_features, bias=bias)
    nn.init.xavier_normal_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class MLP(nn.Module):
    """Linear layers with an activation after each: (..., D) to (..., hidden_units[-1]).

    Without hidden units it is the identity.

    Args:
        in_features: input width D.
        hidden_units: output width of each layer.
        activation: applied after each layer.
        dropout: probability of dropout after each activation.
    """

    def __init__(
        self,
        in_features: int,
        hidden_units: Sequence[int],
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dropout = dropout
        self.output_dim = hidden_units[-1] if hidden_units else in_features
        widths = [in_features, *hidden_units]
        self.linears = nn.ModuleList(xavier_linear(a, b) for a, b in pairwise(widths))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., hidden_units[-1]) of (..., in_features)."""
        for linear in self.linears:
            inputs = _ACTIVATIONS[self.activation](linear(inputs))
            if self.dropout:
                inputs = functional.dropout(inputs, self.dropout, self.training)
        return inputs


class PerTokenLinear(nn.Module):
    """One linear layer per token, (T, B, in) to (T, B, out): y_t = x_t W_t + b_t.

    The token dimension comes first, as the batched product requires. `PerTokenFFN` and similar
    modules transpose their input and output once. Weights are Xavier-normal, biases zero.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self, num_tokens: int, in_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__()
        if min(num_tokens, in_features, out_features) < 1:
            raise ValueError(
                "per-token weights: tokens and widths must be positive, got "
                f"{num_tokens} tokens from width {in_features} to {out_features}; a hidden width "
                "of 0 comes from an expansion that is too small for the token width"
            )
        std = (2.0 / (in_features + out_features)) ** 0.5
        self.weight = nn.Parameter(torch.randn(num_tokens, in_features, out_features) * std)
        self.bias = nn.Parameter(torch.zeros(num_tokens, out_features)) if bias else None

    def forward(self, tokens_TBD: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return (T, B, out) of (T, B, in).

        Args:
            tokens_TBD: (T, B, in).
            slots: (T,) int64, index of the weights that each token uses; None for its own.
        """
        weight, bias = self.weight, self.bias
        if slots is not None:
            weight = weight.index_select(0, slots)
            bias = None if bias is None else bias.index_select(0, slots)
        if bias is None:
            return torch.bmm(tokens_TBD, weight)
        return torch.baddbmm(bias[:, None], tokens_TBD, weight)


class PerTokenFFN(nn.Module):
    """Per-token feed-forward (B, T, D) to (B, T, D): `act(x_t W1_t + b1_t) W2_t + b2_t`."""

    measured_as = "ffn"

    def __init__(
        self, num_tokens: int, dim: int, hidden: int, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = PerTokenLinear(num_tokens, dim, hidden)
        self.down = PerTokenLinear(num_tokens, hidden, dim)

    def forward(self, tokens_BTD: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of (B, T, D). slots: as in `PerTokenLinear`."""
        hidden = _ACTIVATIONS[self.activation](self.up(tokens_BTD.transpose(0, 1), slots))
        return self.down(hidden, slots).transpose(0, 1)


class PerTokenGLU(nn.Module):
    """Per-token gated unit on tokens-first input, (T, B, D) to (T, B, D).

    `(GELU(x W1) ⊙ x W2) W3 + x Wr` (RankElastor, equation 4). Projections of x that share a width
    are one matrix product.

    Args:
        extra_gate: use `((x Ws + GELU(x W1)) ⊙ x W2) W3 + x Wr`, the released code's unit.
    """

    measured_as = "ffn"

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        hidden: int,
        bias: bool = False,
        extra_gate: bool = False,
    ) -> None:
        super().__init__()
        self.hidden = hidden
        self.extra_gate = extra_gate
        self.lift = PerTokenLinear(num_tokens, dim, hidden * (3 if extra_gate else 2), bias)
        self.compress = PerTokenLinear(num_tokens, hidden, dim, bias)
        self.residual = PerTokenLinear(num_tokens, dim, dim, bias)
        # Initialize the fused projections as separate Xavier matrices, not as one wide matrix.
        nn.init.normal_(self.lift.weight, std=(2.0 / (dim + hidden)) ** 0.5)

    def forward(self, tokens_TBD: Tensor) -> Tensor:
        """Return (T, B, D) of (T, B, D)."""
        parts = self.lift(tokens_TBD).split(self.hidden, dim=-1)
        gate = functional.gelu(parts[0])
        if self.extra_gate:
            gate = gate + parts[2]
        return self.compress(gate * parts[1]) + self.residual(tokens_TBD)

    def to_measure(self, output_TBD: Tensor) -> Tensor:
        """Return the output as token matrices (B, T, D), for rank diagnostics."""
        return output_TBD.transpose(0, 1)


class SwiGLU(nn.Module):
    """Shared gated feed-forward `(Swish(x W1) ⊙ x W2) W3`, (..., D) to (..., D), no biases."""

    measured_as = "ffn"

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.lift = xavier_linear(dim, 2 * hidden, bias=False)
        self.compress = xavier_linear(hidden, dim, bias=False)
        nn.init.normal_(self.lift.weight, std=(2.0 / (dim + hidden)) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., D) of (..., D)."""
        gate, value = self.lift(inputs).split(self.hidden, dim=-1)
        return self.compress(functional.silu(gate) * value)
