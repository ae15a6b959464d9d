"""What the memory of this run was predicted to be, to stand beside what is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launcher.memory.prediction import Prediction
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.plan import TrainPlan


@dataclass(frozen=True)
class Forecast:
    """A prediction, or why there is none."""

    prediction: Prediction | None
    why_not: str = ""

    def on(self, devices: Sequence[str], stage: int | None) -> dict[str, int] | None:
        """Predicted peak bytes of one rank's ``devices``, which are those of its pipeline's stages in order.

        ``stage`` where a rank has only that one.
        """
        if self.prediction is None:
            return None
        peaks = [device.peak_bytes for device in self.prediction.devices]
        if len(peaks) == 1:  # all ranks are alike
            peaks *= len(devices)
        elif stage is not None:
            peaks = [peaks[stage]]
        found: dict[str, int] = {}
        for device, peak in zip(devices, peaks, strict=False):
            found[device] = max(peak, found.get(device, 0))
        return found


def forecast(
    plan: TrainPlan, world_size: int, device_type: Literal["cpu", "cuda"], varying_rows: bool
) -> Forecast:
    """Predict the memory of a run; traces the layers (seconds) where the cache does not have them.

    A run must not fail because its prediction does: then the reason is given instead.
    """
    if varying_rows:
        return Forecast(None, "--batch-memory gives micro-batches of different sizes")
    try:
        return Forecast(predict(Strategy.of(plan, world_size, device_type)))
    except Exception as error:
        return Forecast(None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
