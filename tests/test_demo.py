"""The demo's data as it ships."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from launcher.demo import demo_parquet
from launcher.demo.build import HELD_OUT, PIXELS, SKIN_TONES


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.from_parquet(str(demo_parquet()), cache_dir=str(tmp_path_factory.mktemp("cache")))


def test_is_small_and_about_three_thousand_images(demo: Dataset) -> None:
    assert demo_parquet().stat().st_size <= 5_000_000
    assert 2_500 <= len(demo) <= 3_500
    assert Counter(demo["split"])["eval"] == HELD_OUT


def test_every_image_decodes_and_shows_something(demo: Dataset) -> None:
    for row in demo:
        pixels = np.asarray(row["image"].convert("RGB"))
        assert pixels.shape == (PIXELS, PIXELS, 3)
        assert pixels.std(axis=(0, 1)).max() > 3, row["concept"]


def test_held_out_concepts_were_seen_in_the_other_style_only(demo: Dataset) -> None:
    rows = list(zip(demo["split"], demo["concept"], demo["style"], strict=True))
    seen = {(concept, style) for split, concept, style in rows if split == "train"}
    held_out = [(concept, style) for split, concept, style in rows if split == "eval"]
    assert {style for _, style in held_out} == {"fluent"}
    assert all((concept, "noto") in seen and (concept, "fluent") not in seen for concept, _ in held_out)
    assert len(set(rows)) == len(rows)


def test_held_out_captions_differ(demo: Dataset) -> None:
    captions = [row for row, split in zip(demo["caption"], demo["split"], strict=True) if split == "eval"]
    assert len(set(captions)) == HELD_OUT and all(captions)


def test_no_skin_tones(demo: Dataset) -> None:
    assert not any(SKIN_TONES & set(concept.split("-")) for concept in demo["concept"])
