"""Strategy: everything about a run that decides its memory and time, and nothing else.

The planner varies it, the simulator reads it; ``Strategy.of`` gives that of a real run's plan files.
"""

from dataclasses import dataclass, field
from typing import Literal

from launcher.config.training import Precision, TrainingConfig
from launcher.plan import TrainPlan
from models.build import layer_names
from models.spec import ModelSpec

EngineName = Literal["zero", "fairscale", "deepspeed"]


@dataclass(frozen=True)
class ZeroOptions:
    """What of DeepSpeed's ``zero_optimization`` section decides memory; sizes in elements, as in the JSON."""

    stage: int = 0
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool = False
    offload_optimizer: bool = False
    """Optimizer state in host memory (``offload_optimizer.device: cpu``)."""
    offload_param: bool = False
    prefetch_bucket_size: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


@dataclass(frozen=True)
class Strategy:
    """One way of training a model on given ranks. Hashable; equal strategies use equal memory."""

    spec: ModelSpec = field(repr=False)
    precision: Precision
    world_size: int
    """Processes: data-parallel ranks, times the stages under 1F1B (FairScale's process drives all stages)."""
    micro_batch_size: int
    """Rows per rank and forward pass, before a pipeline cuts them into chunks."""
    accumulation_steps: int
    recompute: frozenset[str] = frozenset()
    """Names of the layers that are recomputed."""
    engine: EngineName = "zero"
    bounds: tuple[int, ...] = ()
    """First layer of each stage, and the end; empty: one stage."""
    chunks: int = 1
    zero: ZeroOptions = ZeroOptions()
    optimizer: str = "AdamW"
    """The class of torch.optim that computes the update, or DeepSpeed's name where torch has none."""
    fused_optimizer: bool = True
    """On CUDA: DeepSpeed's fused kernel or torch's, which needs no temporary copies of the state."""
    gradient_clipping: float = 1.0
    device_type: Literal["cpu", "cuda"] = "cuda"
    text_length: int | None = None
    """Tokens per caption; None: the spec's."""

    @property
    def layers(self) -> list[str]:
        """Names of all layers."""
        return layer_names(self.spec)

    @property
    def length(self) -> int:
        """Tokens per caption."""
        return self.text_length or self.spec.text.length

    @property
    def stage_bounds(self) -> tuple[int, ...]:
        """``bounds``, explicit also for one stage."""
        return self.bounds or (0, len(self.layers))

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 without a pipeline."""
        return len(self.stage_bounds) - 1

    @property
    def data_world(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.stages if self.engine == "deepspeed" else self.world_size

    @property
    def rows(self) -> int:
        """Rows that pass a layer at once: the largest chunk of the micro-batch."""
        return -(-self.micro_batch_size // self.chunks)

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.data_world

    @property
    def gpus(self) -> int:
        """Devices that the strategy occupies."""
        return self.data_world * self.stages

    @classmethod
    def of(cls, plan: TrainPlan, world_size: int, device_type: Literal["cpu", "cuda"]) -> "Strategy":
        """Give the strategy of a run's plan files; ``micro_batch_size`` is that of the files."""
        config, split = plan.config, plan.partition
        piped = split is not None and plan.stages > 1
        return cls(
            spec=plan.spec,
            precision=config.precision_used,
            world_size=world_size,
            micro_batch_size=config.micro_batch_size,
            accumulation_steps=config.accumulation_steps,
            recompute=frozenset(plan.recompute),
            engine=plan.pipeline,  # type: ignore[arg-type]
            bounds=tuple(split.bounds_of(layer_names(plan.spec))) if split and piped else (),
            chunks=split.chunks if split and piped else 1,
            zero=_zero_options(config),
            optimizer=config.optimizer.torch_name or config.optimizer.name,
            fused_optimizer=device_type == "cuda" and not config.optimizer.params.get("torch_adam"),
            gradient_clipping=config.gradient_clipping,
            device_type=device_type,
        )


def _zero_options(config: TrainingConfig) -> ZeroOptions:
    """DeepSpeed's own reading of the section, so that its defaults are those of the installed version."""
    from deepspeed.runtime.zero.config import get_zero_config

    from launcher.config.known import quiet_deepspeed

    with quiet_deepspeed():
        zero = get_zero_config(config.deepspeed)
    return ZeroOptions(
        stage=config.zero_stage,
        reduce_bucket_size=int(zero.reduce_bucket_size),
        allgather_bucket_size=int(zero.allgather_bucket_size),
        contiguous_gradients=bool(zero.contiguous_gradients),
        overlap_comm=bool(zero.overlap_comm),
        offload_optimizer=config.offload_optimizer != "none",
        offload_param=config.offload_param != "none",
        prefetch_bucket_size=int(zero.prefetch_bucket_size),
        persistence_threshold=int(zero.param_persistence_threshold),
        max_live_parameters=int(zero.max_live_parameters),
        max_reuse_distance=int(zero.max_reuse_distance),
        sub_group_size=int(zero.sub_group_size),
    )
