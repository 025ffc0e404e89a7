# SPDX-License-Identifier: MIT
"""Mutual information of a representation's clusters and the label, after k-means.

It answers whether representations discriminate (TokenFormer, RQ2). Examples are put into K clusters
by their representation alone. The mutual information of cluster and label is the reduction of the
label's entropy if the cluster is known. The clusters of a collapsed representation are noise, with
information near 0.

Shapes: N examples, D width, K clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def kmeans(points_ND: Tensor, num_clusters: int, num_iterations: int = 20, seed: int = 0) -> Tensor:
    """Return (N,) int64 clusters of Lloyd's algorithm from k-means++ centres.

    A cluster that loses all its points takes the point farthest from its own centre. Equal input
    and seed give equal clusters.

    Raises:
        ValueError: num_clusters is not in [1, N].
    """
    num_points = points_ND.shape[0]
    if not 1 <= num_clusters <= num_points:
        raise ValueError(
            f"kmeans: num_clusters must be between 1 and the number of points, {num_points}, got "
            f"{num_clusters}"
        )
    points = points_ND.detach().double().cpu()
    generator = torch.Generator().manual_seed(seed)
    centres = _spread(points, num_clusters, generator)
    clusters = torch.cdist(points, centres).argmin(1)
    for _ in range(num_iterations):
        counts = torch.bincount(clusters, minlength=num_clusters)
        sums = torch.zeros_like(centres).index_add_(0, clusters, points)
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], centres)
        empty = (counts == 0).nonzero()[:, 0]
        if len(empty):
            own = (points - centres[clusters]).square().sum(1)
            centres[empty] = points[own.topk(len(empty)).indices]
        moved = torch.cdist(points, centres).argmin(1)
        if torch.equal(moved, clusters):
            break
        clusters = moved
    return clusters


def mutual_information(clusters: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return I(cluster; label) and the label's entropy H, in nats.

    Both are plug-in estimates from counts. With N examples and L labels the information is biased
    upwards by about (K - 1)(L - 1) / 2N.

    Args:
        clusters: (N,) integers >= 0.
        labels: (N,) integers >= 0.
    """
    joint = torch.zeros(int(clusters.max()) + 1, int(labels.max()) + 1, dtype=torch.float64)
    ones = torch.ones(len(clusters), dtype=torch.float64)
    joint.index_put_((clusters.cpu(), labels.cpu().long()), ones, accumulate=True)
    joint /= len(clusters)

    def entropy(p: Tensor) -> float:
        return float(torch.special.entr(p).sum())

    label_entropy = entropy(joint.sum(0))
    shared = entropy(joint.sum(1)) + label_entropy - entropy(joint.flatten())
    return max(shared, 0.0), label_entropy


def _spread(points: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Return k-means++ centres: each next one drawn by its squared distance to those before."""
    first = torch.randint(len(points), (1,), generator=generator)
    chosen = [points[first[0]]]
    nearest = (points - chosen[0]).square().sum(1)
    for _ in range(num_clusters - 1):
        weights = nearest if float(nearest.sum()) > 0 else torch.ones_like(nearest)
        following = points[torch.multinomial(weights, 1, generator=generator)[0]]
        nearest = torch.minimum(nearest, (points - following).square().sum(1))
        chosen.append(following)
    return torch.stack(chosen)
