# SPDX-License-Identifier: MIT
"""The towers and the layers under them need torch and nothing else."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torchrec", "fbgemm_gpu", "pyarrow", "deepspeed", "torchx"}:
            raise ModuleNotFoundError(f"{name} is not there")
        return None

sys.meta_path.insert(0, Absent())

import torch
from models.attention import attention
from models import layers
from models.diagnostics import rank
from models.spectral import spectral
from models.towers.rankelastor import RankElastorConfig
from models.towers.specformer import SpecFormerConfig
from models.spectral.spectrum import decompose
from models.stream import Stream
from models.towers.tokenformer import TokenFormerConfig

torch.manual_seed(0)
tokens = torch.randn(4, 6, 16).requires_grad_()
for config in (
    SpecFormerConfig(num_layers=2),
    SpecFormerConfig(num_layers=1, position_bias="diagonal"),
    RankElastorConfig(),
    RankElastorConfig(variant="code"),
):
    tower = config.build(6, 16)
    out = tower(tokens)
    assert out.shape == (4, tower.output_dim)
    out.square().sum().backward()
    assert rank.diagnose(tower, tokens.detach())
assert torch.isfinite(tokens.grad).all()
assert spectral.soften(tokens, 0.5, decompose(tokens))[0].shape == tokens.shape
assert layers.PerTokenFFN(6, 16, 8)(tokens).shape == tokens.shape
heads = tokens[:, None]
ours = attention.attention(heads, heads, heads, causal=True)
reference = attention.reference_attention(heads, heads, heads, causal=True)
assert torch.allclose(ours, reference, atol=1e-5)

tower = TokenFormerConfig(num_heads=2, num_actions=4).build(3, 16)
stream = Stream(
    fields=torch.randn(2, 3, 16),
    events=torch.randn(5, 16),
    offsets=torch.tensor([0, 2, 5]),
    actions=torch.tensor([0, 1, 2, 3, 0]),
    targets=torch.randn(2, 1, 16),
)
assert torch.isfinite(tower(stream)).all()
print("ran", *sorted(name for name in sys.modules if name.startswith("models.")))
"""
NAMED = (
    "attention.attention",
    "diagnostics.rank",
    "layers",
    "spectral.spectral",
    "towers.rankelastor",
    "towers.specformer",
    "towers.tokenformer",
)


def test_towers_run_where_torch_is_all_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert {f"models.{name}" for name in NAMED} <= set(done.stdout.split())


def test_the_block_in_that_test_blocks() -> None:
    program = PROGRAM.split("import torch\n")[0] + "\nimport torchrec\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "ModuleNotFoundError: torchrec is not there" in done.stderr
