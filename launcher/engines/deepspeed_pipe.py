"""DeepSpeed pipeline engine: 1F1B over processes, one stage each, data parallel over pipelines, ZeRO 0 or 1.

Ranks are stages × replicas, the replicas of a stage next to each other. Two stages of two replicas:

    ranks  stage     time → (F forward, B backward of a micro-batch)
    0, 1     0       F0 F1 .. B0 F2 B1 F3 B2 .. B3
    2, 3     1       .. F0 B0 F1 B1 F2 B2 F3 B3 ..

Each micro-batch of the loop is cut into the partition's chunks. The losses are computed in the last stage, and
see one chunk at a time: ITC compares the rows of one chunk of every replica.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.config.training import TrainingConfig
from launcher.engines.deepspeed_state import (
    grad_norm,
    loss_scale,
    missing_scale,
    read_tensors,
    refuse_scalars,
    write_tensors,
)
from launcher.engines.engine import MicroBatch, StepLosses, StepResult
from launcher.engines.finite import poisoned, skip_what_is_not_finite
from launcher.engines.update_state import UpdateState, deepspeed_update_state
from models.layer import Layer, set_autocast
from models.losses import Objectives
from models.partition import PartitionSpec


class DeepSpeedPipeEngine:
    """Trains the layers in DeepSpeed's ``PipelineModule``; see ``launcher.engines.engine.Engine``."""

    name = "deepspeed"

    def __init__(
        self,
        layers: Sequence[Layer],
        partition: PartitionSpec,
        config: TrainingConfig,
        objectives: Objectives,
    ) -> None:
        import deepspeed

        refuse_scalars(layers)
        self.cuts, self.rows = partition.chunks, config.micro_batch_size // partition.chunks
        self.chunks = partition.chunks * config.accumulation_steps
        if config.autocast_dtype:
            set_autocast(layers, getattr(torch, config.autocast_dtype))
        # DeepSpeed prints what it builds; standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            module = partition.to_pipeline_module(layers, loss_fn=self._loss)
        grid = module._grid
        self.stage, self.pipe_ranks = grid.get_stage_id(), grid.pp_group
        self.pipe_group = grid.get_pipe_parallel_group()
        self.data_rank, self.data_world = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
        bounds = partition.bounds_of([layer.name for layer in layers])
        self.layers = list(layers)[bounds[self.stage] : bounds[self.stage + 1]]
        self.objectives = objectives.over(grid.get_data_parallel_group())
        settings = config.deepspeed | {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.chunks,
        }
        self.deepspeed: Any = deepspeed.initialize(
            model=module,
            model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
            config=settings,
        )[0]
        _correct(self.deepspeed)
        skip_what_is_not_finite(self.deepspeed)

    def train_step(self, batches: Sequence[MicroBatch]) -> StepResult:
        """See ``Engine.train_step``; DeepSpeed divides by the number of micro-batches and of replicas."""
        engine = self.deepspeed
        lr, scale = engine.get_lr()[0], missing_scale(engine)
        self.losses = StepLosses(self.objectives, engine.device)
        engine.train_batch(self._cut(batches))
        return self.losses.result(
            lr=lr,
            grad_norm=grad_norm(engine, scale),
            loss_scale=loss_scale(engine),
            overflow=bool(getattr(engine.optimizer, "overflow", False)),
        )

    def _cut(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """DeepSpeed's (inputs, labels): the first stage takes the state, the last one targets and weight."""
        for batch in batches:
            if len(batch.state[0]) != self.rows * self.cuts:
                raise ValueError(f"{len(batch.state[0])} rows in a micro-batch of {self.rows * self.cuts}")
            states = zip(*(tensor.chunk(self.cuts) for tensor in batch.state), strict=True)
            targets = zip(*(tensor.chunk(self.cuts) for tensor in batch.targets), strict=True)
            weight = torch.tensor(batch.weight)
            yield from ((state, (*target, weight)) for state, target in zip(states, targets, strict=True))

    def _loss(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        *targets, weight = labels
        found = self.objectives(outputs, tuple(targets))
        self.losses.add(found, float(weight))
        return poisoned(found.total) * weight * missing_scale(self.deepspeed)

    @torch.no_grad()
    def evaluate(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See ``Engine.evaluate``; the state goes from stage to stage, and the last one's to all of them.

        DeepSpeed's own ``eval_batch`` keeps the buffers of the first shapes that it sends, and gives outputs
        to the last stage only.
        """
        module = self.deepspeed.module.eval()
        for stage, source in enumerate(self.pipe_ranks):
            state = self._broadcast(module(state) if stage == self.stage else state, source)
        return state

    def _broadcast(self, state: tuple[Tensor, ...], source: int) -> tuple[Tensor, ...]:
        """The ``state`` of rank ``source`` on all ranks of this pipeline."""
        mine = dist.get_rank() == source
        described = [[(tensor.shape, tensor.dtype) for tensor in state] if mine else None]
        dist.broadcast_object_list(described, source, self.pipe_group)
        if not mine:
            state = tuple(
                torch.empty(shape, dtype=dtype, device=self.deepspeed.device)
                for shape, dtype in described[0] or ()
            )
        state = tuple(tensor.contiguous() for tensor in state)
        for tensor in state:
            dist.broadcast(tensor, source, self.pipe_group)
        return state

    def named_tensors(self) -> dict[str, Tensor]:
        """See ``Engine.named_tensors``; the first replica's stages send theirs to rank 0, one at a time."""
        found = read_tensors(self.deepspeed, self.layers, keep=self.data_rank == 0)
        if self.data_rank:
            return {}
        first, device = self.pipe_ranks[0], self.deepspeed.device
        if self.stage:
            described = [(key, tensor.shape, tensor.dtype) for key, tensor in found.items()]
            dist.send_object_list([described], first)
            for tensor in found.values():
                dist.send(tensor.to(device), first)
            return {}
        for rank in self.pipe_ranks[1:]:
            coming: list[Any] = [None]
            dist.recv_object_list(coming, rank)
            for key, shape, dtype in coming[0]:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(tensor, rank)
                found[key] = tensor.cpu()
        return found

    def load_named_tensors(self, tensors: dict[str, Tensor]) -> None:
        """See ``Engine.load_named_tensors``."""
        write_tensors(self.deepspeed, self.layers, tensors)

    def update_state(self) -> UpdateState:
        """See ``Engine.update_state``."""
        return deepspeed_update_state(self.deepspeed, self.layers, self.data_rank)

    def close(self) -> None:
        """Free DeepSpeed's hooks."""
        self.deepspeed.destroy()


class _Joined:
    """The outputs of a stage as the one tensor that DeepSpeed's ``_exec_backward_pass`` takes them for."""

    def __init__(self, outputs: tuple[Tensor, ...]) -> None:
        self.outputs = [tensor for tensor in outputs if tensor.is_floating_point()]

    def backward(self, gradient: Sequence[Tensor]) -> None:
        pairs = [pair for pair in zip(self.outputs, gradient, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _correct(engine: Any) -> None:
    """Adapt DeepSpeed 0.19.8's instructions to a state of several tensors (deepspeed/runtime/pipe/engine.py).

    - It runs backward once per floating output: each recomputes the stage again, and one without gradient
      (frozen tokens beside trained ones) fails.
    - It expects a gradient of every floating input; the head, for one, uses no image tokens.
    - It reuses buffers by size alone, whatever their dtype: token ids and gradients share one.
    - Under torch.autocast in fp16 each stage would decide by itself whether to skip a step.
    """
    from deepspeed.runtime.pipe import schedule
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    instructions = dict(engine._INSTRUCTION_MAP)

    def backward_once(engine: Any, buffer_id: int) -> None:
        if not engine.is_last_stage():
            buffers = engine.pipe_buffers["outputs"]
            buffers[buffer_id] = _Joined(buffers[buffer_id])
        instructions[schedule.BackwardPass](engine, buffer_id)

    def send_all_grads(engine: Any, buffer_id: int) -> None:
        for tensor in engine.pipe_buffers["inputs"][buffer_id]:
            if tensor.is_floating_point() and tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        instructions[schedule.SendGrad](engine, buffer_id)

    engine._INSTRUCTION_MAP = instructions | {
        schedule.BackwardPass: backward_once,
        schedule.SendGrad: send_all_grads,
    }
    engine._allocate_or_extend_buffers = lambda _, shape, dtype: torch.empty(
        shape, dtype=dtype, device=engine.device
    )
    if engine.torch_autocast_z0_gradscaler:
        engine.torch_autocast_z0_gradscaler = ShardedGradScaler(
            engine.device.type, process_group=engine.grid.get_pipe_parallel_group()
        )
