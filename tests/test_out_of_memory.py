"""A run whose memory ends: torch's allocator fails for real, the run says where and ends with exit code 4."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.out_of_memory import is_out_of_memory, out_of_memory_explained, place_of

LIMITED = """
import re, resource, sys
from launcher.engines.zero import ZeroEngine
from launcher.train import main

once = ZeroEngine.train_step

def limited(self, batches):
    data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + 60_000_000, resource.RLIM_INFINITY))
    return once(self, batches)

ZeroEngine.train_step = limited
sys.exit(main())
"""


def test_a_run_out_of_memory_says_where_and_how_much_and_ends_with_4(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 128,
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            }
        )
    )
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    command = [sys.executable, str(script), f"--config={config}", f"--output={tmp_path}/run", "--steps=2"]
    ended = subprocess.run(
        [*command, "--device=cpu", "--no-eval"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 4, ended.stderr[-2000:]
    said = ended.stderr[ended.stderr.index("vlfit train (rank 0): out of memory") :]
    assert re.search(
        r"in (forward|backward) of \S+ on cpu: at most [\d,]+ MiB were allocated; predicted", said
    )
    assert "vlfit plan --model demo --gpu cpu --memory" in said and "--global-batch 128" in said
    assert len(said.strip().splitlines()) == 2


def test_only_allocators_are_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert place_of(failed.value.__traceback__) == ("load", "")
    with pytest.raises(RuntimeError, match="cannot be multiplied"), out_of_memory_explained("demo"):
        torch.ones(2, 3) @ torch.ones(2, 3)
