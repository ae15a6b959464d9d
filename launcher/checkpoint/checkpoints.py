"""Saving and restoring a run, by all of its ranks together."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from launcher.checkpoint.files import PARTIAL, described, forget_partial, name_of, publish, sync
from launcher.checkpoint.moments import PREFIX, load_scalars, read_moments, scalars, write_moments
from launcher.checkpoint.randomness import read_random, write_random
from launcher.data.order import DataPosition
from launcher.engines.engine import Engine
from models.errors import UserError

FORMAT = 1


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    samples: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    loss_first: float | None = None
    loss_last: float | None = None
    skipped_steps: int = 0


@dataclass
class Checkpoints:
    """The checkpoints of one run; every method is collective."""

    folder: Path
    """``RUN/checkpoints`` on a file system that all ranks share."""
    engine: Engine
    rank: int
    identity: dict[str, Any]
    keep: int | None = None

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint. Raises OSError on all ranks where one could not write; older ones stay."""
        partial = self.folder / (name_of(progress.step) + PARTIAL)
        needed = self._gather(self._bytes_needed())
        self._all(lambda: self._prepare(partial, sum(needed)) if self.rank == 0 else None)
        weights = self.engine.named_tensors()
        update = self.engine.update_state()

        def write() -> dict[str, Any]:
            files: dict[str, Callable[[Path], Any]] = {f"random-{self.rank:05d}.safetensors": write_random}
            if update.writes:
                files[f"{PREFIX}{self.rank:05d}.safetensors"] = lambda path: write_moments(update, path)
            if self.rank == 0:
                files["model.safetensors"] = lambda path: save_file(weights, path)
                files["state.json"] = lambda path: path.write_text(self._state(progress, scalars(update)))
            found = {}
            for name, writer in files.items():
                writer(partial / name)
                found[name] = described(partial / name)
            return found

        sums = self._all(write)
        merged = {name: entry for part in sums for name, entry in part.items()}
        self._all(lambda: publish(partial, merged, self.keep) if self.rank == 0 else None)
        return partial.with_suffix("")

    def restore(self, path: Path) -> tuple[Progress, list[str]]:
        """Load a checkpoint that verifies; gives the progress, and what differs from going on."""
        state = json.loads((path / "state.json").read_text())
        weights = load_file(path / "model.safetensors")
        self.engine.load_named_tensors(weights)
        update = self.engine.update_state()
        read_moments(update, path, state["update"]["optimizer_step"])
        load_scalars(update, state["update"])
        notes = []
        world = state["world_size"]
        if world == dist.get_world_size():
            read_random(path / f"random-{self.rank:05d}.safetensors")
        else:
            notes.append(f"world size was {world}: dropout draws other numbers than without the interruption")
        values = state["progress"]
        values["position"] = DataPosition.from_json(json.dumps(values["position"]))
        return Progress(**values), notes

    def _state(self, progress: Progress, update: dict[str, Any]) -> str:
        state = {
            "format": FORMAT,
            "progress": asdict(progress),
            "world_size": dist.get_world_size(),
            "engine": self.engine.name,
            "identity": self.identity,
            "update": update,
        }
        return json.dumps(state, indent=1) + "\n"

    def _bytes_needed(self) -> int:
        update = self.engine.update_state()
        moments = sum(tensor.numel() * tensor.element_size() for _, _, tensor in update.moments())
        parameters = [p for layer in self.engine.layers for p in layer.parameters()]
        weights = sum(getattr(p, "ds_numel", p.numel()) for p in parameters) * 4
        return (moments if update.writes else 0) + (weights if self.engine.data_rank == 0 else 0) + 2**20

    def _prepare(self, partial: Path, needed: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        forget_partial(self.folder)  # of a run that was killed while it saved
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{free / 2**20:.0f} MiB free, about {needed / 2**20:.0f} MiB needed")
        partial.mkdir()
        sync(self.folder)

    def _all(self, work: Callable[[], Any]) -> list[Any]:
        """Do ``work`` on every rank; gives all results. Raises OSError everywhere where one rank failed."""
        problem, result = None, None
        try:
            result = work()
        except (OSError, SafetensorError) as error:
            problem = f"rank {self.rank}: {error}"
        found = self._gather((problem, result))
        problems = [problem for problem, _ in found if problem]
        if problems:
            if self.rank == 0:
                forget_partial(self.folder)
            raise OSError("; ".join(problems))
        return [result for _, result in found]

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


def saved_identity(path: Path) -> dict[str, Any]:
    """Read what run a checkpoint is of. Raises UserError for a format of another vlfit."""
    state = json.loads((path / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise UserError(f"{path}: format {state.get('format')}; this vlfit reads {FORMAT}")
    return state["identity"]


def saved_step(path: Path) -> int:
    """Read how far a checkpoint is."""
    return int(json.loads((path / "state.json").read_text())["progress"]["step"])
