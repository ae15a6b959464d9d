"""A plan as the planner answers it: its choices, its memory and its time, in plain data.

Needs no torch, so that a search asked for again is answered from the cache at once.
"""

from dataclasses import asdict, dataclass
from typing import Any

from launcher.memory.prediction import DevicePrediction, Moment, Prediction


@dataclass(frozen=True)
class Planned:
    """One way of training and what it costs."""

    choices: dict[str, Any]
    """As in ``vlfit plan --json``; enough to make the strategy again."""
    prediction: Prediction
    step: dict[str, float]
    """Seconds of one optimizer step by part."""
    limit_bytes: int
    """What a device may need, the margin taken off."""
    host_limit_bytes: int
    """What the processes of a node may hold in host memory."""
    processes_per_node: int

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step."""
        return sum(self.step.values())

    @property
    def needed_bytes(self) -> int:
        """Of the device that needs most."""
        return self.prediction.worst.needed_bytes

    @property
    def host_bytes(self) -> int:
        """Of all processes of a node."""
        return self.processes_per_node * max(device.host_bytes for device in self.prediction.devices)

    @property
    def over_bytes(self) -> int:
        """By how much it does not fit; 0 where it does."""
        return max(0, self.needed_bytes - self.limit_bytes, self.host_bytes - self.host_limit_bytes)

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints of a plan."""
        return {
            **self.prediction.as_json(),
            "step_seconds": round(self.step_seconds, 6),
            "step": {name: round(value, 6) for name, value in self.step.items()},
            "samples_per_second": round(self.choices["global_batch_size"] / self.step_seconds, 2),
            "limit_bytes": self.limit_bytes,
            "over_bytes": self.over_bytes,
            **self.choices,
        }

    def dump(self) -> dict[str, Any]:
        """Everything, with the timelines."""
        return asdict(self)

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Planned":
        """Read what ``dump`` gave, from JSON or not."""
        devices = tuple(
            DevicePrediction(
                **{**device, "timeline": tuple(Moment(**moment) for moment in device["timeline"])}
            )
            for device in data["prediction"]["devices"]
        )
        return cls(**{**data, "prediction": Prediction(devices)})


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    plans_searched: int
    """Strategies whose time was predicted and whose memory was predicted or bounded until the best were known."""
    predicted: int
    """Of those, simulated in full."""
    plans: tuple[Planned, ...]
    """The fastest that fit, fastest first."""
    nearest_misses: tuple[Planned, ...]
    """Those that do not fit by the least, of all that would be faster than what fits."""

    @property
    def best(self) -> Planned | None:
        """The fastest that fits."""
        return self.plans[0] if self.plans else None

    def as_json(self) -> dict[str, Any]:
        """What ``vlfit plan --json`` prints."""
        return {
            "plans_searched": self.plans_searched,
            "plans_simulated": self.predicted,
            "best": self.best.as_json() if self.best else None,
            "plans": [plan.as_json() for plan in self.plans],
            "nearest_misses": [plan.as_json() for plan in self.nearest_misses],
        }

    def dump(self) -> dict[str, Any]:
        """Everything."""
        return {
            "plans_searched": self.plans_searched,
            "predicted": self.predicted,
            "plans": [plan.dump() for plan in self.plans],
            "nearest_misses": [plan.dump() for plan in self.nearest_misses],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Answer":
        """Read what ``dump`` gave."""
        return cls(
            data["plans_searched"],
            data["predicted"],
            tuple(map(Planned.load, data["plans"])),
            tuple(map(Planned.load, data["nearest_misses"])),
        )
