# SPDX-License-Identifier: MIT
"""DLRM: the top MLP reads every token and every pair of tokens once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.baselines.fields.dlrm import DLRMConfig


def test_top_mlp_reads_tokens_and_each_pair_once() -> None:
    tower = DLRMConfig(hidden_units=(5,)).build(4, 3)
    seen: list[torch.Tensor] = []
    tower.top.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = torch.randn(2, 4, 3)
    out = tower(tokens)
    pairs = [(tokens[:, i] * tokens[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    expected = torch.cat([tokens.flatten(1), torch.stack(pairs, 1)], 1)
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert tower.output_dim == 5 and out.shape == (2, 5)
    assert isinstance(tower.top.linears[0], nn.Linear)
    assert tower.top.linears[0].in_features == 12 + 6


def test_one_token_has_no_pairs() -> None:
    assert DLRMConfig(hidden_units=(5,)).build(1, 3)(torch.randn(2, 1, 3)).shape == (2, 5)


def test_no_width_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one width"):
        DLRMConfig(hidden_units=())
