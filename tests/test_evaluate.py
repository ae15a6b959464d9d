"""Retrieval metrics against a count by hand."""

import numpy as np
import torch

from launcher.evaluate import RERANKED, retrieval


def unit(*angles: float) -> torch.Tensor:
    return torch.stack([torch.tensor([np.cos(angle), np.sin(angle)]) for angle in angles]).float()


def test_recall_counts_queries_whose_partner_is_near_enough() -> None:
    images, captions = unit(0.0, 1.0, 2.0, 3.0), unit(0.1, 1.9, 1.1, 3.0)
    features = torch.stack([images, captions], dim=1)
    ids = torch.arange(4)
    metrics = retrieval(features, ids, ids, None)
    # Images 0 and 3 are nearest to their captions; 1 and 2 find each other's first, their own second.
    assert metrics["candidates"] == 4
    assert metrics["image_to_text_r1"] == metrics["text_to_image_r1"] == 50
    assert metrics["image_to_text_r5"] == 100


def test_any_caption_of_the_image_is_right() -> None:
    images = unit(0.0, 0.0, 2.0)
    captions = unit(3.0, 0.1, 2.0)
    features = torch.stack([images, captions], dim=1)
    metrics = retrieval(features, torch.tensor([5, 5, 9]), torch.tensor([0, 1, 2]), None)
    assert metrics["candidates"] == 3
    assert metrics["image_to_text_r1"] == 100  # two images
    assert round(metrics["text_to_image_r1"]) == 67  # caption 0 lies nearer to image 9


def test_reranking_scores_only_the_shortlist() -> None:
    count = 40
    random = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(count, 2, 8, generator=random), dim=-1)
    ids = torch.arange(count)
    asked: list[tuple[int, int]] = []

    def oracle(images: np.ndarray, captions: np.ndarray) -> torch.Tensor:
        asked.extend(zip(images.tolist(), captions.tolist(), strict=True))
        return torch.from_numpy((images == captions).astype(np.float32))

    metrics = retrieval(features, ids, ids, oracle)
    assert len(asked) == len(set(asked)) <= 2 * RERANKED * count < count * count
    # A perfect judge lifts R@1 to the shortlist's recall.
    assert metrics["image_to_text_reranked_r1"] == metrics["image_to_text_r10"]
    assert metrics["text_to_image_reranked_r1"] == metrics["text_to_image_r10"]
