"""TrainingConfig: what a run does, with every number explicit. All engines read this and nothing else."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Precision = Literal["fp32", "fp16", "bf16", "autocast-fp16", "autocast-bf16"]
"""fp16 and bf16 hold the parameters in 16 bits (with fp32 master copies); autocast keeps them in fp32."""


@dataclass(frozen=True)
class LossScale:
    """How a loss in fp16 is scaled, in DeepSpeed's terms."""

    dynamic: bool
    initial: float
    """First scale; the scale itself where it is static."""
    window: int
    """Steps without overflow before the scale doubles."""
    hysteresis: int
    """Overflows before the scale is halved."""
    minimum: float


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer by DeepSpeed's name, and what builds the same one in torch."""

    name: str
    params: dict[str, Any]
    """As DeepSpeed gets them."""
    torch_name: str | None
    """Class of torch.optim that computes the same update; None where torch has none."""
    torch_params: dict[str, Any]
    """Keyword arguments for that class."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.torch_params["lr"]


@dataclass(frozen=True)
class SchedulerConfig:
    """The learning-rate schedule; its steps are optimizer steps."""

    name: str
    params: dict[str, Any]


@dataclass(frozen=True)
class TrainingConfig:
    """A DeepSpeed config resolved for one world size and device. Nothing in it is 'auto' or implied."""

    path: Path
    world_size: int
    """Data-parallel ranks that the batch sizes hold for."""
    precision_requested: Precision
    precision_used: Precision
    loss_scale: LossScale | None
    """None where the run needs none (fp32, bf16)."""
    micro_batch_size: int
    """Rows per rank and forward pass."""
    accumulation_steps: int
    global_batch_size: int
    """micro_batch_size × accumulation_steps × world_size."""
    gradient_clipping: float
    """Largest norm of the gradient; 0 turns clipping off."""
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig | None
    zero_stage: int
    offload_optimizer: Literal["none", "cpu", "nvme"]
    offload_param: Literal["none", "cpu", "nvme"]
    recompute: bool
    """The file has an activation_checkpointing section: recompute every repeated block."""
    notes: tuple[str, ...]
    """One line each on what differs from the file or was filled in; to be printed once."""
    _deepspeed: dict[str, Any] = field(repr=False)

    @property
    def autocast_dtype(self) -> str | None:
        """Name of the torch dtype that layers autocast to ("float16", "bfloat16"); None without autocast."""
        return {"autocast-fp16": "float16", "autocast-bf16": "bfloat16"}.get(self.precision_used)

    @property
    def parameter_dtype(self) -> str:
        """Name of the torch dtype that the model's parameters have during the run."""
        return {"fp16": "float16", "bf16": "bfloat16"}.get(self.precision_used, "float32")

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The explicit config for ``deepspeed.initialize(config=…)``, as a copy."""
        return copy.deepcopy(self._deepspeed)
