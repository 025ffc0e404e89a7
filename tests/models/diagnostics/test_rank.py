# SPDX-License-Identifier: MIT
"""Effective ranks: the published numbers, their bounds, and what a diagnosis reports."""

from __future__ import annotations

import torch

from models.baselines.tokens.rankmixer import RankMixerConfig
from models.diagnostics.rank import (
    cumulative_spectrum,
    diagnose,
    effective_rank,
    energy_share,
    gradient_energy,
    gram_singular_values,
    measure,
    singular_values,
    stable_rank,
)
from models.stream import Stream
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormerConfig
from models.towers.tokenformer import TokenFormerConfig

DOUBLE = torch.float64


def test_published_ranks_of_vector_a() -> None:
    tokens = torch.tensor([[1.0, 2, 0, -1], [0, 1, 3, 1], [2, 0, 1, 1]], dtype=DOUBLE)
    values = measure(tokens)
    assert abs(values["erank"] - 2.8915560099) < 1e-9
    assert abs(values["ferank"] - 0.9638520033) < 1e-9
    assert abs(values["stable_rank"] - 1.7081239303) < 1e-9
    attention = torch.tensor(
        [
            [0.2466456057, 0.0000762997, 0.7532780946],
            [0.9999997344, 1.441e-7, 1.215e-7],
            [0.0000112406, 0.6270953717, 0.3728933877],
        ],
        dtype=DOUBLE,
    )
    assert abs(measure(attention)["erank"] - 2.8732748702) < 1e-8


def test_singular_values_equal_the_decomposition() -> None:
    for shape in ((5, 3, 8), (5, 8, 3), (4, 4)):
        x = torch.randn(*shape, dtype=DOUBLE)
        assert torch.allclose(singular_values(x), torch.linalg.svdvals(x))


def test_a_matrix_that_is_not_finite_has_no_rank_and_spoils_no_other() -> None:
    matrices = torch.randn(3, 4, 6)
    expected = singular_values(matrices)
    matrices[1, 2, 3] = torch.inf
    sigma = singular_values(matrices)
    assert sigma[1].isnan().all()
    assert torch.allclose(sigma[[0, 2]], expected[[0, 2]], rtol=1e-5)
    assert measure(matrices)["erank"] != measure(matrices)["erank"], "NaN"


def test_stable_rank_never_exceeds_entropy_rank_nor_that_the_smaller_side() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 6, 9, dtype=DOUBLE) * torch.rand(500, 6, 1, dtype=DOUBLE) ** 4
    sigma = singular_values(x)
    assert (stable_rank(sigma) <= effective_rank(sigma) + 1e-9).all()
    assert (effective_rank(sigma) <= 6 + 1e-9).all()


def test_limits_of_full_and_collapsed_spectra() -> None:
    full, one, zero = torch.ones(4, dtype=DOUBLE), torch.eye(4, dtype=DOUBLE)[0], torch.zeros(4)
    assert torch.allclose(effective_rank(full), torch.tensor(4.0, dtype=DOUBLE))
    assert float(effective_rank(one)) == 1 and float(stable_rank(one)) == 1
    assert float(effective_rank(zero)) == 0 and float(stable_rank(zero)) == 0
    assert float(energy_share(torch.tensor([1.0, 3.0]).double(), 1)) == 0.9
    assert float(energy_share(zero, 1)) == 0


def test_specformer_diagnosis_names_layers_maps_and_learned_scalars() -> None:
    tower = SpecFormerConfig(num_layers=2).build(5, 8)
    records = diagnose(tower, torch.randn(6, 5, 8))
    found = [(record.module, record.kind) for record in records]
    layer = [("attention_map", "attention"), ("ffn", "ffn")]
    expected = [("inputs", "layer")]
    for number in range(2):
        expected += [(f"layers.{number}.{name}", kind) for name, kind in layer]
        expected.append((f"layers.{number}", "layer"))
    expected += [("layers.0", "learned"), ("layers.1", "learned")]
    assert found == expected
    for record in records[:-2]:
        assert 0 < record.values["ferank"] <= 1 + 1e-9
    assert records[-1].values["tau"] == 0.5
    assert tower.training and not any(m._forward_hooks for m in tower.modules())


def test_rankelastor_diagnosis_reports_mixing_and_feed_forward() -> None:
    for variant in ("paper", "code"):
        tower = RankElastorConfig(variant=variant, depth=1).build(5, 8)
        kinds = [record.kind for record in diagnose(tower, torch.randn(6, 5, 8))]
        assert kinds[:3] == ["layer", "mixing", "ffn"] and kinds[-1] == "layer"


def test_tokenformer_diagnosis_reports_feed_forwards_of_ragged_rows() -> None:
    tower = TokenFormerConfig(num_heads=2, windows=(6, 3)).build(3, 8)
    stream = Stream(
        torch.randn(2, 3, 8), torch.randn(5, 8), torch.tensor([0, 4, 5]), None, torch.randn(2, 1, 8)
    )
    records = diagnose(tower, stream)
    assert {record.kind for record in records} == {"ffn", "layer"}
    assert records[0].module == "layers.0.ffn"


def test_a_collapsed_representation_is_seen_as_one() -> None:
    tower = SpecFormerConfig(num_layers=1).build(5, 8)
    tokens = torch.randn(6, 1, 8).expand(6, 5, 8)
    assert diagnose(tower, tokens)[0].values["ferank"] < 0.21


def test_cumulative_spectrum_ends_at_one_and_agrees_with_energy_share() -> None:
    sigma = singular_values(torch.randn(6, 4, 7, dtype=DOUBLE))
    shares = cumulative_spectrum(sigma)
    assert len(shares) == 4
    assert abs(shares[-1] - 1.0) < 1e-12
    assert abs(shares[1] - float(energy_share(sigma, 2).mean())) < 1e-12


def test_a_collapsed_matrix_has_no_share_in_place_of_an_undefined_one() -> None:
    sigma = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert cumulative_spectrum(sigma) == (0.5 * 16 / 25, 0.5)
    assert cumulative_spectrum(sigma[:1]) == (0.0, 0.0)
    assert energy_share(sigma, 1).tolist() == [0.0, 16 / 25]
    assert stable_rank(sigma).tolist() == [0.0, 25 / 16]
    assert effective_rank(sigma)[0] == 0


def test_a_table_in_pieces_has_the_spectrum_of_the_whole() -> None:
    table = torch.randn(90, 8, dtype=DOUBLE)
    gram = sum(piece.T @ piece for piece in table.split([40, 1, 49]))
    assert torch.allclose(gram_singular_values(gram), torch.linalg.svdvals(table))


def test_gradient_energy_lies_where_the_gradient_was_put() -> None:
    left, _ = torch.linalg.qr(torch.randn(3, 5, 5, dtype=DOUBLE))
    sigma = torch.tensor([5.0, 4, 3, 2, 1], dtype=DOUBLE)
    tokens = (left * sigma) @ torch.linalg.qr(torch.randn(9, 5, dtype=DOUBLE))[0].T
    gradient = left[..., 2:3] * torch.randn(3, 1, 9, dtype=DOUBLE)
    shares = gradient_energy(tokens, gradient)
    assert torch.allclose(shares, torch.tensor([0.0, 0, 1, 0, 0], dtype=DOUBLE), atol=1e-12)
    gradient[1] = 0.0
    assert torch.allclose(gradient_energy(tokens, gradient), shares, atol=1e-12)


def test_rankmixer_is_measured_after_its_mixing_and_after_its_feed_forwards() -> None:
    tower = RankMixerConfig(num_layers=2).build(4, 8)
    records = diagnose(tower, torch.randn(6, 4, 8))
    kinds = [record.kind for record in records]
    assert kinds == ["layer", *["mixing", "ffn", "layer"] * 2]
    assert all(0.25 <= record.values["ferank"] <= 1.0 for record in records)
