"""What an engine updates weights with, in a form that no engine, ZeRO stage or world size shapes.

An optimizer keeps its moments in tensors as long as what it updates: a parameter, a fp32 master, or a flat
partition of many parameters. A *fragment* says which part of which parameter lies where in such a tensor:

    ZeRO 0, FairScale     fragment = the whole parameter, on every rank
    ZeRO 1 and 2, OSS     fragment = what of it lies in this rank's partition
    ZeRO 3                fragment = this rank's shard of it

So a rank writes its own fragments, and a rank of any other world reads those that overlap with its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import UserError
from models.layer import Layer


@dataclass(frozen=True)
class Fragment:
    """``length`` elements of parameter ``key``, from ``start`` on, at ``offset`` of the optimizer's ``owner``."""

    key: str
    """``layer/parameter``."""
    start: int
    length: int
    owner: Tensor
    offset: int


@dataclass
class UpdateState:
    """The optimizer, schedule and loss scale of one rank's part of the model."""

    optimizer: torch.optim.Optimizer
    """Holds the moments."""
    groups: list[dict[str, Any]]
    """Parameter groups whose learning rate counts."""
    fragments: list[Fragment]
    writes: bool
    """False where another rank has the same fragments."""
    scheduler: Any = None
    scalers: list[Any] = field(default_factory=list)
    """Objects that hold the loss scale and its counters as plain attributes."""
    counters: Any = None
    """DeepSpeed's engine, which counts steps."""

    def moments(self) -> Iterator[tuple[Fragment, str, Tensor]]:
        """Give each fragment's part of each of the optimizer's tensors (``exp_avg``, …)."""
        for fragment in self.fragments:
            for name, value in self.optimizer.state.get(fragment.owner, {}).items():
                if not isinstance(value, Tensor) or name == "step":
                    continue
                if value.numel() != fragment.owner.numel():
                    raise UserError(
                        f"optimizer {type(self.optimizer).__name__}: its '{name}' has not the size of what it "
                        "updates, so a checkpoint cannot hold it; use Adam, AdamW, Lion or SGD"
                    )
                yield fragment, name, value.view(-1)[fragment.offset : fragment.offset + fragment.length]

    def allocate(self, names: Sequence[str], step: float) -> None:
        """Make room for moments of these names, as the optimizer's first step would."""
        of_torch = type(self.optimizer).__module__.startswith("torch.")
        for owner in {id(fragment.owner): fragment.owner for fragment in self.fragments}.values():
            state = self.optimizer.state[owner]
            for name in names:
                if not isinstance(state.get(name), Tensor):
                    state[name] = torch.zeros_like(owner, requires_grad=False)
            if names:
                # torch counts in a tensor, DeepSpeed's optimizers in an int
                state["step"] = torch.tensor(float(step)) if of_torch else int(step)

    def steps_taken(self) -> float:
        """How often the optimizer has updated: what Adam corrects its bias by."""
        return max((float(state.get("step", 0)) for state in self.optimizer.state.values()), default=0.0)


def deepspeed_update_state(engine: Any, layers: Sequence[Layer], data_rank: int) -> UpdateState:
    """Read where DeepSpeed 0.19 keeps the moments of ``layers``; it depends on precision and ZeRO stage."""
    optimizer = engine.optimizer
    inner = engine.basic_optimizer
    found: list[Fragment] = []
    whole = _whole_owners(optimizer)
    sharded = False
    for layer in layers:
        for key, parameter in layer.module.named_parameters():
            if not parameter.requires_grad:
                continue
            name = f"{layer.name}/{key}"
            if hasattr(parameter, "ds_id"):
                sharded = True
                found += _shard_of_stage_3(optimizer, parameter, name)
            elif hasattr(parameter, "_hp_mapping"):
                sharded = True
                if parameter._hp_mapping is not None:
                    found.append(_part_of_stage_1_or_2(optimizer, parameter._hp_mapping, name))
            else:
                owner, offset = whole.get(id(parameter), (parameter, 0))
                found.append(Fragment(name, 0, parameter.numel(), owner, offset))
    scalers = [
        getattr(optimizer, "loss_scale_config", None),
        getattr(optimizer, "loss_scaler", None),
        engine.torch_autocast_z0_gradscaler,
    ]
    return UpdateState(
        inner,
        optimizer.param_groups,
        found,
        writes=sharded or data_rank == 0,
        scheduler=engine.lr_scheduler,
        scalers=[scaler for scaler in scalers if scaler],
        counters=engine,
    )


def _shard_of_stage_3(optimizer: Any, parameter: Any, name: str) -> list[Fragment]:
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    owner = optimizer.fp32_partitioned_groups_flat[group]
    size = parameter.ds_tensor.numel()
    start = dist.get_rank(parameter.ds_process_group) * size
    length = min(size, parameter.ds_numel - start)  # the last shard is padded
    return [Fragment(name, start, length, owner, offset)] if length > 0 else []


def _part_of_stage_1_or_2(optimizer: Any, mapping: Any, name: str) -> Fragment:
    # BF16_Optimizer and DeepSpeedZeroOptimizer name the same thing differently
    partitions = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if partitions is None:
        partitions = optimizer.fp32_groups_flat_partition
    return Fragment(
        name,
        mapping.lp_fragment_address.start,
        mapping.hp_fragment_address.numel,
        partitions[mapping.param_group_index],
        mapping.hp_fragment_address.start,
    )


def _whole_owners(optimizer: Any) -> dict[int, tuple[Tensor, int]]:
    """(master, offset in it) by ``id`` of the parameter, for 16 bits at stage 0; see ``deepspeed_state``."""
    owners: dict[int, tuple[Tensor, int]] = {}
    groups = getattr(optimizer, "fp16_groups", [])
    if hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(groups, optimizer.fp32_groups, strict=True):
            owners |= {id(p): (master, 0) for p, master in zip(group, masters, strict=True)}
    elif hasattr(optimizer, "fp32_groups_flat"):
        for group, flat in zip(groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for parameter in group:
                owners[id(parameter)] = (flat, offset)
                offset += parameter.numel()
    return owners
