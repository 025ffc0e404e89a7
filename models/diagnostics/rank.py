# SPDX-License-Identifier: MIT
"""Effective ranks of representations, per layer and module.

The purpose of the towers is a high effective rank, so all are measured in the same way. `diagnose`
runs a tower once on a held-out batch and measures the outputs of the marked modules. It decomposes
every measured output, so it is for evaluations and too slow for a training step.

An attribute `measured_as` marks a module and gives the kind of its output: `layer`, `mixing`,
`attention` or `ffn`. `models.layers.Measured` marks a tensor that is not a module's output. A
module whose output is not (B, T, D) has a method `to_measure` that converts it. A module with
learned scalars has a method `learned` that returns them.

With p_i = σ_i / Σ σ, the entropy effective rank is exp(-Σ p_i ln p_i); divided by the largest
possible rank r it is the fractional effective rank (SpecFormer, equations 7-9). The stable rank is
‖X‖_F² / σ1² (RankElastor), never above the entropy rank. ρ(k) is the share of Σ σ² in the first k
(equation 6).

Shapes: B examples, T tokens, D token width, P rows, r = min of a matrix's sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Rows of ragged outputs that are measured; more do not change the result.
_MAX_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Measurements of one module.

    Args:
        module: path of the module in the tower.
        kind: `layer`, `mixing`, `attention`, `ffn` or `learned`.
        values: means over the batch of `erank`, `ferank`, `stable_rank`, `rho1` and `rho4`; for
            `learned` the layer's learned scalars (`tau`, `beta0`, ...).
        spectrum: ρ(1) to ρ(r), means too; empty for `learned`.
    """

    module: str
    kind: str
    values: dict[str, float]
    spectrum: tuple[float, ...] = ()


def singular_values(matrices: Tensor) -> Tensor:
    """Return (..., r) float64 singular values of (..., m, n) matrices, largest first.

    The singular values of a matrix with a non-finite element are NaN.
    """
    matrices = matrices.detach().double()
    side = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    finite = matrices.isfinite().flatten(-2).all(-1)[..., None]
    side = side.masked_fill(~finite[..., None], 0.0)
    sigma = torch.linalg.eigvalsh(side @ side.mT).flip(-1).clamp_min(0.0).sqrt()
    return sigma.masked_fill(~finite, torch.nan)


def effective_rank(sigma: Tensor) -> Tensor:
    """Return the entropy effective rank (...) of (..., r) singular values; 0 for a zero matrix."""
    total = sigma.sum(-1, keepdim=True)
    p = sigma / total.masked_fill(total == 0, 1.0)
    return torch.special.entr(p).sum(-1).exp() * (total[..., 0] > 0)


def stable_rank(sigma: Tensor) -> Tensor:
    """Return Σ σ² / σ1² (...) of (..., r) singular values; 0 for a zero matrix."""
    energy = sigma.square()
    largest = energy.amax(-1)
    return energy.sum(-1) / largest.masked_fill(largest == 0, 1.0)


def energy_share(sigma: Tensor, k: int) -> Tensor:
    """Return ρ(k) (...), the share of Σ σ² in the k largest of (..., r) singular values."""
    energy = sigma.square().sort(dim=-1, descending=True).values
    total = energy.sum(-1)
    return energy[..., :k].sum(-1) / total.masked_fill(total == 0, 1.0)


def cumulative_spectrum(sigma: Tensor) -> tuple[float, ...]:
    """Return ρ(1) to ρ(r) of (..., r) singular values, means over (...)."""
    energy = sigma.square().sort(dim=-1, descending=True).values
    total = energy.sum(-1, keepdim=True)
    shares = energy.cumsum(-1) / total.masked_fill(total == 0, 1.0)
    return tuple(shares.reshape(-1, shares.shape[-1]).mean(0).tolist())


def gram_singular_values(gram: Tensor) -> Tensor:
    """Return (D,) singular values, largest first, of a matrix X from its XᵀX (D, D).

    XᵀX is a sum over rows, so it can be computed for a table whose rows are on several ranks.
    """
    return torch.linalg.eigvalsh(gram.double()).flip(-1).clamp_min(0.0).sqrt()


def gradient_energy(tokens_BTD: Tensor, gradient_BTD: Tensor) -> Tensor:
    """Return (r,) shares of the gradient's energy along the tokens' left singular vectors.

    With H = U Σ Vᵀ and G = dL/dH of an example, the share of direction i is ‖u_iᵀ G‖² / ‖G‖². The
    result is the mean over examples with a non-zero gradient. If the shares sum to less than 1, the
    rest is outside the tokens' column space.

    Args:
        tokens_BTD: (B, T, D), H of every example.
        gradient_BTD: (B, T, D), G of every example.
    """
    left = torch.linalg.svd(tokens_BTD.detach().double(), full_matrices=False).U
    energy = (left.mT @ gradient_BTD.double()).square().sum(-1)
    total = gradient_BTD.double().square().sum((-2, -1))
    return (energy / total[:, None])[total > 0].mean(0)


def measure(matrices: Tensor) -> dict[str, float]:
    """Return `erank`, `ferank`, `stable_rank`, `rho1`, `rho4` of (..., m, n), means over (...)."""
    return measure_spectrum(singular_values(matrices))


def measure_spectrum(sigma: Tensor) -> dict[str, float]:
    """Return what `measure` does, of (..., r) singular values."""
    rank = effective_rank(sigma)
    return {
        "erank": float(rank.mean()),
        "ferank": float(rank.mean() / sigma.shape[-1]),
        "stable_rank": float(stable_rank(sigma).mean()),
        "rho1": float(energy_share(sigma, 1).mean()),
        "rho4": float(energy_share(sigma, 4).mean()),
    }


@torch.no_grad()
def diagnose(tower: nn.Module, inputs: Any) -> list[RankRecord]:
    """Run `tower` on `inputs` (tokens (B, T, D) or a Stream) and measure it module by module.

    Token matrices (B, T, D) and attention maps (B, T, T) are measured per example. Packed rows
    (P, D) of ragged streams are measured as one matrix. The tower's mode and weights are unchanged.

    Args:
        tower: the model part to measure.
        inputs: tokens (B, T, D), or a Stream.

    Returns:
        The record of the inputs, if they are tokens; then records in order of execution; then one
        `learned` record for each layer with learned scalars.
    """
    records: list[RankRecord] = []
    if isinstance(inputs, Tensor):
        records.append(_record("inputs", "layer", inputs))
    handles = []
    was_training = tower.training
    tower.eval()
    try:
        for path, module in tower.named_modules():
            kind = getattr(module, "measured_as", None)
            if kind is not None:
                handles.append(module.register_forward_hook(_recorder(path, kind, records)))
        tower(inputs)
    finally:
        for handle in handles:
            handle.remove()
        tower.train(was_training)
    for path, module in tower.named_modules():
        learned = getattr(module, "learned", None)
        if learned is not None and (values := learned()):
            records.append(RankRecord(module=path, kind="learned", values=values))
    return records


def _recorder(
    path: str, kind: str, records: list[RankRecord]
) -> Callable[[nn.Module, Any, Tensor], None]:
    """Return a forward hook that appends the measurements of the module's output."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        to_measure = getattr(module, "to_measure", None)
        if to_measure is not None:
            output = to_measure(output)
        if output.dim() == 2:
            output = output[:_MAX_ROWS]
        if output.numel() and torch.isfinite(output).all():
            records.append(_record(path, kind, output))

    return hook


def _record(path: str, kind: str, matrices: Tensor) -> RankRecord:
    sigma = singular_values(matrices)
    return RankRecord(
        module=path,
        kind=kind,
        values=measure_spectrum(sigma),
        spectrum=cumulative_spectrum(sigma),
    )
