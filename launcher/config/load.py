"""A DeepSpeed JSON as it stands in its file: checked, not yet resolved for a world size and device."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.check import check_config
from launcher.config.json_file import read_json

if TYPE_CHECKING:
    from launcher.config.device import DeviceSupport
    from launcher.config.training import TrainingConfig


@dataclass(frozen=True)
class DeepSpeedJson:
    """A valid DeepSpeed config from ``path``; may still hold 'auto' and leave batch sizes open."""

    path: Path
    _data: dict[str, Any] = field(repr=False)

    @property
    def data(self) -> dict[str, Any]:
        """The content of the file, as a copy."""
        return copy.deepcopy(self._data)

    def resolve(
        self, *, world_size: int, device: "DeviceSupport", total_steps: int | None = None
    ) -> "TrainingConfig":
        """See ``launcher.config.resolve``."""
        from launcher.config.resolve import resolve

        return resolve(self, world_size=world_size, device=device, total_steps=total_steps)


def load_config(path: str | Path) -> DeepSpeedJson:
    """Read and check a DeepSpeed config. A config that the installed DeepSpeed takes is not refused.

    Raises UserError naming file and key: unreadable, not JSON, unknown key (with the nearest known one),
    wrong type or value, fp16 with bf16 or torch_autocast.
    """
    data = read_json(path)
    check_config(data, str(path))
    return DeepSpeedJson(Path(path), data)
