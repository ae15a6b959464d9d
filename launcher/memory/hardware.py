"""Hardware: what a device can hold, compute and move. GPUs from ``launcher/hardware.yaml``, the CPU measured."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from launcher.config.device import DeviceSupport
from launcher.config.training import Precision
from launcher.memory.cache import cached
from models.errors import UserError
from models.schema import ClosedModel, load_yaml

FILE = Path(__file__).parent.parent / "hardware.yaml"

Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class _Sourced(ClosedModel):
    sources: dict[str, str]

    @model_validator(mode="after")
    def _every_figure_has_a_source(self) -> Self:
        figures = set(type(self).model_fields) - {"sources"}
        if wrong := figures ^ set(self.sources):
            raise ValueError(
                f"sources must name exactly the figures; wrong or missing: {', '.join(sorted(wrong))}"
            )
        return self


class Efficiency(_Sourced):
    """Which fraction of a peak training reaches, and the fixed costs."""

    matmul: Fraction
    """Of tensor cores."""
    vector: Fraction
    """Of the fp32 units."""
    memory: Fraction
    link: Fraction
    network: Fraction
    pcie: Fraction
    host: Fraction
    latency_seconds: Rate
    """Of one hop of a collective."""
    operator_seconds: Rate
    """The host needs this to start one operator."""


class Gpu(_Sourced):
    """Peak figures of one GPU and of the node around it; see the head of the file for the units."""

    memory_gib: Rate
    fp32_tflops: Rate
    fp16_tflops: Rate
    bf16_tflops: Rate | None
    memory_gb_per_second: Rate
    link_gb_per_second: Rate
    pcie_gb_per_second: Rate
    network_gb_per_second: Rate
    host_memory_gib: Rate
    host_gb_per_second: Rate


class HardwareFile(ClosedModel):
    """``launcher/hardware.yaml``."""

    efficiency: Efficiency
    gpus: dict[str, Gpu]


@dataclass(frozen=True)
class Hardware:
    """One device, in achievable rates per second, one direction."""

    name: str
    device_type: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_32: float
    flops_fp16: float | None
    flops_bf16: float | None
    memory_bandwidth: float
    elementwise_32: float
    """Bytes per second of operators that are no matrix products; on a CPU their arithmetic counts, too."""
    elementwise_16: float
    link_bandwidth: float
    """Between two devices of a node."""
    pcie_bandwidth: float
    """Between a device and its host."""
    network_bandwidth: float
    """Of a whole node."""
    host_memory_bytes: int
    """Of a whole node."""
    host_bandwidth: float
    """Of a whole node's memory, as the optimizer reaches it."""
    latency_seconds: float
    operator_seconds: float

    def flops(self, precision: Precision) -> float:
        """FLOP/s of matrix products in this precision; those of fp32 without tf32, as torch defaults to."""
        found = {"fp": self.flops_fp16, "bf": self.flops_bf16}[precision.removeprefix("autocast-")[:2]]
        rate = self.flops_32 if precision == "fp32" else found
        if rate is None:
            raise UserError(f"{self.name}: no {precision} there; use fp16, with its loss scaling, or fp32")
        return rate

    def elementwise(self, precision: Precision) -> float:
        """Bytes per second of other operators than matrix products; autocast runs most of them in fp32."""
        return self.elementwise_16 if precision in ("fp16", "bf16") else self.elementwise_32

    @property
    def support(self) -> DeviceSupport:
        """What a config is resolved for."""
        return DeviceSupport(
            type=self.device_type,
            fp16=self.flops_fp16 is not None,
            bf16=self.flops_bf16 is not None,
            fused_kernels=self.device_type == "cuda",
        )

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What is worth searching: bf16 where it is there, for it needs no loss scaling; else fp16."""
        if self.flops_bf16:
            return ("fp32", "bf16", "autocast-bf16")
        return ("fp32", "fp16", "autocast-fp16") if self.flops_fp16 else ("fp32",)

    def with_memory(self, gib: float) -> "Hardware":
        """The same device with another memory."""
        return replace(self, memory_bytes=round(gib * 2**30))


@lru_cache(maxsize=1)
def hardware_file() -> HardwareFile:
    """Read ``launcher/hardware.yaml``."""
    return load_yaml(FILE, HardwareFile)


def find_hardware(name: str, per_node: int = 1) -> Hardware:
    """Give a device by its name in any case; ``cpu`` is this host, shared by ``per_node`` processes.

    Raises UserError for an unknown name, with the known ones.
    """
    if name.lower() == "cpu":
        return _this_cpu(per_node)
    file = hardware_file()
    by_lower = {known.lower(): known for known in file.gpus}
    if name.lower() not in by_lower:
        raise UserError(f"--gpu {name}: not known; give one of {', '.join(file.gpus)}, cpu")
    known = by_lower[name.lower()]
    gpu, reached = file.gpus[known], file.efficiency
    return Hardware(
        name=known,
        device_type="cuda",
        memory_bytes=round(gpu.memory_gib * 2**30),
        flops_32=gpu.fp32_tflops * 1e12 * reached.vector,
        flops_fp16=gpu.fp16_tflops * 1e12 * reached.matmul,
        flops_bf16=gpu.bf16_tflops and gpu.bf16_tflops * 1e12 * reached.matmul,
        memory_bandwidth=gpu.memory_gb_per_second * 1e9 * reached.memory,
        elementwise_32=gpu.memory_gb_per_second * 1e9 * reached.memory,
        elementwise_16=gpu.memory_gb_per_second * 1e9 * reached.memory,
        link_bandwidth=gpu.link_gb_per_second * 1e9 * reached.link,
        pcie_bandwidth=gpu.pcie_gb_per_second * 1e9 * reached.pcie,
        network_bandwidth=gpu.network_gb_per_second * 1e9 * reached.network,
        host_memory_bytes=round(gpu.host_memory_gib * 2**30),
        host_bandwidth=gpu.host_gb_per_second * 1e9 * reached.host,
        latency_seconds=reached.latency_seconds,
        operator_seconds=reached.operator_seconds,
    )


def _this_cpu(per_node: int) -> Hardware:
    """This host's CPU: its cores, bandwidth and memory divided by the processes that share them."""
    import psutil

    processors = len(os.sched_getaffinity(0))
    rates = cached(
        "cpu", {"processors": processors, "threads": os.environ.get("OMP_NUM_THREADS")}, _calibrate
    )
    memory = psutil.virtual_memory().total
    return Hardware(
        name="cpu",
        device_type="cpu",
        memory_bytes=memory // per_node,
        flops_32=rates["fp32"] / per_node,
        flops_fp16=None,
        flops_bf16=rates["bf16"] / per_node,
        memory_bandwidth=rates["bytes"] / per_node,
        elementwise_32=rates["elementwise fp32"] / per_node,
        elementwise_16=rates["elementwise bf16"] / per_node,
        link_bandwidth=rates["bytes"] / (4 * per_node),  # gloo copies out and in, and adds
        pcie_bandwidth=rates["bytes"],
        network_bandwidth=1.25e9,  # 10 Gb/s Ethernet
        host_memory_bytes=memory,
        host_bandwidth=rates["bytes"],
        latency_seconds=1e-4,
        operator_seconds=rates["operator"],
    )


def _calibrate() -> dict[str, Any]:
    """Measure this CPU with all threads of torch: what a transformer layer does, at sizes of one."""
    import torch
    from torch.nn import TransformerEncoderLayer, functional

    from launcher.memory.timing import OPERATORS

    def rate(amount: float, work: Callable[[], object], repeats: int = 7) -> float:
        work()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return amount / statistics.median(seconds)

    def elementwise(hidden: torch.Tensor) -> None:
        functional.dropout(functional.gelu(hidden), 0.1)
        functional.softmax(functional.layer_norm(hidden, hidden.shape[1:]), -1)

    rows, inner, columns = 512, 768, 3072
    found: dict[str, Any] = {}
    with torch.no_grad():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
            found[name] = rate(2 * rows * inner * columns, lambda a=left, b=right: a @ b.T)  # type: ignore[misc]
            hidden = torch.randn(rows, columns).to(dtype)
            # Four operators read and write it; dropout's mask is written and read.
            moved = 10 * hidden.nbytes
            found[f"elementwise {name}"] = rate(moved, lambda h=hidden: elementwise(h))  # type: ignore[misc]
        stream, target = torch.ones(2**24), torch.empty(2**24)
        found["bytes"] = rate(2 * stream.nbytes, lambda: target.copy_(stream))
    # So small that all of its time is the start of operators, autograd's included.
    small, state = TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 4, 16)
    found["operator"] = 1 / rate(3 * OPERATORS, lambda: small(state).sum().backward(), repeats=20)
    return found
