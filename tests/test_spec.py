"""Model specs: what loads, and what is refused in one line."""

import copy
from pathlib import Path

import pytest
import timm
import torch
import yaml
from conftest import TINY
from torch import nn
from transformers import BertConfig, BertModel

from models.build import build_layers, layer_names, parameter_count
from models.errors import UserError
from models.spec import SPEC_FOLDER, load_spec


def write(folder: Path, **changes: object) -> Path:
    """The tiny spec with ``section__key=value`` changed, as a file."""
    data = copy.deepcopy(TINY)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = data
        for section in sections:
            place = place[section]
        place[key] = value
    file = folder / "spec.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.mark.parametrize("name", sorted(path.stem for path in SPEC_FOLDER.glob("*.yaml")))
def test_shipped_specs_load_by_name_and_survive_dumping(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    assert spec.name == name
    (tmp_path / "again.yaml").write_text(spec.dump_yaml())
    assert load_spec(tmp_path / "again.yaml") == spec


BAD = {
    "unknown key": ({"text__widht": 3}, ["text.widht", "width"]),
    "wrong type": ({"text__layers": "2"}, ["text.layers"]),
    "fraction": ({"text__layers": 2.5}, ["text.layers"]),
    "zero layers": ({"fusion__layers": 0}, ["fusion.layers"]),
    "heads do not divide the width": ({"text__heads": 3}, ["text", "3 heads do not divide the width 32"]),
    "heads of the fusion": ({"fusion__heads": 5}, ["fusion", "5 heads do not divide"]),
    "heads of the image": ({"image__heads": 3}, ["image", "3 heads do not divide"]),
    "text beyond the positions": ({"text__length": 33}, ["text", "beyond the position table of 32 rows"]),
    "patch does not divide": ({"image__size": 40}, ["image", "size 40 is not a multiple of the patch 16"]),
    "no objectives": ({"objectives": {}}, ["objectives", "all objectives are off"]),
    "negatives": ({"objectives__itm": {"negatives": 4, "group": 4}}, ["objectives.itm", "group of 4"]),
    "pad outside": ({"text__pad_token_id": 128}, ["text", "outside the vocabulary of 128"]),
    "attention": ({"attention": "flash"}, ["attention", "sdpa"]),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_spec_is_one_line_with_file_and_key(case: str, tmp_path: Path) -> None:
    changes, words = BAD[case]
    path = write(tmp_path, **changes)
    with pytest.raises(UserError) as refused:
        load_spec(path)
    message = str(refused.value)
    assert len(message.splitlines()) <= 2 and str(path) in message
    assert all(word in message for word in words), message


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="bert_vit_base, bert_vit_large, demo"):
        load_spec("bert_vit_huge")


TIMM = {
    "unknown": ("vit_tiny_patch17_224", "is not a model of timm"),
    "not a transformer": ("resnet18", "not a plain Vision Transformer"),
    "another transformer": ("swin_tiny_patch4_window7_224", "not a plain Vision Transformer"),
}


@pytest.mark.parametrize("case", TIMM)
def test_timm_model_that_is_no_plain_vit_is_refused(case: str, tmp_path: Path) -> None:
    name, words = TIMM[case]
    image = {"timm": name, "size": 224}
    with pytest.raises(UserError) as refused:
        build_layers(load_spec(write(tmp_path, image=image)), device="meta")
    assert words in str(refused.value) and name in str(refused.value)


def test_patch_of_the_timm_model_must_divide_the_size(tmp_path: Path) -> None:
    image = {"timm": "vit_tiny_patch16_224", "size": 100}
    with pytest.raises(UserError, match=r"100"):
        build_layers(load_spec(write(tmp_path, image=image)), device="meta")


def test_towers_of_bert_vit_base_have_the_sizes_of_the_libraries() -> None:
    spec = load_spec("bert_vit_base")
    layers = build_layers(spec, device="meta")
    assert [layer.name for layer in layers] == layer_names(spec)
    towers = {
        tower: [layer for layer in layers if layer.name.startswith(tower)] for tower in ("image", "text")
    }
    with torch.device("meta"):
        bert = BertModel(BertConfig(), add_pooling_layer=False)
        vit = timm.create_model("vit_base_patch16_224", num_classes=0)
    assert parameter_count(towers["text"]) == sum(p.numel() for p in bert.parameters())
    assert parameter_count(towers["image"]) == sum(p.numel() for p in vit.parameters())
    assert len([layer for layer in layers if layer.name.startswith("fusion.layer")]) == 6
    assert all(isinstance(layer, nn.Module) for layer in layers)
