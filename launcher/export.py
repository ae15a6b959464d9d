"""A trained run as files for others: BERT for transformers, ViT for timm, the rest by layer name.

    OUT/text/       config.json, model.safetensors       transformers.BertModel.from_pretrained
    OUT/image/      model.safetensors                    timm.create_model(…, checkpoint_path=…)
    OUT/fusion.safetensors                               keyed "layer/parameter"
    OUT/model.yaml                                       the spec
    OUT/image/timm.json                                  the arguments of timm.create_model

Weights of a checkpoint are keyed by layer name, so every engine's run is exported alike. ``models.pretrained``
is the inverse.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher.checkpoint import find
from models.build import build_layers
from models.errors import UserError
from models.image import create_vit
from models.spec import ModelSpec, load_spec
from models.text import bert_config


def export(run: Path, out: Path) -> Path:
    """Write the newest good checkpoint of ``run`` (or one checkpoint) into ``out``; gives the checkpoint."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not an empty folder; give another place")
    found = find(str(run), None)
    assert found is not None  # an explicit place gives a checkpoint or an error
    checkpoint = found.path
    spec_file = checkpoint.parents[1] / "plan" / "model.yaml"
    if not spec_file.is_file():
        raise UserError(f"{spec_file} is missing: the checkpoint no longer lies in its run directory")
    spec = load_spec(spec_file).without_weights()
    weights = load_file(checkpoint / "model.safetensors")
    (out / "text").mkdir(parents=True)
    (out / "image").mkdir()
    _export_text(spec, weights, out / "text")
    _export_image(spec, weights, out / "image")
    fusion = {key: value for key, value in weights.items() if not key.startswith(("text.", "image."))}
    save_file(fusion, out / "fusion.safetensors")
    (out / "model.yaml").write_text(spec.dump_yaml())
    return checkpoint


def timm_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Give the arguments with which ``timm.create_model`` builds the image tower."""
    image = spec.image
    sizes = {
        "patch_size": image.patch,
        "embed_dim": image.width,
        "depth": image.depth,
        "num_heads": image.heads,
    }
    return {
        "model_name": image.timm,
        "img_size": image.size,
        "num_classes": 0,
        "global_pool": "token" if "distilled" in image.timm else "",
        **{key: value for key, value in sizes.items() if value is not None},
    }


def _export_text(spec: ModelSpec, weights: dict[str, Tensor], folder: Path) -> None:
    """A whole BertModel, with its pooler: ``from_pretrained`` wants one by default; ours is not trained."""
    from transformers import BertModel

    bert = BertModel(bert_config(spec))
    bert.embeddings.load_state_dict(_of(weights, "text.embed/embeddings."))
    for index, layer in enumerate(bert.encoder.layer):
        layer.load_state_dict(_of(weights, f"text.layer.{index}/layer."))
    with torch.no_grad():  # the identity, but for tanh
        torch.nn.init.eye_(bert.pooler.dense.weight)
        torch.nn.init.zeros_(bert.pooler.dense.bias)
    bert.save_pretrained(folder)


def _export_image(spec: ModelSpec, weights: dict[str, Tensor], folder: Path) -> None:
    vit = create_vit(spec)
    state = _of(weights, "image.embed/vit.") | {
        f"norm.{key}": value for key, value in _of(weights, "image.norm/block.").items()
    }
    for index in range(len(vit.blocks)):
        block = _of(weights, f"image.block.{index}/block.")
        state |= {f"blocks.{index}.{key}": value for key, value in block.items()}
    vit.load_state_dict(state)  # strict: a name that timm does not know is an error here, not at the user's
    save_file(state, folder / "model.safetensors")
    (folder / "timm.json").write_text(json.dumps(timm_arguments(spec), indent=1) + "\n")


def _of(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def load_exported(out: Path) -> tuple[ModelSpec, list[Any]]:
    """Build the layers of an exported run, from its files alone: what shows that nothing is missing."""
    spec = load_spec(out / "model.yaml")
    image = spec.image.model_copy(update={"pretrained": str(out / "image" / "model.safetensors")})
    text = spec.text.model_copy(update={"pretrained": str(out / "text")})
    layers = build_layers(spec.model_copy(update={"image": image, "text": text}))
    fusion = load_file(out / "fusion.safetensors")
    for layer in layers:
        if not layer.name.startswith(("image.", "text.")):
            layer.module.load_state_dict(_of(fusion, f"{layer.name}/"))
    return spec, layers
