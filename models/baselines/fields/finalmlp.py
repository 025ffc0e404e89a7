# SPDX-License-Identifier: MIT
"""FinalMLP: two perceptrons that read differently gated features, joined by bilinear forms.

Source: Mao et al., FinalMLP, AAAI 2023, equations 3-10. For the concatenated embeddings e, stream
i = 1, 2 reads

    h_i = 2σ(MLP_gate,i(x_i)) ⊙ e,   o_i = MLP_i(h_i),

where x_i is a learned vector, or the embeddings of some fields. With o_i cut into k parts

    ŷ = σ(b + w_1ᵀ o_1 + w_2ᵀ o_2 + Σ_j o_{1j}ᵀ W_j o_{2j}).

The tower returns [o_1, o_2, Σ_j ...]; the head without hidden layers is b, w_1 and w_2. Its factor
on the sum of the bilinear forms is one number more than the paper has; several tasks share W_j.
Left open: initial values (Xavier here, learned x_i start at 0), activation of the gate's hidden
layer (ReLU here), batch norms (none here).

Shapes: B examples, T tokens, D token width, N = T·D, P parts, A and C widths of a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.layers import MLP, read_tokens, xavier_linear
from models.tower import Tower, TowerConfig


@dataclass(frozen=True, kw_only=True)
class FinalMLPConfig(TowerConfig):
    """FinalMLP's settings.

    Args:
        hidden_units1: widths of the first perceptron.
        hidden_units2: widths of the second perceptron.
        num_heads: k, parts of the streams' outputs; 1 is one bilinear form.
        gate_units: widths of the gates' hidden layers; () leaves the gates out.
        gate1: numbers of the tokens that the first gate reads, from 0; () for a learned vector.
        gate2: the same of the second gate.
        dropout: probability, in both perceptrons.
    """

    hidden_units1: tuple[int, ...] = (400,)
    hidden_units2: tuple[int, ...] = (400,)
    num_heads: int = 10
    gate_units: tuple[int, ...] = (64,)
    gate1: tuple[int, ...] = ()
    gate2: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        widths = (self.hidden_units1[-1:], self.hidden_units2[-1:])
        if not all(widths) or self.num_heads < 1 or any(w[0] % self.num_heads for w in widths):
            raise ValueError(
                "finalmlp: both perceptrons need a last width that num_heads (at least 1) divides; "
                f"got {self.hidden_units1}, {self.hidden_units2} and {self.num_heads}"
            )
        if (self.gate1 or self.gate2) and not self.gate_units:
            raise ValueError(
                "finalmlp: gate1 and gate2 have no effect without gate_units; got "
                f"{self.gate1} and {self.gate2}"
            )

    def build(self, num_tokens: int, token_dim: int) -> FinalMLP:
        """Return the tower for (B, num_tokens, token_dim) tokens.

        Raises ValueError if a gate is to read a token that there is not.
        """
        for gate in (self.gate1, self.gate2):
            if any(not 0 <= token < num_tokens for token in gate):
                raise ValueError(
                    f"finalmlp: gates read tokens 0 to {num_tokens - 1} here, got {gate}"
                )
        return FinalMLP(self, num_tokens, token_dim)


class FinalMLP(Tower):
    """Two gated perceptrons and their bilinear forms: (B, T, D) to (B, output_dim)."""

    def __init__(self, config: FinalMLPConfig, num_tokens: int, token_dim: int) -> None:
        super().__init__()
        self.num_tokens, self.token_dim, self.num_heads = num_tokens, token_dim, config.num_heads
        width = num_tokens * token_dim
        self.gate1 = self.gate2 = None
        if config.gate_units:
            self.gate1 = Gate(config.gate1, config.gate_units, token_dim, width)
            self.gate2 = Gate(config.gate2, config.gate_units, token_dim, width)
        self.first = MLP(width, config.hidden_units1, dropout=config.dropout)
        self.second = MLP(width, config.hidden_units2, dropout=config.dropout)
        rows, columns = (one.output_dim // self.num_heads for one in (self.first, self.second))
        start = torch.randn(self.num_heads, rows, columns) * (2 / (rows + columns)) ** 0.5
        self.bilinear = nn.Parameter(start)  # (P, A, C)
        self.output_dim = self.first.output_dim + self.second.output_dim + 1

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return (B, output_dim) of (B, T, D)."""
        tokens_BTD = read_tokens(tokens_BTD, self.num_tokens, self.token_dim, "finalmlp")
        first_BN = second_BN = tokens_BTD.flatten(1)
        if self.gate1 is not None and self.gate2 is not None:
            first_BN, second_BN = (
                first_BN * self.gate1(tokens_BTD),
                second_BN * self.gate2(tokens_BTD),
            )
        first, second = self.first(first_BN), self.second(second_BN)
        first_PBA, second_PBC = (
            one.unflatten(1, (self.num_heads, -1)).transpose(0, 1) for one in (first, second)
        )
        joined = ((first_PBA @ self.bilinear) * second_PBC).sum((0, 2))  # (B,)
        return torch.cat([first, second, joined[:, None].to(first.dtype)], dim=1)


class Gate(nn.Module):
    """2σ(MLP(x)) of chosen tokens or of a learned vector: (B, T, D) to (B, N) or (1, N)."""

    def __init__(
        self, tokens: tuple[int, ...], hidden: tuple[int, ...], token_dim: int, width: int
    ) -> None:
        super().__init__()
        self.tokens = list(tokens)
        self.learned = None if tokens else nn.Parameter(torch.zeros(1, token_dim))
        self.hidden = MLP(max(1, len(tokens)) * token_dim, hidden)
        self.output = xavier_linear(self.hidden.output_dim, width)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """Return factors (B, N) around 1; (1, N) of a learned vector."""
        chosen = self.learned
        if chosen is None:
            chosen = tokens_BTD[:, self.tokens].flatten(1)
        return 2 * self.output(self.hidden(chosen)).sigmoid()
