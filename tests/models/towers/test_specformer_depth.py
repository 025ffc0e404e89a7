# SPDX-License-Identifier: MIT
"""Deep SpecFormers train in every precision on tokens that invite collapse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.towers.specformer import SpecFormerConfig

NUM_TOKENS, DIM, BATCH = 6, 16, 16
STEPS = 6


def collapsing_tokens() -> tuple[Tensor, Tensor]:
    """(B, T, D) tokens that share one direction, with twins, constants and zeros; labels (B,)."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(BATCH, 1, DIM, generator=generator)
    tokens = shared + 1e-3 * torch.randn(BATCH, NUM_TOKENS, DIM, generator=generator)
    tokens[: BATCH // 4, 1] = tokens[: BATCH // 4, 0]
    tokens[BATCH // 4 : BATCH // 2, 2] = 1.0
    tokens[-2, 1:] = 0.0
    tokens[-1] = tokens[-1, :1]
    return tokens, (shared[:, 0, 0] > 0).float()


def train(settings: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], int]:
    """Losses of steps, and how many were skipped because fp16 gradients left its range.

    A skipped step halves the loss scale, as in training. In the other types none may be skipped.
    """
    torch.manual_seed(0)
    tower = SpecFormerConfig(ffn_ratio=1.0, **settings).build(NUM_TOKENS, DIM)
    head = torch.nn.Linear(DIM, 1)
    start, labels = collapsing_tokens()
    embeddings = torch.nn.Parameter(start)
    weights = [embeddings, *tower.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=5e-3)
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    losses, skipped = [], 0
    while len(losses) < STEPS and skipped < 10:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = head(tower(embeddings))[:, 0]
        loss = functional.binary_cross_entropy_with_logits(logits.float(), labels)
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        (scale * loss).backward()
        grads = [weight.grad for weight in weights if weight.grad is not None]
        assert len(grads) == len(weights)
        if all(torch.isfinite(grad).all() for grad in grads):
            torch._foreach_div_(grads, scale)
            optimizer.step()
            losses.append(loss.item())
        else:
            skipped, scale = skipped + 1, scale / 2
    return losses, skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_layers", [3, 5, 7, 9, 14])
def test_every_depth_learns_without_a_value_that_is_not_finite(
    num_layers: int, dtype: torch.dtype
) -> None:
    losses, skipped = train({"num_layers": num_layers, "logit_scale": "rsqrt_dim"}, dtype)
    assert skipped == 0
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"position_bias": "diagonal"},
        {"softening": "relative"},
        {"value": "softened"},
        {"through_vectors": True},
        {"score_form": "concat"},
    ],
    ids=str,
)
def test_the_literal_equations_and_their_variants_stay_finite(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    losses, skipped = train({"num_layers": 3, **settings}, dtype)
    # Relative softening lifts directions of 1e-4 σ1 a hundredfold, and their gradients with them.
    allowed = 8 if dtype == torch.float16 and settings.get("softening") == "relative" else 0
    assert skipped <= allowed
    assert losses[-1] < losses[0]


def test_an_svd_in_the_same_place_would_not_survive() -> None:
    # The witness: the same tokens, softened by an SVD under autograd.
    tokens = collapsing_tokens()[0].requires_grad_()
    u, s, vt = torch.linalg.svd(tokens, full_matrices=False)
    (u * s.sqrt()[:, None] @ vt).square().sum().backward()
    assert tokens.grad is not None and not torch.isfinite(tokens.grad).all()
