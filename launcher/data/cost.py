"""What a micro-batch costs in activations, where the memory model has no better answer.

The stated formula is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), equation 1: a transformer layer keeps s·b·h·(34 + 5·a·s/h) bytes in 16-bit precision, for s
tokens, b rows, width h and a heads. A cross-attention adds about a layer's attention part (11 of the 34)
and its weights over image tokens.
"""

import re
from dataclasses import dataclass
from typing import Self

from launcher.data.batches import Cost
from models.errors import UserError
from models.spec import ModelSpec

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class TransformerShape:
    """One stack of layers."""

    layers: int
    width: int
    heads: int

    def bytes_per_row(self, tokens: int) -> int:
        """Equation 1 for one row, all layers."""
        return self.layers * tokens * (34 * self.width + 5 * self.heads * tokens)


@dataclass(frozen=True)
class ActivationCost:
    """A ``Cost``: image tower (the same for every row), text tower and fusion (with the caption's length)."""

    image: TransformerShape
    image_tokens: int
    text: TransformerShape
    fusion: TransformerShape
    pairs: int = 2
    """Captions that each image meets in the fusion (ITM negatives included)."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Read the shapes of a model from its spec; the image tower's from timm, without any memory."""
        import torch

        from models.image import create_vit

        with torch.device("meta"):
            vit = create_vit(spec)
        text, fusion = spec.text, spec.fusion
        return cls(
            image=TransformerShape(len(vit.blocks), vit.embed_dim, vit.blocks[0].attn.num_heads),
            image_tokens=vit.patch_embed.num_patches + vit.num_prefix_tokens,
            text=TransformerShape(text.layers, text.width, text.heads),
            fusion=TransformerShape(fusion.layers, fusion.width, fusion.heads),
            pairs=spec.pairs,
        )

    def __call__(self, rows: int, tokens: int) -> int:
        """Bytes of ``rows`` rows of ``tokens`` tokens."""
        fusion = self.fusion
        crossed = fusion.layers * tokens * (11 * fusion.width + 5 * fusion.heads * self.image_tokens)
        per_row = (
            self.image.bytes_per_row(self.image_tokens)
            + self.text.bytes_per_row(tokens)
            + self.pairs * (fusion.bytes_per_row(tokens) + crossed)
        )
        return rows * per_row


def budget_bytes(text: str, cost: Cost, micro_batch: int, length: int) -> int:
    """Read ``--batch-memory``: bytes with an optional unit (``2GiB``, ``800M``; powers of 1024), or ``auto``.

    ``auto`` is what the fixed micro-batch takes when every caption has full length. Raises UserError.
    """
    if text == "auto":
        return cost(micro_batch, length)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--batch-memory {text}: give bytes, a size such as 2GiB, or auto")
    return int(float(match[1]) * _UNITS[match[2].upper()])
