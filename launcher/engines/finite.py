"""Steps whose loss or gradients are not finite are skipped, whatever the engine, precision and ZeRO stage.

What DeepSpeed 0.19.8 does by itself with gradients that are not finite:

    fp16, stages 0 to 3                       skips, and lowers the loss scale; at its minimum it raises Exception
    stage 3; fp32 and autocast at 1 and 2     skips
    bf16 at stage 0; at stage 1 through BF16_Optimizer   skips
    bf16 at stages 1 and 2                    takes the step, unless bf16.check_grad_overflow
    fp32 and autocast at stage 0              takes the step; with torch's GradScaler it skips, but moves the schedule
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def poisoned(loss: Tensor) -> Tensor:
    """The loss itself, bit by bit; of one that is not finite, all gradients are NaN.

    So that gradients alone decide, and all ranks that share them decide alike.
    """
    value = loss.detach()
    return loss * (value - value + 1)  # inf - inf is NaN


def skip_what_is_not_finite(engine: Any) -> None:
    """Make a DeepSpeed engine skip such a step, and say so in ``engine.optimizer.overflow``."""
    optimizer = engine.optimizer
    scaler: Any = getattr(optimizer, "loss_scaler", None)
    if hasattr(scaler, "raise_error_at_min_scale"):
        scaler.raise_error_at_min_scale = False  # the run stops with advice: launcher.skipped_steps
    if getattr(optimizer, "dtype", None) is torch.bfloat16 and hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_grad_overflow = True
        if optimizer.compute_grad_norm:
            # The norm of the same gradients is looked at next; this would read them all once more.
            optimizer.check_overflow = lambda partition_gradients=True: None
    if not hasattr(optimizer, "overflow"):
        _guard_plain_optimizer(engine)


def _guard_plain_optimizer(engine: Any) -> None:
    """The same for an optimizer that DeepSpeed does not wrap (stage 0 in fp32 and under autocast)."""
    optimizer = engine.optimizer
    take_model_step, take_step = engine._take_model_step, optimizer.step

    def step(*arguments: Any, **options: Any) -> Any:
        optimizer.overflow = not _finite_everywhere(optimizer)
        return None if optimizer.overflow else take_step(*arguments, **options)

    def model_step(*arguments: Any) -> None:
        optimizer.overflow = True  # torch's GradScaler does not even call the optimizer then
        take_model_step(*arguments)

    optimizer.overflow = False
    optimizer.step, engine._take_model_step = step, model_step


def _finite_everywhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all gradients are finite, on all ranks: the stages of a pipeline have different ones."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    wrong = (~torch.isfinite(norm)).to(torch.int32)
    if dist.get_world_size() > 1:
        dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return not wrong.item()
