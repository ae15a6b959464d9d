"""Measured memory of this process: never predicted.

CUDA: the caching allocator's own counters. CPU: torch's CPU allocator, wrapped by ``allocator.cpp`` to count
its events on every thread; compiled once per machine (a few seconds), like DeepSpeed's own CPU ops.
"""

import ctypes
import resource
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("allocator.cpp")


class MemoryMeter:
    """Peak allocated bytes per device since ``start``; on the CPU of tensors allocated since ``start``."""

    def __init__(self, *devices: torch.device) -> None:
        self.devices = devices
        self.cpu: Any = _allocator() if any(device.type == "cpu" for device in devices) else None
        self.final: dict[str, int] | None = None

    def start(self) -> None:
        """Begin to count."""
        if self.cpu is not None:
            self.cpu.vlfit_install()
            self.cpu.vlfit_reset_peak()
            self.base = self.cpu.vlfit_current_bytes()
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def stop(self) -> dict[str, int]:
        """Keep the peaks as they are now; gives them."""
        self.final = self.peak_bytes()
        return self.final

    def peak_bytes(self) -> dict[str, int]:
        """Peak per device so far, or when the meter was stopped."""
        if self.final is not None:
            return self.final
        peaks = {}
        for device in self.devices:
            if device.type == "cuda":
                peaks[str(device)] = torch.cuda.max_memory_allocated(device)
            else:
                peaks["cpu"] = self.cpu.vlfit_peak_bytes() - self.base
        return peaks

    def current_bytes(self) -> dict[str, int]:
        """Allocated now, per device."""
        return {
            str(device): torch.cuda.memory_allocated(device)
            if device.type == "cuda"
            else self.cpu.vlfit_current_bytes() - self.base
            for device in self.devices
        }

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            else:
                self.cpu.vlfit_reset_peak()

    def reserved_bytes(self) -> dict[str, int]:
        """Peak of what the caching allocator took from CUDA; the CPU reserves nothing."""
        return {
            str(device): torch.cuda.max_memory_reserved(device)
            for device in self.devices
            if device.type == "cuda"
        }

    def rss_bytes(self) -> int:
        """Peak resident set of the process, from the kernel."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@lru_cache(maxsize=1)
def _allocator() -> Any:
    """Build (once per torch version, in torch's extension cache) and load the counting allocator."""
    from torch.utils import cpp_extension

    name = "vlfit_allocator"
    cpp_extension.load(name, [str(_SOURCE)], extra_cflags=["-O2"], is_python_module=False)
    library = ctypes.CDLL(str(Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"))
    for function in (library.vlfit_current_bytes, library.vlfit_peak_bytes):
        function.restype = ctypes.c_int64
    for function in (library.vlfit_install, library.vlfit_reset_peak):
        function.restype = None
    return library
