"""Image tower: timm's Vision Transformer, cut into layers.

The modules are timm's own (``timm.models.vision_transformer``, after Dosovitskiy et al., "An Image is Worth
16x16 Words", 2021), so any weights that timm can load fit.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.errors import UserError
from models.spec import ImageSpec, ModelSpec
from models.state import State


def create_vit(spec: ModelSpec) -> Any:
    """Build timm's model without its classifier, at the spec's size.

    Raises UserError where timm does not know the name, the model is no plain ViT, or the sizes disagree.
    """
    import timm
    from timm.models.vision_transformer import VisionTransformer

    image = spec.image
    overrides = {
        "patch_size": image.patch,
        "embed_dim": image.width,
        "depth": image.depth,
        "num_heads": image.heads,
    }
    where = f"model {spec.name}: image.timm: {image.timm}"
    if not timm.is_model(image.timm):
        near = timm.list_models(f"{image.timm.split('_')[0]}*patch*") or timm.list_models("vit_*")
        raise UserError(f"{where} is not a model of timm {timm.__version__}; for example '{near[0]}'")
    try:
        vit = timm.create_model(
            image.timm,
            img_size=image.size,
            num_classes=0,
            # Without pooling the last norm stays in place; a distilled model insists on its two tokens.
            global_pool="token" if "distilled" in image.timm else "",
            proj_drop_rate=image.dropout,
            drop_path_rate=image.drop_path,
            **{key: value for key, value in overrides.items() if value is not None},
        )
    except TypeError as error:
        raise UserError(f"{where} is not a plain Vision Transformer of timm: {error}") from error
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{where} cannot be built with these sizes: {error or 'sizes do not divide'}"
        ) from error
    if not isinstance(vit, VisionTransformer):
        raise UserError(
            f"{where} is a {type(vit).__name__}, not a plain Vision Transformer; take a vit_* or deit_*"
        )
    patch = vit.patch_embed.patch_size
    if image.size % patch[0] or image.size % patch[1]:
        raise UserError(f"{where}: size {image.size} is not a multiple of its patch {patch[0]}")
    if spec.attention == "eager":
        for block in vit.blocks:
            block.attn.fused_attn = False
    return vit


def image_layers(vit: Any) -> list[tuple[str, nn.Module]]:
    """Cut a timm ViT into ``image.embed``, its blocks and ``image.norm``."""
    blocks = list(vit.blocks)
    norm = vit.norm
    # What is left of timm's module is its embedding, whose own methods stay in use.
    vit.blocks, vit.norm = nn.Sequential(), nn.Identity()
    return [
        ("image.embed", ImageEmbed(vit)),
        *((f"image.block.{index}", ImageStep(block)) for index, block in enumerate(blocks)),
        ("image.norm", ImageStep(norm)),
    ]


def pixel_statistics(spec: ImageSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel that the timm weights of this name were trained with."""
    import timm

    config = timm.get_pretrained_cfg(spec.timm)
    if config is None:
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    return tuple(config.mean), tuple(config.std)


def normalise_pixels(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [B,3,S,S] → float32 [B,3,S,S], on the images' own device."""
    shape = (1, 3, 1, 1)
    mean_C, std_C = (torch.tensor(values, device=images.device).view(shape) for values in (mean, std))
    return images.to(torch.float32).div_(255).sub_(mean_C).div_(std_C)


class ImageEmbed(nn.Module):
    """Pixels [B,3,S,S] → patch, prefix and position embeddings [B,N,D]."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        vit = self.vit
        pixels = state.image.to(vit.patch_embed.proj.weight.dtype)
        x_BND = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(pixels))))
        return tuple(state._replace(image=x_BND))


class ImageStep(nn.Module):
    """A timm block, or the last norm, on the image tokens [B,N,D]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        return tuple(state._replace(image=self.block(state.image)))
