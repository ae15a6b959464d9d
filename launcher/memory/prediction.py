"""What the simulator says about one strategy: bytes per device, over the phases of a run."""

from dataclasses import dataclass
from typing import Any

CATEGORIES = (
    "parameters",
    "master weights",
    "optimizer state",
    "gradients",
    "activations",
    "recompute",
    "communication",
    "inputs",
    "loss",
    "temporary",
)
"""What allocated bytes are for. ``activations`` are kept for backward; ``recompute`` are those of a layer that
is being computed again; ``temporary`` is what an operator or the optimizer needs for a moment."""

PHASES = ("load", "initialise", "forward", "loss", "backward", "step", "evaluate", "save")


@dataclass(frozen=True)
class Moment:
    """The high-water mark of one stretch of a run: one layer's forward or backward, the optimizer's step …"""

    phase: str
    """One of ``PHASES``."""
    where: str
    """Layer or part, such as ``fusion.layer.3``."""
    items: dict[str, int]
    """Bytes by category at the highest point of the stretch."""

    @property
    def total_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.items.values())


@dataclass(frozen=True)
class DevicePrediction:
    """One device over load, initialisation, one steady optimizer step, evaluation and save."""

    device: str
    """``cuda:0`` …; on the CPU ``cpu``, of the rank that needs most (``rank 0`` … where stages are ranks)."""
    timeline: tuple[Moment, ...]
    reserved_bytes: int | None = None
    """What the caching allocator takes from CUDA at the peak; None on the CPU."""
    context_bytes: int = 0
    """CUDA context, libraries and NCCL: outside the allocator, but on the device."""
    host_bytes: int = 0
    """Offloaded state in this rank's host memory."""

    @property
    def peak(self) -> Moment:
        """The highest moment."""
        return max(self.timeline, key=lambda moment: moment.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes: what ``torch.cuda.max_memory_allocated`` would say."""
        return self.peak.total_bytes

    @property
    def needed_bytes(self) -> int:
        """What the device must have: reserved where that is known, and the context."""
        return max(self.peak_bytes, self.reserved_bytes or 0) + self.context_bytes


@dataclass(frozen=True)
class Prediction:
    """The memory of one strategy, for every device that a rank group occupies."""

    devices: tuple[DevicePrediction, ...]

    @property
    def worst(self) -> DevicePrediction:
        """The device that needs most."""
        return max(self.devices, key=lambda device: device.needed_bytes)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak allocated bytes per device."""
        return {device.device: device.peak_bytes for device in self.devices}

    def as_json(self) -> dict[str, Any]:
        """``peak_bytes``, ``phase`` and ``items`` per device, as ``vlfit estimate --json`` prints them."""
        return {
            "peak_bytes": self.peak_bytes,
            "needed_bytes": {device.device: device.needed_bytes for device in self.devices},
            "phase": {device.device: f"{device.peak.phase} {device.peak.where}" for device in self.devices},
            "items": {device.device: device.peak.items for device in self.devices},
            "host_bytes": sum(device.host_bytes for device in self.devices),
        }
