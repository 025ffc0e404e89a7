# SPDX-License-Identifier: MIT
"""What `--parallel.compile` gains: a tower's step as it is written against the same compiled.

    python -m tests.benchmarks.compile [--recipes dlrm.demo ...] [--batch-size 256] [--rounds 7]

Forward and backward of a recipe's tower on random tokens, float32; on a CPU in one thread. For
stream towers every batch has other lengths of histories. A line a recipe: how many times as long
the tower takes as it is written (medians of ratios within a round, quartiles), how long compiling
took, how many graphs it made, how many were made after the first batches (0, or the shapes are
compiled anew), and the largest relative difference of an output.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from models.ranking import RankingModel
from models.stream import Stream
from models.tokens import StreamTokenizer
from tests.benchmarks.timing import interleave, single_threaded
from trainer.distributed.compile import compile_tower, num_graphs, uncompiled
from trainer.recipes.load import load_recipe

RECIPES = (
    "dlrm.demo",
    "rankelastor.demo",
    "specformer.demo",
    "tokenformer.demo",
    "hstu.demo",
    "onetrans.demo",
    "rankmixer.demo",
)
_BATCHES = 4


def batch(model: RankingModel, size: int, seed: int, device: torch.device) -> Any:
    """Return what the tower of `model` reads of `size` examples."""
    torch.manual_seed(seed)
    tokenizer: Any = model.tokenizer
    width = tokenizer.token_dim
    if not isinstance(tokenizer, StreamTokenizer):
        return torch.randn(size, tokenizer.num_tokens, width, device=device)
    config: Any = model.tower.config
    lengths = torch.randint(0, config.max_length + 1, (size,))
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    actions = torch.randint(0, config.num_actions, (total,)) if config.num_actions else None
    return Stream(
        fields=torch.randn(size, tokenizer.num_fields, width, device=device),
        events=torch.randn(total, width, device=device),
        offsets=offsets.to(device),
        actions=None if actions is None else actions.to(device),
        targets=torch.randn(size, 1, width, device=device),
    )


def step(tower: nn.Module, inputs: Any) -> Tensor:
    """Run forward and backward; return the output."""
    tower.zero_grad()
    output = tower(inputs)
    output = output if isinstance(output, Tensor) else output.targets
    output.square().mean().backward()
    return output.detach()


def measure(recipe: str, size: int, rounds: int, device: torch.device) -> str:
    """Return the line of one recipe."""
    torch._dynamo.reset()
    config = load_recipe(recipe)
    model = RankingModel(config.schema, config.model, torch.device("meta"), 0)
    tower = model.tower.to(device)
    batches = [batch(model, size, seed, device) for seed in range(_BATCHES)]
    expected = [step(tower, one) for one in batches]
    before, began = num_graphs(), time.perf_counter()
    compile_tower(tower, ragged=isinstance(model.tokenizer, StreamTokenizer))
    found = [step(tower, one) for one in batches[:2]]
    seconds, warm = time.perf_counter() - began, num_graphs()
    found += [step(tower, one) for one in batches[2:]]
    pairs = zip(found, expected, strict=True)
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)

    def written() -> None:
        with uncompiled(True):
            for one in batches:
                step(tower, one)

    def compiled() -> None:
        for one in batches:
            step(tower, one)

    times = interleave({"written": written, "compiled": compiled}, rounds=rounds, device=device)
    return (
        f"{recipe:<20} {times.ratio('written', 'compiled')}x  compiled in {seconds:.0f} s, "
        f"{warm - before} graphs, {num_graphs() - warm} more later; off by {error:.0e}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="compiled towers against written ones")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7, help="at least 7")
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    single_threaded()
    print(f"torch {torch.__version__} on {device}, batches of {words.batch_size}")
    for recipe in words.recipes:
        print(measure(recipe, words.batch_size, words.rounds, device), flush=True)


if __name__ == "__main__":
    main()
