"""ModelSpec: what a vision-language model is made of, as a closed YAML schema.

A spec file (``models/specs/NAME.yaml``) holds sizes and objectives only. Nothing in it speaks of
precision, devices, stages or recomputation: those live in the plan files.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, model_validator

from models.errors import UserError
from models.schema import ClosedModel, load_yaml

SPEC_FOLDER = Path(__file__).parent / "specs"

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0)]


class ImageSpec(ClosedModel):
    """The image tower: a ViT that timm names, optionally resized."""

    timm: str
    """A timm model name, such as ``vit_base_patch16_224``."""
    size: Positive
    """Image side in pixels; the patch side must divide it."""
    patch: Positive | None = None
    """Patch side in pixels; None keeps the one of the timm model (likewise width, depth, heads)."""
    width: Positive | None = None
    depth: Positive | None = None
    heads: Positive | None = None
    dropout: Probability = 0.0
    drop_path: Probability = 0.0
    pretrained: str | bool | None = None
    """True: timm's own weights of this name; a string: a safetensors file; None: random."""
    frozen: bool = False

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.patch and self.size % self.patch:
            raise ValueError(f"size {self.size} is not a multiple of the patch {self.patch}")
        _heads_divide(self.heads, self.width)
        return self


class TextSpec(ClosedModel):
    """The text tower: BERT's embeddings and encoder layers."""

    vocab_size: Positive
    width: Positive
    layers: Positive
    heads: Positive
    feed_forward: Positive
    positions: Positive = 512
    """Rows of the position table."""
    length: Annotated[int, Field(ge=2)]
    """Tokens of a caption in training, [CLS] and [SEP] included; longer captions are cut."""
    pad_token_id: Annotated[int, Field(ge=0)] = 0
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    pretrained: str | None = None
    """A Hugging Face id or a local folder; None: random."""
    frozen: bool = False

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        _heads_divide(self.heads, self.width)
        if self.length > self.positions:
            raise ValueError(f"length {self.length} is beyond the position table of {self.positions} rows")
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id {self.pad_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        return self


class FusionSpec(ClosedModel):
    """The fusion: layers of self-attention, text-to-image cross-attention and feed-forward."""

    layers: Positive
    width: Positive
    heads: Positive
    feed_forward: Positive
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.1

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        _heads_divide(self.heads, self.width)
        return self


class ContrastiveSpec(ClosedModel):
    """Image-text contrastive loss (ITC)."""

    weight: Weight = 1.0
    width: Positive = 256
    """Width of the space that both towers are projected to."""
    temperature: Annotated[float, Field(gt=0, le=1)] = 0.07
    """Initial temperature; learned."""
    pooling: Literal["first", "mean"] = "first"
    """What stands for a whole image or caption: its first token ([CLS]), or the mean of its tokens, which
    learns sooner without pretrained towers."""


class MatchingSpec(ClosedModel):
    """Image-text matching (ITM): does this caption belong to this image?

    Each image is paired with its own caption and with ``negatives`` wrong ones, drawn by likeness
    from its group: ``group`` neighbouring rows of the global batch. Groups, not micro-batches, so that
    the draw does not depend on how rows are split over micro-batches and ranks.
    """

    weight: Weight = 1.0
    negatives: Positive = 1
    group: Annotated[int, Field(ge=2)] = 4

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.negatives >= self.group:
            raise ValueError(f"{self.negatives} negatives cannot be drawn from a group of {self.group} rows")
        return self


class MaskedSpec(ClosedModel):
    """Masked language modelling (MLM)."""

    weight: Weight = 1.0
    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15


class ObjectivesSpec(ClosedModel):
    """The losses, each with a weight; null leaves one out."""

    itc: ContrastiveSpec | None = None
    itm: MatchingSpec | None = None
    mlm: MaskedSpec | None = None

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not (self.itc or self.itm or self.mlm):
            raise ValueError("all objectives are off; give at least one of itc, itm, mlm")
        return self


class ModelSpec(ClosedModel):
    """A whole model. Frozen after validation; equal specs are equal objects."""

    name: str
    image: ImageSpec
    text: TextSpec
    fusion: FusionSpec
    objectives: ObjectivesSpec
    attention: Literal["sdpa", "eager"] = "sdpa"
    """``sdpa``: torch's fused kernels; ``eager``: matmul, softmax, matmul, which stores L × L weights."""

    @property
    def pairs(self) -> int:
        """K: captions that each image meets in the fusion (its own and the ITM negatives)."""
        return 1 + (self.objectives.itm.negatives if self.objectives.itm else 0)

    @property
    def group(self) -> int:
        """G: rows of one ITM group; 1 without ITM."""
        return self.objectives.itm.group if self.objectives.itm else 1

    @property
    def masked_positions(self) -> int:
        """M: places for masked tokens in each row; 1, unused, without MLM (no slot of the state is empty)."""
        if not self.objectives.mlm:
            return 1
        # [CLS] and [SEP] are never masked.
        return max(1, round((self.text.length - 2) * self.objectives.mlm.probability))

    def without_weights(self) -> Self:
        """The same model, built from random weights."""
        towers = {
            name: getattr(self, name).model_copy(update={"pretrained": None}) for name in ("image", "text")
        }
        return self.model_copy(update=towers)

    def dump_yaml(self) -> str:
        """Give the spec as YAML, without what equals the default."""
        return yaml.safe_dump(
            self.model_dump(exclude_defaults=True), sort_keys=False, default_flow_style=None, width=110
        )


def load_spec(path: str | Path) -> ModelSpec:
    """Read a spec from a YAML file, or by its name in ``models/specs``.

    Raises UserError with file and key: unreadable file, unknown key, wrong type, sizes that disagree.
    """
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        named = SPEC_FOLDER / f"{path}.yaml"
        if not named.is_file():
            known = ", ".join(sorted(entry.stem for entry in SPEC_FOLDER.glob("*.yaml")))
            raise UserError(f"{path}: no such model spec; give a .yaml file or one of: {known}")
        file = named
    return load_yaml(file, ModelSpec)


def _heads_divide(heads: int | None, width: int | None) -> None:
    if heads and width and width % heads:
        raise ValueError(f"{heads} heads do not divide the width {width}")
