# SPDX-License-Identifier: MIT
"""What a run begins with: the state of earlier runs, group by group, onto a model that may differ.

`trainer/warm_start/policies.py` says which group comes from where, `trainer/warm_start/match.py`
what of it a changed model can keep. Everything else begins fresh, and a table says what was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from embeddings.dynamic.dynamic import dynamic_parts
from embeddings.schema.schema import schema_from_dict
from trainer.checkpoint import dcp
from trainer.checkpoint.layout import RUN, read_manifest
from trainer.checkpoint.state import TrainState
from trainer.checkpoint.storage import Folder
from trainer.warm_start.match import (
    FRESH,
    INHERITED,
    RESIZED,
    Match,
    TableRule,
    layout_problem,
    match_dense,
    match_map,
    match_table,
    table_rules,
)
from trainer.warm_start.partial_load import Region, RegionPlanner
from trainer.warm_start.policies import GROUPS, InheritConfig
from trainer.warm_start.resize_dynamic import Move

_SHOWN = 12
_OF_TABLES = ("embeddings", "embedding_optimizer", "id_maps")


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """What a run begins with, for its log, its folder and its checkpoints.

    Attributes:
        sources: of each group, the checkpoint's path or `fresh`.
        matches: of every tensor, by group.
        left: tensors of the sources that are not used.
    """

    sources: dict[str, str]
    matches: dict[str, list[Match]]
    left: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "sources": self.sources,
            "tensors": {
                group: {match.name: [match.status, match.detail] for match in matches}
                for group, matches in self.matches.items()
            },
            "left": list(self.left),
        }

    def table(self) -> list[str]:
        """Return lines: counts by group, then what is not simply inherited."""
        lines = [f"{'group':<20} {'inherited':>9} {'resized':>9} {'fresh':>9}  from"]
        for group, matches in self.matches.items():
            count = Counter(match.status for match in matches)
            numbers = " ".join(f"{count[name]:>9}" for name in (INHERITED, RESIZED, FRESH))
            lines.append(f"{group:<20} {numbers}  {self.sources[group]}")
        for group in ("data_position", "loss_scale"):
            lines.append(f"{group:<20} {'':>29}  {self.sources[group]}")
        told = [
            f"{match.status} {match.name}: {match.detail}"
            for group, matches in self.matches.items()
            if not group.endswith("optimizer") and self.sources[group] != FRESH
            for match in matches
            if match.status != INHERITED
        ]
        lines += told[:_SHOWN]
        if len(told) > _SHOWN:
            lines.append(f"... and {len(told) - _SHOWN} more, all in inherit.json")
        if self.left:
            lines.append(f"left behind: {', '.join(self.left[:_SHOWN])}")
        return lines


def check_sources(config: InheritConfig, values: Mapping[str, Any]) -> None:
    """Check what can be checked before there is a model; `values` as in `inherit`.

    Raises:
        ValueError: as `inherit` would.
    """
    problems: list[Match] = []
    for group, path in config.paths().items():
        if path is None:
            continue
        source = _Source(path, values)
        if group == "embeddings":
            rules = source.rules.items()
            problems += [
                Match(name=f"table {n}", status=FRESH, problem=r.problem) for n, r in rules
            ]
        elif group == "dense":
            problems.append(Match(name="dense weights", status=FRESH, problem=source.problem))
    if config.incompatible == "refuse":
        _refuse([match for match in problems if match.problem])


def inherit(config: InheritConfig, values: Mapping[str, Any], state: TrainState) -> Inherited:
    """Fill a new run's state from its sources. Collective.

    Args:
        config: what the run begins with.
        values: the run's whole configuration as plain data.
        state: the new run's state, filled in place.

    Raises:
        ValueError: a source is no complete checkpoint or is damaged; or something would mean
            something else than before and `config.incompatible` is `refuse`.
    """
    paths = config.paths()
    tensors = state.tensors()
    random = tensors.pop("random")
    opened = {path: _Source(path, values) for path in {*paths.values()} if path is not None}
    matches: dict[str, list[Match]] = {group: [] for group in GROUPS[:4]}
    parts = {part.table.name: part for part in dynamic_parts(state.model)}
    moves: dict[str, Move] = {}
    for name, tensor in dcp.flatten(tensors):
        group = group_of(name)
        path = paths[group]
        match = Match(name=name, status=FRESH, detail="as the policy has it")
        part = parts.get(name.split(".")[-2]) if group in _OF_TABLES else None
        if part is not None and path != paths["embeddings"]:
            match = replace(match, detail="its ids come from elsewhere")
        elif path is not None:
            match = opened[path].match(group, name, tensor)
        if part is not None and match.source and path is not None:
            table = part.table.name
            move = Move(part, opened[path].rules[table].old_rows)
            moves.setdefault(table, move).add(name, match.source, tensor)
        matches.setdefault(group, []).append(match)
    if config.incompatible == "refuse":
        _refuse([match for found in matches.values() for match in found if match.problem])
    regions: dict[Folder, list[Region]] = {path: [] for path in sorted(opened, key=str)}
    for group, found in matches.items():
        for match in found:
            regions.get(paths[group] or Path(), []).extend(match.regions)
    position = paths["data_position"]
    if position is not None:
        names = {f"random.{name}": tensor for name, tensor in random.items()}
        known = {name: names[name] for name in names.keys() & opened[position].sizes}
        for name, tensor in known.items():
            regions[position].append(Region(source=name, offsets=(0,), view=tensor))
        tensors |= {"random": random} if known else {}
    for move in moves.values():
        regions[paths["embeddings"] or Path()].extend(move.regions())
    for path, wanted in regions.items():
        dcp.load({}, path, RegionPlanner(wanted), state.runtime)
    for move in moves.values():
        move.finish()
    state.put(tensors)
    return Inherited(
        sources={group: str(path or FRESH) for group, path in paths.items()},
        matches=matches,
        left=tuple(_left(opened, matches)),
    )


def group_of(name: str) -> str:
    """Return the group of a tensor of the state, by its name."""
    if name.startswith("fused."):
        return "embedding_optimizer"
    if name.startswith("dense."):
        return "dense_optimizer"
    if name.startswith("model.embeddings."):
        return "embeddings" if name.endswith(".weight") else "id_maps"
    return "dense"


class _Source:
    """A checkpoint that groups come from."""

    def __init__(self, path: Folder, values: Mapping[str, Any]) -> None:
        self.path = path
        manifest = read_manifest(path, RUN)
        old = manifest["config"]
        schemas = [schema_from_dict(part["schema"], str(path)) for part in (old, values)]
        self.rules = table_rules(schemas[0], schemas[1])
        self.problem = layout_problem(old, values)
        self.sizes = dcp.tensor_sizes(path)
        self.names = {_key(name): name for name in self.sizes}

    def match(self, group: str, name: str, tensor: Tensor) -> Match:
        """Return what becomes of a tensor of `group`."""
        source = self.names.get(_key(name))
        saved = {} if source is None else {source: self.sizes[source]}
        if group == "id_maps":
            return match_map(name, tensor, saved, self.rules[name.split(".")[-2]])
        if group in ("dense", "dense_optimizer"):
            return match_dense(name, tensor, saved, self.problem)
        table = name.split(".")[-2]
        return match_table(name, tensor, saved, self.rules.get(table, TableRule()))


def _key(name: str) -> tuple[str, ...]:
    """Return what a tensor is matched by: of a table its name and the state's, wherever it is."""
    parts = name.split(".")
    tables = name.startswith(("fused.embeddings.", "model.embeddings."))
    return (parts[0], *parts[-2:]) if tables else (name,)


def _refuse(problems: Sequence[Match]) -> None:
    """Raise a ValueError if there are problems."""
    reasons = list(dict.fromkeys(f"{match.name}: {match.problem}" for match in problems))
    if reasons:
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ValueError(
            f"inherit: {len(reasons)} tensors cannot be kept as they were: "
            f"{'; '.join(reasons[:3])}{more}; undo the change, or let them begin fresh with "
            "--inherit.incompatible fresh"
        )


def _left(opened: Mapping[Folder, _Source], matches: Mapping[str, list[Match]]) -> Iterator[str]:
    """Yield the weights of the sources that the run has no place for."""
    own = {_key(match.name) for found in matches.values() for match in found}
    seen = set()
    for source in opened.values():
        for key, name in source.names.items():
            if name.startswith("model.") and key not in own and name not in seen:
                seen.add(name)
                yield name
