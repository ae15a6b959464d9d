"""What a micro-batch costs in activations, where the memory model has no better answer.

The stated formula is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), equation 1: a transformer layer keeps s·b·h·(34 + 5·a·s/h) bytes in 16-bit precision, for s
tokens, b rows, width h and a heads. A cross-attention adds about a layer's attention part (11 of the 34)
and its weights over image tokens.
"""

from dataclasses import dataclass

from launcher.data.batches import Cost


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


def auto_budget(cost: Cost, micro_batch: int, length: int) -> int:
    """``--batch-memory auto``: what the fixed micro-batch would take at full length."""
    return cost(micro_batch, length)
