"""``build_layers``: from a spec to the flat list of named layers that everything else derives from."""

import contextlib
from functools import lru_cache

import torch
from torch import nn

from models.fusion import fusion_layers
from models.image import create_vit, image_layers
from models.layer import Layer
from models.spec import ModelSpec
from models.text import bert_config, initialise, text_layers


def build_layers(spec: ModelSpec, *, seed: int = 0, device: str | torch.device | None = None) -> list[Layer]:
    """Build the layers in order: image tower, text tower, fusion, head.

    The same spec and seed give the same weights, whatever ran before; ``device="meta"`` gives shapes
    without memory. Pretrained weights are loaded where the spec names them (not on meta).

    Raises UserError for a model that timm does not know or weights that do not fit.
    """
    where = torch.device(device) if device is not None else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), where:
        torch.manual_seed(seed)
        vit = create_vit(spec)
        width, has_class_token = vit.embed_dim, vit.cls_token is not None
        config = bert_config(spec)
        text = text_layers(config)
        fusion = fusion_layers(spec, width, has_class_token)
        for _, module in text + fusion:
            initialise(module)
    if device is None or torch.device(device).type != "meta":
        from models.pretrained import load_image_tower, load_text_tower

        if spec.image.pretrained:
            load_image_tower(vit, spec)
        if spec.text.pretrained:
            load_text_tower(dict(text), spec)
    named = image_layers(vit) + text + fusion
    for name, module in named:
        if is_frozen(spec, name):
            module.requires_grad_(False)
    return [Layer(name, module) for name, module in named]


def is_frozen(spec: ModelSpec, name: str) -> bool:
    """Tell whether the layer of this name is not trained."""
    tower = name.split(".")[0]
    return (tower == "image" and spec.image.frozen) or (tower == "text" and spec.text.frozen)


def layer_names(spec: ModelSpec) -> list[str]:
    """Give the names of the layers without building any."""
    depth = spec.image.depth or _depth_of_timm(spec)
    return [
        "image.embed",
        *(f"image.block.{index}" for index in range(depth)),
        "image.norm",
        "text.embed",
        *(f"text.layer.{index}" for index in range(spec.text.layers)),
        "fusion.embed",
        *(f"fusion.layer.{index}" for index in range(spec.fusion.layers)),
        "head",
    ]


def parameter_count(layers: list[Layer]) -> int:
    """Give the number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in nn.ModuleList(layers).parameters())


@lru_cache(maxsize=64)
def _depth_of_timm(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return len(create_vit(spec).blocks)
