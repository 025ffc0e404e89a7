# SPDX-License-Identifier: MIT
"""Parts of a checkpoint's tensors, read into parts of a run's tensors.

torch.distributed.checkpoint fills tensors of the names and sizes that were saved. What a run
inherits may have grown, moved or been renamed since; a region says which block of which saved
tensor belongs where, and each rank reads the bytes of its own regions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainer.checkpoint.dcp_files import TensorsOnly


@dataclass(frozen=True, kw_only=True)
class Region:
    """The block of the saved tensor `source` that begins at `offsets` and has `view`'s shape.

    Attributes:
        source: name of the saved tensor.
        offsets: where the block begins.
        view: where it goes, a view of a tensor of this rank.
    """

    source: str
    offsets: tuple[int, ...]
    view: Tensor


class RegionPlanner(TensorsOnly, LoadPlanner):
    """Plans the reads of this rank's regions."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take note of what the checkpoint holds."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the reads that fill the regions, each of which may be cut in several."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for number, region in enumerate(self._regions):
            if not region.view.numel():
                continue
            saved: Any = self._metadata.state_dict_metadata[region.source]
            chunk = ChunkStorageMetadata(torch.Size(region.offsets), region.view.shape)
            items += [
                dataclasses.replace(item, dest_index=MetadataIndex(str(number)))
                for item in create_read_items_for_chunk_list(region.source, saved, [chunk])
            ]
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan as it is."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return where a read goes."""
        view = self._regions[int(read_item.dest_index.fqn)].view
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the read went into its place."""
