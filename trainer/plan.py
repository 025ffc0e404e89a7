# SPDX-License-Identifier: MIT
"""Plan the tables of a recipe for any number of ranks, without any of the machines.

python -m trainer.plan RECIPE --world-size 128 --device-memory 80GiB [--json] [--section.field ...]

RECIPE is a recipe's name, a schema (YAML) or a run's config.json. The command prints for each table
its sharding, ranks, memory, estimated step cost and whether it fits, and what to change where it
does not. With --json it prints the same as JSON, which `parallel.sharding.pinned_plan` reads.

The command is not beside the planner, because recipes belong to the trainer.

Exit codes: 0 everything fits; 1 something does not; 2 the configuration is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.names import check_command
from trainer.runtime.atomic_files import read_json
from trainer.runtime.printable import printable_lines
from trainer.runtime.program import Parser, program, quiet_pipe

if TYPE_CHECKING:  # imported where they are needed: --help and misspelt words are answered at once
    from embeddings.sharding.plans import Plan
    from trainer.config.config import TrainConfig

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """Return the bytes of '80GiB', '80GB' or '85899345920'.

    Raises:
        ValueError: the text is not a size, or has no unit and is below 1 MiB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    units = _UNITS | _BINARY
    if not match or match[2] not in units:
        raise ValueError(f"memory: expected a size such as 80GiB or 64GB, got {text!r}")
    number = int(float(match[1]) * units[match[2]])
    if not match[2] and number < 1 << 20:
        raise ValueError(
            f"memory: expected a size such as 80GiB or 64GB, got {text!r}, which is {number} bytes"
        )
    return number


def read_config(source: str) -> TrainConfig:
    """Return the configuration that a recipe's name, a schema or a run's config.json stands for.

    Args:
        source: the name, or the path of a .yaml or .json file.

    Raises:
        ValueError: it is none of these.
    """
    from embeddings.schema.schema import load_schema
    from trainer.config.config import TrainConfig, config_from_dict
    from trainer.recipes.load import load_recipe

    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return TrainConfig(recipe=path.name, schema=load_schema(path))
    if path.suffix == ".json":
        try:
            values = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a run's config.json, cannot read it: {error}"
            ) from error
        return config_from_dict(values)
    return load_recipe(source)


def plan_config(config: TrainConfig, world_size: int, local_world_size: int, device: str) -> Plan:
    """Plan the tables of a configuration; nothing is allocated.

    Args:
        config: whose tables to plan.
        world_size: number of ranks.
        local_world_size: number of ranks of one machine.
        device: `cuda` or `cpu`.
    """
    import torch

    from embeddings.collection import EmbeddingLayer
    from embeddings.optimizer import fuse_optimizer
    from embeddings.sharding.coalesce import unpool
    from embeddings.sharding.sharding import plan_tables

    layer = EmbeddingLayer(config.schema, torch.device("meta"), config.runtime.seed)
    if config.parallel.sharding.unpool_ids:
        layer = unpool(layer)
    # Modules are named as they are in a model, so that a run can use the plan.
    model = torch.nn.ModuleDict({"embeddings": layer})
    config.sparse.check_device(device)
    fuse_optimizer(layer, config.sparse)
    sharding = config.parallel.sharding
    topology = sharding.topology(world_size, local_world_size, device)
    batch_size = config.loader.on(world_size).batch_size
    return plan_tables(model, sharding, topology, batch_size)


def main(arguments: Sequence[str] | None = None, prog: str = "") -> int:
    """Run the command line, called as `prog`, and return its exit code."""
    parser = Parser(
        prog=prog or program("trainer.plan"),
        description="Plan tables onto ranks. Settings of the recipe follow as --section.field.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="a recipe's name, a schema.yaml or a run's config.json")
    parser.add_argument("--world-size", type=int, required=True, help="ranks in all")
    parser.add_argument("--local-world-size", type=int, default=0, help="of a machine; default 8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--device-memory", "--hbm", default="", help="of a GPU, such as 80GiB")
    parser.add_argument("--host-memory", default="", help="main memory of a rank, such as 128GiB")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    options, overrides = parser.parse_known_args(arguments)
    local = options.local_world_size or min(8, options.world_size)
    try:
        if options.world_size < 1 or local < 1 or options.world_size % local:
            raise ValueError(
                "world_size: expected a positive multiple of the ranks of a machine, got "
                f"{options.world_size} with {local}; set --local-world-size"
            )
        if Path(options.recipe).suffix not in (".yaml", ".yml", ".json"):
            check_command(options.recipe, overrides)
        from embeddings.sharding.plans import describe_plan
        from trainer.config.command_line import apply_overrides

        config = apply_overrides(read_config(options.recipe), overrides)
        memory = {
            name: parse_bytes(text)
            for name, text in (
                ("device_memory_bytes", options.device_memory),
                ("host_memory_bytes", options.host_memory),
            )
            if text
        }
        sharding = dataclasses.replace(config.parallel.sharding, **memory)
        config = dataclasses.replace(
            config, parallel=dataclasses.replace(config.parallel, sharding=sharding)
        )
        plan = plan_config(config, options.world_size, local, options.device)
    except ValueError as error:
        print(printable_lines(f"error: {error}"), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(plan.to_dict()))
    else:
        print(describe_plan(plan))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(quiet_pipe(main))
