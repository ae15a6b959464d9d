"""Exported weights, loaded by the libraries that they are for, against the run's own layers."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY
from safetensors.torch import load_file, save_file

from launcher.checkpoint.files import PARTIAL, described, publish
from launcher.cli import main
from launcher.export import load_exported
from models.build import build_layers
from models.layer import Layer, named_tensors
from models.spec import load_spec
from models.state import State, example_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Layer]]:
    """A run directory with a checkpoint of weights that no seed gives, and its layers."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint = folder / "checkpoints" / f"step-00000001{PARTIAL}"
    checkpoint.mkdir(parents=True)
    (folder / "plan").mkdir()
    (folder / "plan" / "model.yaml").write_text(yaml.safe_dump(TINY))
    layers = build_layers(load_spec(folder / "plan" / "model.yaml"), seed=7)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    save_file(
        {key: value.detach().clone() for key, value in named_tensors(layers).items()},
        checkpoint / "model.safetensors",
    )
    (checkpoint / "state.json").write_text("{}")
    names = ("model.safetensors", "state.json")
    publish(checkpoint, {name: described(checkpoint / name) for name in names}, keep=None)
    return folder, layers


@pytest.fixture(scope="module")
def exported(run: tuple[Path, list[Layer]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["export", str(run[0]), str(out)]) == 0
    return out


def after(layers: list[Layer], prefix: str, state: tuple[torch.Tensor, ...]) -> State:
    with torch.no_grad():
        for layer in layers:
            if layer.name.startswith(prefix):
                state = layer.eval()(state)
    return State(*state)


def test_bert_loads_strictly_and_gives_the_text_towers_output(
    run: tuple[Path, list[Layer]], exported: Path
) -> None:
    from transformers import BertModel

    bert, info = BertModel.from_pretrained(exported / "text", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    state = State(*example_state(load_spec(exported / "model.yaml"), 3))
    with torch.no_grad():
        found = bert.eval()(input_ids=state.text, attention_mask=state.mask.long()).last_hidden_state
    torch.testing.assert_close(found, after(run[1], "text.", state).text, rtol=1e-5, atol=1e-5)


def test_timm_loads_strictly_and_gives_the_image_towers_output(
    run: tuple[Path, list[Layer]], exported: Path
) -> None:
    import timm

    arguments = json.loads((exported / "image" / "timm.json").read_text())
    vit = timm.create_model(**arguments, checkpoint_path=str(exported / "image" / "model.safetensors"))
    state = State(*example_state(load_spec(exported / "model.yaml"), 3))
    with torch.no_grad():
        found = vit.eval().forward_features(state.image)
    torch.testing.assert_close(found, after(run[1], "image.", state).image, rtol=1e-5, atol=1e-5)


def test_files_alone_give_the_whole_model_back(run: tuple[Path, list[Layer]], exported: Path) -> None:
    _, layers = load_exported(exported)
    expected = named_tensors(run[1])
    assert named_tensors(layers).keys() == expected.keys()
    for key, value in named_tensors(layers).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    assert not any(key.startswith(("text.", "image.")) for key in load_file(exported / "fusion.safetensors"))


def test_export_over_something_is_refused(
    run: tuple[Path, list[Layer]], exported: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run[0]), str(exported)]) == 2
    assert "not an empty folder" in capfd.readouterr().err
    assert main(["export", str(exported), str(exported / "again")]) == 2
    assert "holds no checkpoint" in capfd.readouterr().err
