"""Steps that were skipped because their numbers were not finite: when a run stops over them, and what it says."""

import math
from collections.abc import Sequence

from launcher.config.training import LossScale
from launcher.engines.engine import StepResult

_SHOWN = 8


def why_to_stop(
    results: Sequence[StepResult], limit: int, scale: LossScale | None, sample_ids: Sequence[int]
) -> str | None:
    """Give the reason to stop after the last of ``results``, or None.

    ``limit`` steps in a row were skipped; or several, down to the minimum of the loss scale. While a dynamic
    scale is on its way down, steps with a finite loss do not count: that is how it finds its value.
    ``sample_ids`` are those of the last step.
    """
    row: list[StepResult] = []
    for result in reversed(results):
        if not result.overflow:
            break
        row.append(result)
    if not row:
        return None
    dynamic = scale is not None and scale.dynamic
    counted = [result for result in row if not (dynamic and math.isfinite(result.loss))]
    history = ", ".join(f"{result.loss_scale:g}" for result in reversed(row[:_SHOWN]))
    if scale is not None and row[0].loss_scale <= max(scale.minimum, 1.0) and len(row) > 1:
        reason = "gradients overflow though the loss scale is at its minimum"
    elif len(counted) >= limit:
        reason = f"{len(counted)} steps in a row had a loss or gradients that are not finite"
    else:
        return None
    shown = ", ".join(map(str, sample_ids[:_SHOWN])) + (", …" if len(sample_ids) > _SHOWN else "")
    return (
        f"{reason} (loss {row[0].loss}; loss scale {history}; samples of the last step {shown})\n"
        "use bf16 or fp32, a lower learning rate or a longer warm-up, gradient_clipping; look at the samples with "
        "vlfit data inspect"
    )
