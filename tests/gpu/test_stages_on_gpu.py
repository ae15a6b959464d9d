"""Stages on a GPU and on the CPU, where there is a GPU: what the CPU alone cannot show."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.balance import balance, timed_costs
from models.build import build_layers, layer_names
from models.errors import UserError
from models.layer import set_autocast, set_recompute
from models.losses import Objectives, Targets
from models.partition import PartitionSpec, StageSpec
from models.spec import load_spec
from models.state import example_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

ROWS = 16
DEVICES = {"gpu, cpu": ["cuda:0", "cpu"], "cpu, gpu": ["cpu", "cuda:0"]}
PARTITION = PartitionSpec(
    model="tiny",
    chunks=4,
    stages=(
        StageSpec(name="image", layers=("image.*",), device=0),
        StageSpec(name="rest", layers=("text.*", "fusion.*", "head"), device=1),
    ),
)


def gradients(spec_file: Path, devices: list[str] | None, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Of the loss of one batch, through a pipe on ``devices`` or without one on the CPU."""
    spec = load_spec(spec_file)
    layers = build_layers(spec, seed=1)
    if recompute:
        set_recompute(layers, ("*.layer.*", "image.block.*"))
    network = PARTITION.to_pipe(layers, devices) if devices else nn.Sequential(*layers)
    first, last = (devices[0], devices[-1]) if devices else ("cpu", "cpu")
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(1, spec.text.vocab_size, (ROWS, spec.masked_positions), generator=generator)
    targets = Targets(labels, torch.arange(ROWS)[:, None].expand(ROWS, 2).contiguous())
    outputs = network(example_state(spec, ROWS, device=first))
    Objectives(spec)(outputs, tuple(tensor.to(last) for tensor in targets)).total.backward()
    found = {
        f"{layer.name}/{key}": parameter.grad.cpu()
        for layer in layers
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    if devices:
        del network.pipeline
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_equal_those_of_one_process(devices: str, recompute: bool, tiny_spec_file: Path) -> None:
    expected = gradients(tiny_spec_file, None)
    found = gradients(tiny_spec_file, DEVICES[devices], recompute)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-3)


def test_parameter_shared_by_a_gpu_and_a_cpu_stage_is_refused(tiny_spec_file: Path) -> None:
    layers = build_layers(load_spec(tiny_spec_file))
    layers[-1].module.vocabulary.bias = layers[0].module.vit.patch_embed.proj.bias
    with pytest.raises(UserError, match="stages 'image' and 'rest' share the parameter"):
        PARTITION.to_pipe(layers, ["cuda:0", "cpu"])


def test_stages_run_in_bf16_on_both_devices(tiny_spec_file: Path) -> None:
    spec = load_spec(tiny_spec_file)
    layers = build_layers(spec)
    set_autocast(layers, torch.bfloat16)
    seen: set[tuple[str, torch.dtype]] = set()
    for module in nn.ModuleList(layers).modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, inputs, output: seen.add((output.device.type, output.dtype))
            )
    pipe = PARTITION.to_pipe(layers, ["cuda:0", "cpu"])
    pipe(example_state(spec, ROWS, device="cuda:0"))
    del pipe.pipeline
    assert seen == {("cuda", torch.bfloat16), ("cpu", torch.bfloat16)}


def test_time_is_measured_on_the_gpu(tiny_spec_file: Path) -> None:
    spec = load_spec(tiny_spec_file)
    costs = timed_costs(spec, build_layers(spec), torch.device("cuda"))
    assert len(costs) == len(layer_names(spec)) and min(costs) > 0
    assert sum(balance(costs, 2)) == len(costs)
