# SPDX-License-Identifier: MIT
"""First-order weights in tokens, which logistic regression and factorization machines add up.

In the papers every id has a scalar weight beside its vector. Here both are one row of a table: the
first column of a field's token is the weight w, the others are the vector v. With the tokenizer's
projection `none` the token is the row itself, so this is the papers' model. With `own` (the default
of recipes, whose tables have widths of their own) w and v are linear maps of the row, one a field:
every w can still be reached, but it is not free of v where the row is narrower than the token.

A number's token is x times a learned vector, so its weight is that of the papers.

Shapes: B examples, T tokens, D token width.
"""

from __future__ import annotations

from torch import Tensor


def check_width(token_dim: int, tower: str) -> None:
    """Raise ValueError if tokens have no room for a weight and a vector."""
    if token_dim < 2:
        raise ValueError(
            f"{tower}: the first column of a token is the weight, the others are the vector; got "
            f"tokens of width {token_dim}; set model.tokenizer.token_dim to at least 2"
        )


def split(tokens_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of all weights, (B, 1), and the vectors, (B, T, D - 1)."""
    return tokens_BTD[..., 0].sum(1, keepdim=True), tokens_BTD[..., 1:]


def pairs(vectors_BTD: Tensor) -> Tensor:
    """Return the sum of the dot products of all pairs of vectors, (B, 1).

    Half of (square of the sum - sum of the squares): linear in T (Rendle 2010, lemma 3.1).
    """
    # (B, D) -> (B, 1)
    twice = vectors_BTD.sum(1).square() - vectors_BTD.square().sum(1)
    return 0.5 * twice.sum(1, keepdim=True)
