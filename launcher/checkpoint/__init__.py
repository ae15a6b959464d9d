"""Checkpoints that any engine, ZeRO stage, partition and world size can load.

    RUN/checkpoints/
      latest                     the name of the newest one, changed last
      step-00000100/
        model.safetensors        fp32 weights and buffers, keyed "layer/parameter"
        optimizer-00000.safetensors   moments of one rank's fragments, keyed "layer/parameter#start#moment"
        random-00000.safetensors      one rank's random number generators
        state.json               step, data position, schedule, loss scale, and what the run is (``identity``)
        checksums.json           size and SHA-256 of each file above, and of this list

A checkpoint is written under a temporary name, synced, and then renamed. Nothing in it is pickled.
"""

from launcher.checkpoint.checkpoints import Checkpoints, Progress
from launcher.checkpoint.files import Found, find

__all__ = ["Checkpoints", "Found", "Progress", "find"]
