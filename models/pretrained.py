"""Pretrained towers: BERT from a Hugging Face id or folder, ViT from timm or a safetensors file.

Weights must fit by name and shape. What is left out on purpose (a pooler, a classifier, an MLM head) is
named in ``LEFT_OUT``; any other missing or unexpected key is refused by name.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import UserError
from models.spec import ModelSpec

logger = logging.getLogger(__name__)

LEFT_OUT = {
    "text": ("pooler.", "cls."),
    "image": ("head.", "head_dist.", "fc_norm.", "attn_pool.", "pre_logits."),
}
"""Prefixes of weights that belong to other tasks' heads, not to a tower."""


def load_text_tower(modules: dict[str, Any], spec: ModelSpec) -> None:
    """Load a BERT into the text layers of one spec.

    Raises UserError: not found, another size than the spec's, missing or unexpected keys.
    """
    from transformers import BertConfig, BertModel

    source, where = spec.text.pretrained, f"model {spec.name}: text.pretrained: {spec.text.pretrained}"
    if source is None:
        return
    # transformers takes BERT-base's sizes, silently, for a folder without a config
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(f"{where} cannot be loaded: the folder has no config.json")
    try:
        config = BertConfig.from_pretrained(source)
        sizes = {
            "vocab_size": config.vocab_size,
            "width": config.hidden_size,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "feed_forward": config.intermediate_size,
            "positions": config.max_position_embeddings,
        }
        for key, value in sizes.items():
            if getattr(spec.text, key) != value:
                raise UserError(
                    f"{where} has {key} {value}; the spec's text.{key} is {getattr(spec.text, key)}"
                )
        bert, info = BertModel.from_pretrained(
            source, add_pooling_layer=False, output_loading_info=True, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be loaded: {_first_line(error)}") from error
    _refuse(where, info["missing_keys"], info["unexpected_keys"], "text")
    modules["text.embed"].embeddings.load_state_dict(bert.embeddings.state_dict())
    for index, layer in enumerate(bert.encoder.layer):
        modules[f"text.layer.{index}"].layer.load_state_dict(layer.state_dict())


def load_image_tower(vit: Any, spec: ModelSpec) -> None:
    """Load weights into a timm ViT; position embeddings are resampled to the spec's image size, and said so.

    Raises UserError: not found, unreadable, shapes, missing or unexpected keys.
    """
    from timm.models.vision_transformer import checkpoint_filter_fn

    source = spec.image.pretrained
    where = f"model {spec.name}: image.pretrained: {source}"
    weights = _timm_weights(spec, where) if source is True else _read_weights(Path(str(source)), where)
    before = weights["pos_embed"].shape if "pos_embed" in weights else None
    weights = checkpoint_filter_fn(weights, vit)
    weights = {key: value for key, value in weights.items() if not key.startswith(LEFT_OUT["image"])}
    own = vit.state_dict()
    _refuse(where, own.keys() - weights.keys(), weights.keys() - own.keys(), "image")
    for key, value in weights.items():
        if value.shape != own[key].shape:
            raise UserError(
                f"{where}: {key} is {tuple(value.shape)}; the spec makes it {tuple(own[key].shape)}"
            )
    vit.load_state_dict(weights)
    if before is not None and before != own["pos_embed"].shape:
        logger.warning(
            "image.pretrained: positions resampled from %d to %d tokens for size %d",
            before[1],
            own["pos_embed"].shape[1],
            spec.image.size,
        )


def _timm_weights(spec: ModelSpec, where: str) -> dict[str, Tensor]:
    import timm

    try:
        return timm.create_model(spec.image.timm, pretrained=True, num_classes=0).state_dict()
    except Exception as error:  # the hub's client raises many kinds, all meaning "not to be had"
        raise UserError(f"{where}: timm cannot get '{spec.image.timm}': {_first_line(error)}") from error


def _read_weights(path: Path, where: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise UserError(f"{where}: no such file; give true for timm's own weights or a .safetensors file")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: not a readable safetensors file: {_first_line(error)}") from error


def _refuse(where: str, missing: Iterable[str], unexpected: Iterable[str], tower: str) -> None:
    missing = sorted(missing)
    unexpected = sorted(key for key in unexpected if not key.startswith(LEFT_OUT[tower]))
    if missing or unexpected:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has the unknown {_some(unexpected)}"] * bool(
            unexpected
        )
        raise UserError(f"{where} {' and '.join(parts)}")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
