# SPDX-License-Identifier: MIT
"""Towers as plug-ins: hooks with defaults, and settings' classes that a configuration names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.diagnostics.rank import diagnose
from models.layers import Measured
from models.tower import Tower, TowerConfig, find_tower, type_name
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormer, SpecFormerConfig, SpecFormerLayer
from models.towers.tokenformer import TokenFormerConfig


@dataclass(frozen=True, kw_only=True)
class PlainConfig(TowerConfig):
    """Settings of a tower from outside `models`."""

    def build(self, num_tokens: int, token_dim: int, /) -> Plain:
        return Plain(token_dim)


class Plain(Tower):
    """One map of every token and the mean over tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.output_dim = dim
        self.blocks = nn.ModuleList([nn.Linear(dim, dim)])
        self.mixed = Measured("mixing")

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        return self.mixed(self.blocks[0](tokens_BTD)).mean(1)


def announce(folder: Path, value: str) -> None:
    """Install a package `thirdparty` with a tower, and metadata that announce `value`."""
    (folder / "thirdparty.py").write_text(
        "from dataclasses import dataclass\n"
        "from models.tower import TowerConfig\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class TheirConfig(TowerConfig):\n    width: int = 3\n"
    )
    (folder / "thirdparty-1.dist-info").mkdir()
    (folder / "thirdparty-1.dist-info/METADATA").write_text("Name: thirdparty\nVersion: 1\n")
    points = f"[fullrank.towers]\ntheirs = {value}\n"
    (folder / "thirdparty-1.dist-info/entry_points.txt").write_text(points)


def test_a_tower_without_hooks_has_those_that_suit_any() -> None:
    tower = PlainConfig().build(3, 4)
    tower.set_progress(0.5)
    assert tower.fsdp_units() == [tower.blocks[0]]
    assert tower.describe(torch.device("cpu"), torch.float32) == []
    assert tower(torch.randn(2, 3, 4)).shape == (2, tower.output_dim)


def test_a_tower_is_measured_where_it_marks_a_tensor() -> None:
    records = diagnose(PlainConfig().build(3, 4), torch.randn(2, 3, 4))
    assert [(one.module, one.kind) for one in records] == [("inputs", "layer"), ("mixed", "mixing")]


def test_towers_of_blocks_that_run_whole_are_sharded_by_block_and_others_as_one() -> None:
    specformer = SpecFormerConfig(num_layers=2).build(3, 4)
    assert specformer.fsdp_units() == list(specformer.layers)
    assert len(RankElastorConfig(depth=3).build(3, 6).fsdp_units()) == 3
    tokenformer = TokenFormerConfig().build(3, 8)
    assert tokenformer.fsdp_units() == []
    (line,) = tokenformer.describe(torch.device("cpu"), torch.float32)
    assert line.startswith("attention on cpu in float32")


@pytest.mark.parametrize(("share", "steps"), [(0.05, 5), (0.0, 0), (1.0, 100), (0.07, 7)])
def test_specformer_warms_up_for_its_share_of_the_steps(share: float, steps: int) -> None:
    tower = SpecFormerConfig(num_layers=1, warmup=share).build(3, 4)
    assert isinstance(tower, SpecFormer)
    layer, warm = tower.layers[0], []
    assert isinstance(layer, SpecFormerLayer)
    for step in range(100):
        tower.set_progress(step / 100)
        warm.append(layer.warmup)
    assert warm == [True] * steps + [False] * (100 - steps)


def test_a_warmup_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup: expected a share in \[0, 1\], got 1\.5"):
        SpecFormerConfig(warmup=1.5)
    with pytest.raises(ValueError, match=r"needs gamma > 0, got warmup=0\.1"):
        SpecFormerConfig(gamma=0.0, warmup=0.1)


def test_towers_are_found_by_the_name_that_is_written_of_them() -> None:
    assert type_name(SpecFormerConfig) == "SpecFormerConfig"
    assert type_name(PlainConfig) == f"{__name__}:PlainConfig"
    for kind in (SpecFormerConfig, TokenFormerConfig, PlainConfig):
        assert find_tower(type_name(kind)) is kind


@pytest.mark.parametrize("name", ["SpecFormer", "StreamTowerConfig", "", None, 3, ["x"], {"a": 1}])
def test_a_name_of_no_tower_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(ValueError, match=r"expected one of .*SpecFormerConfig.*--tower package"):
        find_tower(name)


@pytest.mark.parametrize(
    "name",
    ["bombs:Tower", "bombs:TheirConfig", "bombs.deep:X", "bombs:", "os:system", "bombs:a.b"],
)
def test_a_name_in_a_file_imports_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bombs.py").write_text("raise SystemExit('imported')")
    announce(tmp_path, "thirdparty:TheirConfig")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="expected one of"):
        find_tower(name)
    assert "bombs" not in sys.modules and "thirdparty" not in sys.modules


def test_a_tower_that_an_installed_package_announces_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(tmp_path, "thirdparty:TheirConfig")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert find_tower("thirdparty:TheirConfig").__name__ == "TheirConfig"
    finally:
        sys.modules.pop("thirdparty", None)
