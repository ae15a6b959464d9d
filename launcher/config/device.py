"""What the device of a run can compute in."""

from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True)
class DeviceSupport:
    """Type of the device and the 16-bit formats that DeepSpeed trains in on it."""

    type: Literal["cpu", "cuda"]
    fp16: bool
    bf16: bool
    fused_kernels: bool = True
    """DeepSpeed's fused optimizers can be used: built in advance, or a CUDA toolkit is here to build them."""

    @classmethod
    def detect(cls) -> Self:
        """Ask DeepSpeed's accelerator: the same answers decide whether ``initialize`` refuses a precision."""
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        is_cuda = accelerator.device_name() == "cuda"
        return cls(
            type="cuda" if is_cuda else "cpu",
            # the CPU accelerator of DeepSpeed 0.19 answers None where it means no
            fp16=bool(accelerator.is_fp16_supported()),
            bf16=bool(accelerator.is_bf16_supported()),
            fused_kernels=is_cuda and _has_fused_kernels(),
        )


def _has_fused_kernels() -> bool:
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import CUDA_HOME

    return bool(installed_ops.get("fused_adam")) or CUDA_HOME is not None
