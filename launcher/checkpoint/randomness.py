"""One rank's random number generators: torch on CPU and CUDA, NumPy, Python."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_random(path: Path) -> None:
    """Write the state of all generators."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    numbers = {"numpy": [name, position, has_gauss, gauss], "python": random.getstate()}
    save_file(tensors, path, metadata={"numbers": json.dumps(numbers)})


def read_random(path: Path) -> None:
    """Set all generators; CUDA's as far as this machine has the devices."""
    with safe_open(path, "pt") as file:
        numbers = json.loads(file.metadata()["numbers"])
        torch.set_rng_state(file.get_tensor("torch"))
        for name in file.keys():  # noqa: SIM118  # no mapping
            if name.startswith("cuda:") and int(name[5:]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(file.get_tensor(name), int(name[5:]))
        kind, position, has_gauss, gauss = numbers["numpy"]
        np.random.set_state(
            (kind, file.get_tensor("numpy").numpy().astype(np.uint32), position, has_gauss, gauss)
        )
    version, state, gauss = numbers["python"]
    random.setstate((version, tuple(state), gauss))
