"""Fusion: pairs of images and captions through cross-attention, and the head on top.

Each image meets K captions: its own and, for image-text matching, wrong ones that look right. Pairs are
grouped by image, [B,K,L,D], so that the keys and values of the image tokens are computed once per image and
never copied, whatever K is. The structure of a layer is ALBEF's (Li et al., 2021, "Align before Fuse"):
self-attention, cross-attention from text to image, feed-forward; the modules are BERT's from transformers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertIntermediate,
    BertOutput,
    BertPredictionHeadTransform,
)

from models.spec import ModelSpec
from models.state import State
from models.text import attention_bias

LARGEST_SCALE = 100.0
"""CLIP's bound on 1 / temperature (Radford et al., 2021, section 2.5)."""


def fusion_config(spec: ModelSpec) -> BertConfig:
    """Give the fusion's sizes as a transformers config."""
    fusion = spec.fusion
    config = BertConfig(
        vocab_size=spec.text.vocab_size,
        hidden_size=fusion.width,
        num_attention_heads=fusion.heads,
        intermediate_size=fusion.feed_forward,
        hidden_dropout_prob=fusion.dropout,
        attention_probs_dropout_prob=fusion.attention_dropout,
    )
    config._attn_implementation = spec.attention
    return config


def fusion_layers(spec: ModelSpec, image_width: int, has_class_token: bool) -> list[tuple[str, nn.Module]]:
    """Give ``fusion.embed``, the fusion layers and ``head``."""
    config = fusion_config(spec)
    return [
        ("fusion.embed", FusionEmbed(spec, image_width, has_class_token)),
        *((f"fusion.layer.{index}", FusionLayer(config)) for index in range(spec.fusion.layers)),
        ("head", Head(spec, config)),
    ]


class FusionEmbed(nn.Module):
    """Projects both towers to the ITC space, draws the ITM negatives and lines up the pairs.

    The negatives are drawn without replacement with probability ∝ exp(ITC logit), from fp32 logits, by the
    Gumbel-top-k trick (Kool et al., 2019) with the random bits that came with the row: the draw is part of
    the data, so recomputation, chunks and ranks cannot change it. Without ITC the draw is uniform.
    """

    def __init__(self, spec: ModelSpec, image_width: int, has_class_token: bool) -> None:
        super().__init__()
        self.negatives = spec.pairs - 1
        itc = spec.objectives.itc
        self.mean = itc is not None and itc.pooling == "mean"
        self.has_class_token = has_class_token
        if itc is not None:
            self.image_feature = nn.Linear(image_width, itc.width)
            self.text_feature = nn.Linear(spec.text.width, itc.width)
            # Shape (1,), not (): DeepSpeed 0.19 crashes on a 0-dim parameter in initialize.
            self.scale = nn.Parameter(torch.tensor([1 / itc.temperature]).log())
        self.contrastive = itc is not None
        self.image_projection = _projection(image_width, spec.fusion.width)
        self.text_projection = _projection(spec.text.width, spec.fusion.width)

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        features_B2E = self.features(state) if self.contrastive else None
        text_BLD = self.text_projection(state.text)
        chosen_BK, usable_BK = self.pairs(features_B2E, state.pairing, state.keys)
        return tuple(
            State(
                image=self.image_projection(state.image),
                text=text_BLD[chosen_BK] if self.negatives else text_BLD[:, None],
                pairing=state.pairing if features_B2E is None else features_B2E,
                mask=state.mask[chosen_BK],
                keys=usable_BK,
                positions=state.positions,
            )
        )

    def features(self, state: State) -> Tensor:
        """Unit vectors of image and text in fp32 [B,2,E]; the image's are multiplied by 1 / temperature."""
        if self.mean:
            weight_BL1 = (state.mask / state.mask.sum(dim=1, keepdim=True)).to(state.text.dtype)[:, :, None]
            image_BD, text_BD = state.image.mean(dim=1), (state.text * weight_BL1).sum(dim=1)
        else:
            image_BD = state.image[:, 0] if self.has_class_token else state.image.mean(dim=1)
            text_BD = state.text[:, 0]
        image_BE = functional.normalize(self.image_feature(image_BD).float(), dim=-1)
        text_BE = functional.normalize(self.text_feature(text_BD).float(), dim=-1)
        scale = self.scale.float().exp().clamp(max=LARGEST_SCALE)
        return torch.stack([image_BE * scale, text_BE], dim=1)

    @torch.no_grad()
    def pairs(self, features_B2E: Tensor | None, bits_BG: Tensor, keys_B4: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers of the K captions of each image, and which of them are usable, both [B,K].

        A caption can be a negative if it is in the image's group and shares neither image nor caption id.
        """
        own_B1 = torch.arange(len(keys_B4), device=keys_B4.device)[:, None]
        usable_B1 = torch.ones_like(own_B1, dtype=torch.bool)
        if not self.negatives:
            return own_B1, usable_B1
        image_id, caption_id, group, place = keys_B4.unbind(dim=1)
        candidate_BB = group[:, None] == group[None, :]
        candidate_BB &= image_id[:, None] != image_id[None, :]
        candidate_BB &= caption_id[:, None] != caption_id[None, :]
        # Uniform in (0, 1): the middle of one of 2^24 steps, exact in fp32.
        uniform_BG = ((bits_BG & 0xFFFFFF).float() + 0.5) / 2**24
        gumbel_BB = -(-uniform_BG.log()).log().gather(1, place[None, :].expand(len(place), -1))
        score_BB = gumbel_BB
        if features_B2E is not None:
            score_BB = score_BB + features_B2E[:, 0] @ features_B2E[:, 1].T
        score_BB = score_BB.masked_fill(~candidate_BB, -torch.inf)
        few = max(0, self.negatives - score_BB.shape[1])
        best = score_BB.topk(self.negatives - few, dim=1)
        chosen_BK = torch.cat([own_B1, best.indices, own_B1.expand(-1, few)], dim=1)
        usable_BK = torch.cat([usable_B1, best.values > -torch.inf, ~usable_B1.expand(-1, few)], dim=1)
        # An unusable pair is the own caption again: some other row would depend on the micro-batch.
        return chosen_BK.where(usable_BK, own_B1), usable_BK


class FusionLayer(nn.Module):
    """Self-attention, cross-attention and feed-forward on K captions per image.

    text [B,K,L,D] attends to itself within a caption, then, as K·L queries, to its image's tokens [B,N,D].
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self_attention = BertAttention(config)
        self.cross_attention = BertAttention(config, is_cross_attention=True)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)
        self.eager = config._attn_implementation == "eager"

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        B, K, L, D = state.text.shape
        bias = attention_bias(state.mask.flatten(0, 1), state.text.dtype, self.eager)
        x = self.self_attention(state.text.flatten(0, 1), bias)[0]
        x = self.cross_attention(x.view(B, K * L, D), encoder_hidden_states=state.image)[0]
        x = self.output(self.intermediate(x), x)
        return tuple(state._replace(text=x.view(B, K, L, D)))


class Head(nn.Module):
    """ITM logits from each pair's [CLS]; MLM logits at the masked positions of the own caption only.

    No tensor of batch × length × vocabulary exists: M positions are picked before the vocabulary.
    The image tokens end here; what the loss needs is in the six slots (see ``models.state``).
    """

    def __init__(self, spec: ModelSpec, config: BertConfig) -> None:
        super().__init__()
        self.matching = nn.Linear(config.hidden_size, 2) if spec.objectives.itm else None
        if spec.objectives.mlm:
            self.transform = BertPredictionHeadTransform(config)
            self.vocabulary = nn.Linear(config.hidden_size, config.vocab_size)
        self.masked = spec.objectives.mlm is not None

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        text_BKD = state.text[:, :, 0]
        matching_BK2 = text_BKD[:, :, :0] if self.matching is None else self.matching(text_BKD)
        if self.masked:
            index = state.positions[:, :, None].expand(-1, -1, state.text.shape[-1])
            masked_BMD = state.text[:, 0].gather(1, index)
            words_BMV = self.vocabulary(self.transform(masked_BMD))
        else:
            words_BMV = text_BKD[:, :0]
        return tuple(state._replace(image=matching_BK2, text=words_BMV))


def _projection(width: int, to_width: int) -> nn.Module:
    return nn.Identity() if width == to_width else nn.Linear(width, to_width)
