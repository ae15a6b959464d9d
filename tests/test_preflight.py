"""A node that is not like the others is named before it costs hours."""

import subprocess
import sys
from dataclasses import replace

import pytest

from launcher import preflight
from launcher.distributed import Distributed
from launcher.preflight import Facts, describe, judge
from models.errors import UserError

GOOD = Facts(
    rank=0, node="n1", versions=(("torch", "2.14.1"), ("vlfit", "0.1")), plan="aa", data="bb", gpus=8,
    device_free_bytes=79 << 30, device_total_bytes=80 << 30, address="10.0.0.1", clock=1000.0,
    disk_free_bytes=1 << 40, shm_free_bytes=1 << 33, allreduce_seconds=0.01,
)  # fmt: skip
NODES = [replace(GOOD, rank=i, node=f"n{i + 1}") for i in range(4)]


def test_nodes_that_are_alike_have_no_problem():
    assert judge(NODES) == []


@pytest.mark.parametrize(
    ("change", "said", "fatal"),
    [
        (
            {"versions": (("torch", "2.13.0"), ("vlfit", "0.1"))},
            "torch 2.13.0, on the other nodes 2.14.1",
            True,
        ),
        ({"versions": (("torch", "2.14.1"),)}, "vlfit missing", True),
        ({"plan": "cc"}, "checksum of the plan cc", True),
        ({"data": "cc"}, "checksum of the data cc", True),
        ({"gpus": 7}, "visible GPUs 7, on the other nodes 8", True),
        ({"allreduce_sum_is_right": False}, "wrong sum", True),
        ({"device_free_bytes": 10 << 30}, "10.0 GiB of 80.0 GiB", False),
        ({"clock": 1090.0}, "+90.0 s", False),
        ({"disk_free_bytes": 1 << 20}, "free disk 0.0 GiB", False),
        ({"shm_free_bytes": 1 << 20}, "/dev/shm", False),
    ],
)
def test_the_odd_node_is_named(change, said, fatal):
    (problem,) = judge([*NODES[:2], replace(NODES[2], **change), NODES[3]])
    assert problem.nodes == ("n3",)
    assert said in describe(problem)
    assert problem.fatal is fatal


def test_one_process_alone_passes(capsys, tmp_path):
    facts = preflight.run(Distributed.from_environment({}), device="cpu", output=tmp_path / "not yet")
    assert len(facts) == 1
    assert "1 ranks on 1 node(s)" in capsys.readouterr().out


RANK = """
import os, sys
import torch.distributed as dist
from launcher import preflight
from launcher.distributed import Distributed
from models.errors import UserError
me = Distributed.from_environment(os.environ)
os.environ["SLURMD_NODENAME"] = f"n{me.rank}"
dist.init_process_group("gloo")
try:
    preflight.run(me, device="cpu", data="same" if me.rank or sys.argv[1] == "good" else "other")
except UserError as error:
    print(f"rank {me.rank}: {error}", file=sys.stderr)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["good", "bad"])
def test_ranks_compare_themselves_and_measure_an_all_reduce(tmp_path, kind):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        str(program),
    ]
    done = subprocess.run([*command, kind], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "all-reduce of 16 MiB in" in done.stdout
    # Three ranks write to one pipe: two messages may stand on one line.
    assert done.stderr.count("--exclude=n0") == (3 if kind == "bad" else 0), done.stderr


def test_bandwidth_is_that_of_a_ring():
    # NCCL-tests: busbw = algbw * 2 (n - 1) / n; 16 MiB in 1 s over 2 ranks
    assert preflight.bus_bandwidth(2, 1.0) == 16 * 2**20


def test_refusal_says_what_to_exclude(monkeypatch):
    monkeypatch.setattr(
        preflight, "judge", lambda facts: [preflight.Problem(("n7",), "torch 1, elsewhere 2")]
    )
    with pytest.raises(UserError, match="--exclude=n7"):
        preflight.run(Distributed.from_environment({}), device="cpu", say=lambda line: None)


def test_doctor_compares_the_nodes_of_a_launch():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "launcher"]
    done = subprocess.run(
        [sys.executable, *launch, "doctor", "--nodes"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("preflight: 2 ranks on 1 node(s)") == 1
    assert "all-reduce of 16 MiB in" in done.stdout
