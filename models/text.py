"""Text tower: BERT's embeddings and encoder layers, as ``transformers`` builds them.

Devlin et al., "BERT", 2019; the modules are those of ``transformers.models.bert.modeling_bert``.
"""

import torch
from torch import Tensor, nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

from models.spec import ModelSpec
from models.state import State


def bert_config(spec: ModelSpec) -> BertConfig:
    """Give the spec's text tower as a transformers config."""
    text = spec.text
    config = BertConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.width,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        intermediate_size=text.feed_forward,
        max_position_embeddings=text.positions,
        hidden_dropout_prob=text.dropout,
        attention_probs_dropout_prob=text.attention_dropout,
        pad_token_id=text.pad_token_id,
    )
    config._attn_implementation = spec.attention
    return config


def text_layers(config: BertConfig) -> list[tuple[str, nn.Module]]:
    """Give ``text.embed`` and the encoder layers."""
    return [
        ("text.embed", TextEmbed(config)),
        *((f"text.layer.{index}", TextStep(config)) for index in range(config.num_hidden_layers)),
    ]


def attention_bias(mask_BL: Tensor, dtype: torch.dtype, eager: bool) -> Tensor:
    """Give the mask [B,1,1,L] that BERT's attention takes: true = attend, or additive for ``eager``."""
    mask = mask_BL[:, None, None, :]
    if not eager:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def initialise(module: nn.Module) -> None:
    """BERT's initialisation: normal with deviation 0.02, biases and padding zero, norms one."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            with torch.no_grad():
                part.weight[part.padding_idx].zero_()


class TextEmbed(nn.Module):
    """Token ids [B,L] → embeddings [B,L,D]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        return tuple(state._replace(text=self.embeddings(state.text)))


class TextStep(nn.Module):
    """One BERT encoder layer on [B,L,D]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = BertLayer(config)
        self.eager = config._attn_implementation == "eager"

    def forward(self, *slots: Tensor) -> tuple[Tensor, ...]:
        state = State(*slots)
        bias = attention_bias(state.mask, state.text.dtype, self.eager)
        return tuple(state._replace(text=self.layer(state.text, bias)))
