# SPDX-License-Identifier: MIT
"""The folder of a run: claimed once, resumed if it is unfinished, never overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint import complete
from trainer.config import TrainConfig, to_dict, write_config
from trainer.runtime import Runtime

CONFIG = "config.json"
METRICS = "metrics.json"
CURVES = "curves.jsonl"
RANKS = "ranks.json"
CHECKPOINTS = "checkpoints"
# What may differ between a run and its continuation: it changes no result.
_FREE = ("log", "checkpoint")


def claim(output: Path, config: TrainConfig, runtime: Runtime) -> Path | None:
    """Decide, once for all ranks, what `output` is; return the checkpoint to resume from, if any.

    Rank 0 looks and writes config.json; the others are told, so that no two ranks see different
    states.

    Raises:
        ValueError: the folder holds a finished run, a run of another configuration, or other files.
    """
    answer: list[Any] = [None, None]
    if runtime.is_first:
        try:
            answer[0] = _claim(output, config)
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    checkpoint, error = answer
    if error:
        raise ValueError(error)
    return checkpoint


def _claim(output: Path, config: TrainConfig) -> Path | None:
    """Look at `output` and write config.json. See `claim`."""
    if output.exists() and not output.is_dir():
        raise ValueError(
            f"{output}: expected a folder for the run, got a file; choose another --output"
        )
    if (output / METRICS).exists():
        raise ValueError(
            f"{output}: holds a finished run, which is never overwritten; choose another --output, "
            f"or read it with `python -m trainer.evaluate {output} --data PATH`"
        )
    if (output / CONFIG).exists():
        differences = _differences(
            json.loads((output / CONFIG).read_text("utf-8")), to_dict(config)
        )
        if differences:
            raise ValueError(
                f"{output}: holds an unfinished run of another configuration "
                f"({'; '.join(differences[:5])}); resume it with the same settings, or choose "
                "another --output"
            )
        found = complete(output / CHECKPOINTS)
        return found[-1] if found else None
    if output.exists() and any(output.iterdir()):
        raise ValueError(
            f"{output}: is not empty and holds no run ({CONFIG} is missing); choose another "
            "--output"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_config(config, output / CONFIG)
    return None


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return 'path: old value, now new value' for settings that differ and matter."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted({*old, *new}):
            if path or key not in _FREE:
                found += _differences(old.get(key), new.get(key), f"{path}{key}.")
        return found
    return [] if old == new else [f"{path.rstrip('.')}: {old!r}, now {new!r}"]
