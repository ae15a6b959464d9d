"""Held-out evaluation: loss, and retrieval in both directions.

Retrieval ranks all captions for each image (and the reverse) by ITC. With ITM, only the best few of that
ranking are scored again by the fusion: scoring every pair would take hours on COCO.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from launcher.data.batches import MicroBatch as DataBatch
from launcher.data.loader import StoreBatches
from launcher.data.store import Store
from launcher.engines.engine import Engine
from launcher.inputs import Inputs
from models.losses import Objectives
from models.state import State

RANKS = (1, 5, 10)
RERANKED = 10
"""Candidates of each query that ITM scores again: the deepest rank that is reported."""


def evaluate(
    engine: Engine, objectives: Objectives, store: Store, inputs: Inputs, rows: int, limit: int = 5000
) -> dict[str, float]:
    """Give the mean loss and, where the model has ITC, recall at 1, 5 and 10 over the first ``limit`` samples.

    Every rank evaluates all samples, so that ZeRO-3 gathers weights in step and no rank waits.
    """
    number = min(len(store), limit)
    batches = StoreBatches(store)
    sums: dict[str, float] = {}
    features, images, captions = [], [], []
    for first in range(0, number, rows):
        samples = np.arange(first, min(first + rows, number))
        raw = batches[_request(samples)]
        batch = inputs(raw)
        # Groups of one batch only: losses of rank-local rows, no gather.
        result = objectives(engine.evaluate(batch.state), batch.targets)
        for name, value in {"loss": result.total, **result.terms}.items():
            sums[name] = sums.get(name, 0.0) + float(value) * len(samples)
        if objectives.objectives.itc:
            whole = inputs(raw, masked=False)
            features.append(State(*engine.evaluate(whole.state)).pairing.float().cpu())
            images.append(raw.image_ids)
            captions.append(raw.caption_ids)
    metrics = {name: value / number for name, value in sums.items()} | {"samples": number}
    if features:
        metrics |= retrieval(
            torch.cat(features),
            torch.cat(images),
            torch.cat(captions),
            _matcher(engine, batches, inputs, rows) if objectives.objectives.itm else None,
        )
    return metrics


def retrieval(
    features_N2E: Tensor,
    image_ids_N: Tensor,
    caption_ids_N: Tensor,
    match: Callable[[np.ndarray, np.ndarray], Tensor] | None,
) -> dict[str, float]:
    """Recall at 1, 5, 10 in per cent of queries, both ways; ``match`` scores (image row, caption row) pairs.

    A query is right when any sample with the same image or the same caption is among the best.
    """
    _, image_rows = np.unique(image_ids_N.numpy(), return_index=True)
    _, caption_rows = np.unique(caption_ids_N.numpy(), return_index=True)
    image_rows, caption_rows = np.sort(image_rows), np.sort(caption_rows)
    pairs = set(zip(image_ids_N.tolist(), caption_ids_N.tolist(), strict=True))
    right_IC = torch.tensor(
        [
            [(int(image_ids_N[i]), int(caption_ids_N[c])) in pairs for c in caption_rows.tolist()]
            for i in image_rows.tolist()
        ]
    )
    score_IC = features_N2E[image_rows, 0] @ features_N2E[caption_rows, 1].T
    metrics: dict[str, float] = {"candidates": len(caption_rows)}
    metrics |= _recalls("image_to_text", score_IC, right_IC)
    metrics |= _recalls("text_to_image", score_IC.T, right_IC.T)
    if match is not None:
        top_I = score_IC.topk(min(RERANKED, score_IC.shape[1]), dim=1).indices
        top_C = score_IC.topk(min(RERANKED, score_IC.shape[0]), dim=0).indices.T
        scored_IC = torch.zeros_like(score_IC, dtype=torch.bool)
        scored_IC.scatter_(1, top_I, True)
        scored_IC.T.scatter_(1, top_C, True)
        image_index, caption_index = scored_IC.nonzero(as_tuple=True)
        matched = match(image_rows[image_index.numpy()], caption_rows[caption_index.numpy()])
        shortlist_IC = torch.zeros_like(scored_IC)
        for name, top, transpose in (("image_to_text", top_I, False), ("text_to_image", top_C, True)):
            shortlist = shortlist_IC.T.clone() if transpose else shortlist_IC.clone()
            shortlist.scatter_(1, top, True)
            itm_IC = torch.full_like(score_IC, -torch.inf)
            itm_IC[image_index, caption_index] = matched
            scores, right = (itm_IC.T, right_IC.T) if transpose else (itm_IC, right_IC)
            metrics |= _recalls(f"{name}_reranked", scores.masked_fill(~shortlist, -torch.inf), right)
    return metrics


def _recalls(name: str, score_QC: Tensor, right_QC: Tensor) -> dict[str, float]:
    order_QC = score_QC.argsort(dim=1, descending=True)
    hits_QC = right_QC.gather(1, order_QC)
    return {f"{name}_r{rank}": 100 * float(hits_QC[:, :rank].any(dim=1).float().mean()) for rank in RANKS}


def _matcher(
    engine: Engine, batches: StoreBatches, inputs: Inputs, rows: int
) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """ITM's log-odds for pairs of (row of the image, row of the caption)."""

    def match(image_rows: np.ndarray, caption_rows: np.ndarray) -> Tensor:
        scores = []
        for first in range(0, len(image_rows), rows):
            image = batches[_request(image_rows[first : first + rows])]
            caption = batches[_request(caption_rows[first : first + rows])]
            mixed = image._replace(input_ids=caption.input_ids, attention_mask=caption.attention_mask)
            logits_BK2 = State(*engine.evaluate(inputs(mixed, masked=False).state)).image
            scores.append((logits_BK2[:, 0, 1] - logits_BK2[:, 0, 0]).float().cpu())
        return torch.cat(scores)

    return match


def _request(samples: np.ndarray) -> DataBatch:
    weights = np.full(len(samples), 1 / len(samples), dtype=np.float32)
    return DataBatch(samples, samples.astype(np.int64), weights, None)
