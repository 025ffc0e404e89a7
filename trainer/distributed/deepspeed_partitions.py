# SPDX-License-Identifier: MIT
"""A DeepSpeed engine's partitions as whole tensors by name, and back.

ZeRO keeps FP32 weights and optimizer states in flat partitions, a share on every rank, cut without
regard to where a weight begins. Checkpoints hold whole tensors by name, so that what was saved
under one choice of parallelism can be read under any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# What Adam keeps beside its count of steps.
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Partitions:
    """The dense weights that an engine of stage 1, 2 or 3 holds on this rank.

    Args:
        holder: the engine's optimizer.
        optimizer: the AdamW inside it.
        parameters: the dense weights by name.
        shapes: their shapes before partitioning, by name.
    """

    def __init__(
        self,
        holder: Any,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._holder, self._optimizer, self._shapes = holder, optimizer, shapes
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._whole = not hasattr(holder, "fp32_partitioned_groups_flat")  # stage 1 or 2
        # Before any step: the engine links weights to states when it has stepped the first group,
        # and would miss those of the others.
        self._create_states()

    @property
    def flats(self) -> list[nn.Parameter]:
        """This rank's flat FP32 partitions."""
        holder = self._holder
        if self._whole:
            return holder.single_partition_of_fp32_groups
        return holder.fp32_partitioned_groups_flat

    def gradients(self) -> list[Tensor]:
        """Return this rank's share of the gradients, between backward and step."""
        offloads = self._holder.cpu_offload if self._whole else self._holder.offload_optimizer
        if offloads:
            if self._whole:
                self._holder._wait_for_offload_copies()
            return [flat.grad for flat in self.flats if flat.grad is not None]
        groups = self._holder.averaged_gradients.values()
        return [part for group in groups for part in group or () if part is not None]

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return every weight whole, in FP32. Collective."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, weight in self._trained.items():
            value = safe_get_full_fp32_param(weight)
            assert value is not None
            found[name] = value.view(self._shapes[name])
        for name, weight in self._frozen.items():
            with GatheredParameters([weight]):
                found[name] = weight.detach().clone()
        return found

    @torch.no_grad()
    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's states whole, by weight. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._optimizer.state[self.flats[0]]["step"]
        found: dict[str, dict[str, Tensor]] = {}
        for name, weight in self._trained.items():
            found[name] = {"step": step.clone()}
            for key in _MOMENTS:
                value = safe_get_full_optimizer_state(weight, key)
                assert value is not None
                found[name][key] = value.view(self._shapes[name])
        return found

    @torch.no_grad()
    def put(
        self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]
    ) -> set[str]:
        """Take over whole weights and states, each rank its share; return the weights' names."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
        from deepspeed.utils.tensor_fragment import (
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        for name, weight in self._trained.items():
            moments = {key: states[name][key] for key in _MOMENTS}
            if self._whole:
                safe_set_full_fp32_param(weight, weights[name])
                for key, value in moments.items():
                    safe_set_full_optimizer_state(weight, value, key)
            else:
                safe_set_local_fp32_param(weight, _share(weight, weights[name]))
                for key, value in moments.items():
                    safe_set_local_optimizer_state(weight, _share(weight, value), key)
        for name, weight in self._frozen.items():
            with GatheredParameters([weight], modifier_rank=0):
                weight.copy_(weights[name])
        step = max(float(states[name]["step"]) for name in self._trained)
        for flat in self.flats:
            self._optimizer.state[flat]["step"].fill_(step)
        self._spread()
        return {*self._trained, *self._frozen}

    def _spread(self) -> None:
        """Give the weights that compute the values of the FP32 partitions."""
        holder = self._holder
        if self._whole:
            holder.update_lp_params()
            return
        for number in range(len(self.flats)):
            holder._reassign_or_swap_out_partitioned_parameters(number)
        kept = holder.persistent_parameters
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    def _create_states(self) -> None:
        """Create what the optimizer's first step would create."""
        for flat in self.flats:
            state = self._optimizer.state[flat]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
                for key in _MOMENTS:
                    state[key] = torch.zeros_like(flat)
        if self._whole:
            self._holder._lazy_init_hp_params_optimizer_state()


def _share(weight: Any, value: Tensor) -> Tensor:
    """Return this rank's share of a stage-3 weight's whole value, padded as the engine pads."""
    size = weight.ds_tensor.numel()
    start = size * dist.get_rank()
    part = value.flatten()[start : start + size]
    return torch.cat([part, part.new_zeros(size - part.numel())])
