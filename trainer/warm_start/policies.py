# SPDX-License-Identifier: MIT
"""Policies of inheritance: which part of a run's state comes from which earlier run.

A run's state has seven groups, and a policy names the source of each: `previous` (the run before),
`warmup` (the warm-up's result), `fresh`, or a path. A second epoch that begins with the tables of
the first overfits: a row that was seen once answers for that one example. So the progressive policy
of the SpecFormer paper keeps the dense part, and resets the tables to those of the warm-up at every
epoch.

  policy        embeddings and their optimizer   dense and its optimizer, loss scale   data position
  continue      previous                         previous                              previous
  naive         previous                         previous                              previous
  progressive   warmup                           previous                              previous
  fresh_tables  fresh                            previous                              previous
  nightly       previous                         previous                              fresh

`continue` and `naive` take the same state; the first goes on with a run that was cut short, the
second is the usual training for several epochs, which `progressive` is compared with.
`fresh_tables` is the remedy of Liu et al., "Multi-Epoch Learning for Deep Click-Through Rate
Prediction Models" (2023): every epoch learns tables from nothing for a dense part that knows more.
A map of ids to rows belongs to the rows: `id_maps` has the source of `embeddings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embeddings.schema.plain import suggest
from trainer.checkpoint.early_stopping import newest_or_best
from trainer.checkpoint.layout import (
    CHECKPOINTS,
    RUN,
    checkpoint_folder,
    read_manifest,
)
from trainer.checkpoint.storage import Folder, address, locate, read_bounded
from trainer.runtime.atomic_files import MAX_JSON_BYTES, parse_json
from trainer.runtime.credentials import without_credentials

Policy = Literal["continue", "naive", "progressive", "fresh_tables", "nightly"]
GROUPS = (
    *("embeddings", "embedding_optimizer", "dense", "dense_optimizer"),
    *("id_maps", "data_position", "loss_scale"),
)
_ALL = dict.fromkeys(GROUPS, "previous")
_TABLES = ("embeddings", "embedding_optimizer", "id_maps")
POLICIES: dict[str, dict[str, str]] = {
    "continue": _ALL,
    "naive": _ALL,
    "progressive": {**_ALL, **dict.fromkeys(_TABLES, "warmup")},
    "fresh_tables": {**_ALL, **dict.fromkeys(_TABLES, "fresh")},
    "nightly": {**_ALL, "data_position": "fresh"},
}


@dataclass(frozen=True, kw_only=True)
class InheritConfig:
    """What a run begins with.

    Attributes:
        path: a checkpoint, or the folder of a run (its newest): the source `previous`. Empty:
            nothing.
        warmup: the same of the warm-up: the source `warmup`.
        policy: which group comes from where.
        sources: pairs GROUP SOURCE that differ from the policy. A source is previous, warmup, fresh
            or a path.
        incompatible: what becomes of tables and weights that would mean something else than before
            (a hashed table of another size, features exchanged): an error, or a fresh start.
    """

    path: str = ""
    warmup: str = ""
    policy: Policy = "continue"
    sources: dict[str, str] = field(default_factory=dict)
    incompatible: Literal["refuse", "fresh"] = "refuse"

    def __post_init__(self) -> None:
        """Check the fields, alone and together."""
        for group in self.sources:
            if group not in GROUPS or group == "id_maps":
                known = [name for name in GROUPS if name != "id_maps"]
                raise ValueError(
                    f"inherit.sources: no group {group!r}{suggest(group, known)}; groups: {known} "
                    "(id_maps follow embeddings)"
                )
        if self.policy not in POLICIES:
            raise ValueError(f"inherit.policy: expected one of {[*POLICIES]}, got {self.policy!r}")
        used = set(self.mapping().values())
        if "previous" in used and not self.path and self.active:
            raise ValueError(
                "inherit.path: expected a checkpoint or a run's folder, got none; set it, or leave "
                "the section inherit at its defaults"
            )
        if "warmup" in used and not self.warmup:
            raise ValueError(
                f"inherit.warmup: policy {self.policy!r} takes the tables from the warm-up's run, "
                "got none; set it, or --inherit.sources embeddings fresh embedding_optimizer fresh"
            )
        if self.warmup and "warmup" not in used:
            raise ValueError(
                f"inherit.warmup: has no effect on policy {self.policy!r}; remove it, or choose "
                "'progressive'"
            )

    @property
    def active(self) -> bool:
        """Whether anything is inherited."""
        settings = (self.path, self.warmup, self.sources)
        return any(settings) or (self.policy, self.incompatible) != ("continue", "refuse")

    def mapping(self) -> dict[str, str]:
        """Return the source of every group."""
        found = {**POLICIES[self.policy], **self.sources}
        return {**found, "id_maps": found["embeddings"]}

    def paths(self) -> dict[str, Folder | None]:
        """Return the checkpoint of every group's source, None for a fresh start.

        Raises:
            ValueError: there is no complete checkpoint.
        """
        named = {"previous": self.path, "warmup": self.warmup}
        return {
            group: None if source == "fresh" else resolve(named.get(source, source))
            for group, source in self.mapping().items()
        }


def resolve(place: str | Path) -> Folder:
    """Return the checkpoint to use of a run's folder, or the checkpoint that `place` is.

    It is the best if the run has named one (early stopping), else the newest complete one.

    Args:
        place: a folder, or the URL of one. A run's folder leads to where its checkpoints are.

    Raises:
        ValueError: there is none, or the folder says that they are at an address: only addresses
            that the caller names are contacted, with the credentials that this process has.
    """
    folder = locate(place)
    places = (*_elsewhere(folder), folder / CHECKPOINTS, folder)
    chosen = next((one for one in map(newest_or_best, places) if one is not None), None)
    if chosen is None:
        read_manifest(folder, RUN)  # says what is there instead
        chosen = folder
    return chosen.resolve() if isinstance(chosen, Path) else chosen


def resolve_local(place: Path) -> Path:
    """Return what `resolve` does, for whoever needs the files themselves.

    Raises:
        ValueError: there is no checkpoint, or it is not on a disk.
    """
    found = resolve(place)
    if isinstance(found, Path):
        return found
    raise ValueError(
        f"checkpoint.folder: expected a folder on a disk, since models are kept in a store of "
        f"their own afterwards, got {found}; leave it out"
    )


def _elsewhere(folder: Folder) -> list[Folder]:
    """Return where the checkpoints of the run in `folder` are, if not in it."""
    try:
        config = parse_json(read_bounded(folder / "config.json", MAX_JSON_BYTES))
        named = config["checkpoint"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # not a run's folder; the caller names what is there
    if not named or not isinstance(named, str):
        return []
    if "://" in named and not _same_server(address(folder), named):
        raise ValueError(
            f"{folder}: its config.json has its checkpoints at {without_credentials(named)}, and "
            "an address is not contacted because a folder names it; name that address instead of "
            "the folder"
        )
    return [checkpoint_folder(folder, named)]


def _same_server(ours: str, named: str) -> bool:
    """Return whether an address leads to the file system and the bucket of one that we were given.

    The names of file systems may be chained (`filecache::s3://`), so they must be equal as a whole.
    """
    scheme, _, rest = ours.partition("://")
    return bool(rest) and (scheme, rest.partition("/")[0]) == (
        named.partition("://")[0],
        named.partition("://")[2].partition("/")[0],
    )
