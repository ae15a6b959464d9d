"""The optimizer's moments on disk: each rank writes its fragments, any rank reads what overlaps with its own."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from launcher.engines.update_state import Fragment, UpdateState
from models.errors import UserError

PREFIX = "optimizer-"


class _Saved(NamedTuple):
    start: int
    length: int
    file: Path
    entry: str


def write_moments(state: UpdateState, path: Path) -> None:
    """Write this rank's fragments."""
    save_file(
        {
            entry_of(fragment, name): tensor.detach().cpu().clone()
            for fragment, name, tensor in state.moments()
        },
        path,
    )


def entry_of(fragment: Fragment, name: str) -> str:
    """Key of one tensor in the file."""
    return f"{fragment.key}#{fragment.start}#{name}"


@torch.no_grad()
def read_moments(state: UpdateState, folder: Path, step: float) -> None:
    """Fill this rank's fragments from the files of all ranks that wrote. Raises UserError where one lacks."""
    saved: dict[tuple[str, str], list[_Saved]] = defaultdict(list)
    files = {path: safe_open(path, "pt") for path in sorted(folder.glob(f"{PREFIX}*.safetensors"))}
    for path, file in files.items():
        for entry in file.keys():  # noqa: SIM118  # no mapping
            key, start, name = entry.rsplit("#", 2)
            saved[key, name].append(_Saved(int(start), file.get_slice(entry).get_shape()[0], path, entry))
    state.allocate(sorted({name for _, name in saved}), step)
    for fragment, name, target in state.moments():
        filled = 0
        for part in saved[fragment.key, name]:
            first = max(part.start, fragment.start)
            last = min(part.start + part.length, fragment.start + fragment.length)
            if first < last:
                piece = files[part.file].get_slice(part.entry)[first - part.start : last - part.start]
                target[first - fragment.start : last - fragment.start].copy_(piece)
                filled += last - first
        if filled != fragment.length:
            raise UserError(
                f"{folder}: has {filled} of {fragment.length} elements of {name} of {fragment.key}; it was "
                "written by another model"
            )


def scalars(state: UpdateState) -> dict[str, Any]:
    """Everything of the update that is no tensor, for ``state.json``."""
    return {
        "optimizer_step": state.steps_taken(),
        "groups": [_plain(group) for group in state.groups],
        "schedule": _plain(state.scheduler.state_dict()) if state.scheduler is not None else None,
        "loss_scale": [
            {"kind": type(scaler).__name__, "values": _scaler(scaler)} for scaler in state.scalers
        ],
        "counters": {name: getattr(state.counters, name) for name in _COUNTERS} if state.counters else {},
    }


def load_scalars(state: UpdateState, saved: dict[str, Any]) -> None:
    """Set what ``scalars`` gave; a loss scale of another kind of engine starts from its configured value."""
    if state.scheduler is not None and saved["schedule"] is not None:
        state.scheduler.load_state_dict(state.scheduler.state_dict() | saved["schedule"])
        # the next step uses what the schedule set after the last one
        for group, values in zip(state.groups, saved["groups"], strict=False):
            group.update(
                {
                    name: values[name]
                    for name in ("lr", "betas", "momentum")
                    if name in values and name in group
                }
            )
    for scaler, before in zip(state.scalers, saved["loss_scale"], strict=False):
        if type(scaler).__name__ == before["kind"]:
            if hasattr(scaler, "load_state_dict"):
                scaler.load_state_dict(before["values"])
            else:
                vars(scaler).update(before["values"])
    if state.counters is not None:
        for name, value in saved["counters"].items():
            setattr(state.counters, name, value)


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def _scaler(scaler: Any) -> dict[str, Any]:
    return _plain(scaler.state_dict() if hasattr(scaler, "state_dict") else vars(scaler))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of a dictionary."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            continue
        try:
            json.dumps(value)
        except TypeError:
            continue
        if name != "params":
            kept[name] = value
    return kept
