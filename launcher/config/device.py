"""What the device of a run can compute in."""

from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True)
class DeviceSupport:
    """Type of the device and the 16-bit formats that DeepSpeed trains in on it."""

    type: Literal["cpu", "cuda"]
    fp16: bool
    bf16: bool

    @classmethod
    def detect(cls) -> Self:
        """Ask DeepSpeed's accelerator: the same answers decide whether ``initialize`` refuses a precision."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        return cls(
            type="cuda" if accelerator.device_name() == "cuda" else "cpu",
            # the CPU accelerator of DeepSpeed 0.19 answers None where it means no
            fp16=bool(accelerator.is_fp16_supported()),
            bf16=bool(accelerator.is_bf16_supported()),
        )
