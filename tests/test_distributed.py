"""One description of a process, from the variables of each launcher.

The environments below hold the variables that torchrun (torch 2.14), deepspeed 0.19 and srun (SLURM
22.05) set; ``test_slurm_cluster``, ``test_launch`` and ``test_launch_hosts`` ask the real ones. Those of
Open MPI are taken from its documentation (FAQ "environmental variables"); no mpirun was asked.
"""

import pytest

from launcher.distributed import Distributed, is_loopback, port_of_job
from launcher.hostlist import expand_counts, expand_hostlist
from models.errors import UserError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", 
    "CROSS_RANK": "1", "CROSS_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "1663303681",
    "MASTER_ADDR": "10.0.0.1",
}  # fmt: skip
LAUNCHERS = {"torchrun": TORCHRUN, "deepspeed": DEEPSPEED, "slurm": SLURM, "openmpi": OPENMPI}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_describes_the_same_process(launcher):
    process = Distributed.from_environment(LAUNCHERS[launcher])
    assert (process.rank, process.local_rank, process.node_rank) == (3, 1, 1)
    assert (process.world_size, process.local_world_size, process.nodes) == (4, 2, 2)
    assert process.launcher == launcher
    assert process.master_address == ("gpu07" if launcher == "slurm" else "10.0.0.1")
    assert 1 <= process.master_port < 32768


def test_plain_python_is_one_process():
    process = Distributed.from_environment({"HOME": "/home/a"})
    assert (process.rank, process.world_size, process.nodes, process.launcher) == (0, 1, 1, "python")


def test_the_environment_describes_the_process_to_torch():
    assert Distributed.from_environment(SLURM).environment() == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": str(10_000 + 4242),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (SLURM | {"RANK": "0"}, "RANK=0"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "SLURM_STEP_TASKS_PER_NODE=2,1"),
        (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4"),
        (SLURM | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR"),
        (TORCHRUN | {"MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "8"}, "GROUP_WORLD_SIZE=8"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        (DEEPSPEED | {"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({k: v for k, v in DEEPSPEED.items() if k != "LOCAL_SIZE"}, "LOCAL_SIZE"),
        (OPENMPI | {"RANK": "1"}, "RANK=1"),
        ({k: v for k, v in OPENMPI.items() if k != "MASTER_ADDR"}, "MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 WORLD_SIZE=2"),
        # one torchrun per node, each of which believes to be alone
        (
            TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "RANK": "1", "WORLD_SIZE": "2",
                        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS",
        ),
        # python in a batch script, without srun
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "SLURM_NTASKS"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_and_name_the_variable(environ, named):
    with pytest.raises(UserError) as refused:
        Distributed.from_environment(environ)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_torchrun_inside_a_slurm_step_is_the_innermost_launcher():
    outer = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    assert Distributed.from_environment(TORCHRUN | outer).launcher == "torchrun"


@pytest.mark.parametrize("ids", ["GPU-0123abcd-aaaa-bbbb-cccc-0123456789ab,GPU-1", "MIG-aa,MIG-bb", "6,7"])
def test_devices_are_counted_whatever_their_ids_look_like(ids):
    process = Distributed.from_environment(DEEPSPEED | {"CUDA_VISIBLE_DEVICES": ids})
    assert process.visible_devices == tuple(ids.split(","))
    assert process.first_device() == 1
    with pytest.raises(UserError, match="2 each"):
        process.first_device(stages=2)


def test_a_task_that_sees_only_its_own_gpu_uses_the_first():
    assert Distributed.from_environment(SLURM | {"CUDA_VISIBLE_DEVICES": "MIG-aa"}).first_device() == 0


def test_all_gpus_visible_are_chosen_by_local_rank_in_groups():
    process = Distributed.from_environment(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert (process.first_device(), process.first_device(stages=2)) == (1, 2)


def test_devices_after_an_invalid_one_are_invisible_as_for_cuda():
    assert Distributed.from_environment({"CUDA_VISIBLE_DEVICES": "0,-1,1"}).visible_devices == ("0",)
    assert Distributed.from_environment({"CUDA_VISIBLE_DEVICES": ""}).visible_devices == ()
    assert Distributed.from_environment({}).visible_devices is None


def test_another_world_size_than_the_plan_needs_is_refused():
    process = Distributed.from_environment(TORCHRUN)
    process.require_world_size(4, "ds.json")
    with pytest.raises(UserError, match=r"ds\.json needs 8 processes, but torchrun started 4"):
        process.require_world_size(8, "ds.json")


def test_header_says_world_nodes_device_and_backend():
    text = "\n".join(Distributed.from_environment(SLURM).header(backend="gloo", device="cpu"))
    for word in ("world size 4", "2 node(s)", "slurm", "gpu07:14242", "gloo", "cpu"):
        assert word in text


def test_neighbouring_jobs_get_different_ports_below_the_ephemeral_range():
    ports = [port_of_job(job) for job in range(10_000_000, 10_020_000)]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 1024
    assert max(ports) < 32768


# test_slurm_cluster compares with `scontrol show hostnames`; that refuses the last one's text after ]
@pytest.mark.parametrize(
    ("compact", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,2]", ["n08", "n09", "n10", "n2"]),
        ("rack[1-2]node[1-2]", ["rack1node1", "rack1node2", "rack2node1", "rack2node2"]),
        ("gpu[1,3]-ib,login,a[01-02].cluster", ["gpu1-ib", "gpu3-ib", "login", "a01.cluster", "a02.cluster"]),
    ],
)  # fmt: skip
def test_node_lists_expand_as_scontrol_expands_them(compact, names):
    assert expand_hostlist(compact) == names


@pytest.mark.parametrize("compact", ["", "n[1-", "n[a-b]", "n[3-1]", "n1]"])
def test_malformed_node_lists_are_refused(compact):
    with pytest.raises(UserError, match="node list"):
        expand_hostlist(compact)


def test_tasks_per_node_expand():
    assert expand_counts("4(x2),3") == [4, 4, 3]
    with pytest.raises(UserError, match="tasks per node"):
        expand_counts("4(x)")


def test_loopback_is_recognised():
    assert all(map(is_loopback, ["127.0.0.1", "127.0.1.1", "::1", "localhost", "localhost.localdomain"]))
    assert not any(map(is_loopback, ["10.0.0.1", "gpu07", "localhoster"]))


def group_of(environ: dict[str, str], stages: int) -> tuple[tuple[str, ...] | None, int]:
    """What the process may see in the end, and the first GPU of its group."""
    process = Distributed.from_environment(environ).widened(environ, stages)
    return process.visible_devices, process.first_device(stages)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_of_deepspeed_has_a_gpu_for_every_stage(rank):
    """``deepspeed --num_gpus 2`` shows both of its processes the GPUs 0 and 1, on a node of four."""
    narrowed = DEEPSPEED | {"LOCAL_RANK": str(rank)}
    assert group_of(narrowed, 2) == (None, 2 * rank)
    assert group_of(narrowed, 1) == (("0", "1"), rank)
    launched = narrowed | {"CUDA_VISIBLE_DEVICES": "4,5", "VLFIT_VISIBLE_DEVICES": "4,5,6,7"}
    assert group_of(launched, 2) == (("4", "5", "6", "7"), 2 * rank)


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        (DEEPSPEED | {"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3 shows 2 GPU"),  # --include: someone's choice
        (DEEPSPEED | {"CUDA_VISIBLE_DEVICES": "GPU-0123abcd,GPU-1"}, "GPU-1 shows 2 GPU"),
        (DEEPSPEED | {"VLFIT_VISIBLE_DEVICES": "0,1,2"}, "0,1,2 shows 3 GPU"),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}, "0,1 shows 2 GPU"),  # torchrun narrows nothing
        (SLURM | {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb,MIG-cc"}, "MIG-cc shows 3 GPU"),
    ],
)
def test_too_few_gpus_for_the_stages_are_refused_with_numbers(environ, numbers):
    with pytest.raises(UserError) as refused:
        group_of(environ, 2)
    assert numbers in str(refused.value) and "the 2 process(es) of this node need 2 each" in str(
        refused.value
    )


def test_a_task_of_slurm_that_sees_its_own_group_uses_all_of_it():
    assert group_of(SLURM | {"CUDA_VISIBLE_DEVICES": "MIG-aa,GPU-bb"}, 2) == (("MIG-aa", "GPU-bb"), 0)


def test_claimed_devices_follow_the_widened_list(monkeypatch):
    """On a node of four GPUs, as torch would count them once CUDA_VISIBLE_DEVICES is what it should be."""
    import os

    import torch

    from launcher.devices import claim_devices

    for name in ("VLFIT_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))
    )
    process = Distributed.from_environment(DEEPSPEED)
    assert [str(device) for device in claim_devices(None, process, 2)] == ["cuda:2", "cuda:3"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with pytest.raises(
        UserError, match=r"2 process\(es\) × 3 GPU\(s\) each need 6 GPUs on this node; 4 are visible"
    ):
        claim_devices(None, process, 3)
