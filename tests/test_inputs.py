"""From stored samples to the model's input: masking, random bits, identities."""

from pathlib import Path

import numpy as np
import pytest
import torch

from launcher.data.batches import FixedBatches
from launcher.data.loader import Loader, RawBatch
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.inputs import Inputs
from models.errors import UserError
from models.losses import IGNORED, Targets
from models.spec import ModelSpec, load_spec
from models.state import State, check_state


@pytest.fixture(scope="module")
def store(tiny_data: Path) -> Store:
    return Store.open(tiny_data / "train")


@pytest.fixture(scope="module")
def spec(tiny_spec_file: Path) -> ModelSpec:
    return load_spec(tiny_spec_file)


def raw_batches(store: Store, rows: int, steps: int) -> list[RawBatch]:
    stream = iter(Loader(store, FixedBatches(len(store), rows, 1, 12), start=DataPosition(seed=1)))
    return [next(stream) for _ in range(steps)]


def inputs_of(spec: ModelSpec, store: Store, seed: int = 1) -> Inputs:
    return Inputs.create(spec, store.manifest, seed, torch.device("cpu"))


def test_state_keeps_the_contract(spec: ModelSpec, store: Store) -> None:
    batch = inputs_of(spec, store)(raw_batches(store, 8, 1)[0])
    assert check_state(batch.state, "test") == 8
    assert State(*batch.state).image.dtype == torch.float32


def test_rows_are_masked_alike_however_they_are_batched(spec: ModelSpec, store: Store) -> None:
    inputs = inputs_of(spec, store)
    (whole,) = (inputs(raw) for raw in raw_batches(store, 16, 1))
    halves = [inputs(raw) for raw in raw_batches(store, 8, 2)]
    for place in range(len(whole.state)):
        torch.testing.assert_close(whole.state[place], torch.cat([half.state[place] for half in halves]))
    for place in range(len(whole.targets)):
        torch.testing.assert_close(whole.targets[place], torch.cat([half.targets[place] for half in halves]))


def test_labels_restore_the_caption_and_spare_special_tokens(spec: ModelSpec, store: Store) -> None:
    inputs, manifest = inputs_of(spec, store), store.manifest
    for raw in raw_batches(store, 16, 3):
        batch = inputs(raw)
        state, labels = State(*batch.state), Targets(*batch.targets).labels
        real = labels != IGNORED
        assert real.any(dim=1).all()
        restored = state.text.clone()
        rows, places = real.nonzero(as_tuple=True)
        restored[rows, state.positions[rows, places]] = labels[rows, places]
        assert torch.equal(restored, raw.input_ids)
        assert not set(labels[real].tolist()) & {manifest.cls_id, manifest.sep_id, manifest.pad_id}


def test_shares_of_masked_tokens_are_berts(spec: ModelSpec, store: Store) -> None:
    """15 % of words; of those 80 % [MASK], 10 % kept, 10 % random (Devlin et al., 2019, section 3.1)."""
    inputs, counts = inputs_of(spec, store), {"masked": 0, "kept": 0, "all": 0}
    for raw in raw_batches(store, 48, 60):
        batch = inputs(raw)
        state, labels = State(*batch.state), Targets(*batch.targets).labels
        real = labels != IGNORED
        found = state.text.gather(1, state.positions)[real]
        counts["all"] += int(real.sum())
        counts["masked"] += int((found == store.manifest.mask_id).sum())
        counts["kept"] += int((found == labels[real]).sum())
    # A random word may be the kept one: 1 in 128. Three standard deviations of the binomial.
    margin = 3 * np.sqrt(0.8 * 0.2 / counts["all"])
    assert abs(counts["masked"] / counts["all"] - 0.8) < margin
    assert abs(counts["kept"] / counts["all"] - 0.1 - 0.1 / 128) < margin


def test_another_epoch_masks_other_words(spec: ModelSpec, store: Store) -> None:
    inputs = inputs_of(spec, store)
    first, second = (inputs.__call__(raw) for raw in raw_batches(store, 48, 2))
    order = [np.argsort(raw.sample_ids.numpy()) for raw in raw_batches(store, 48, 2)]
    masked = [
        State(*batch.state).text[torch.from_numpy(by)]
        for batch, by in zip((first, second), order, strict=True)
    ]
    assert not torch.equal(*masked)


def test_whole_captions_for_retrieval(spec: ModelSpec, store: Store) -> None:
    raw = raw_batches(store, 8, 1)[0]
    assert torch.equal(State(*inputs_of(spec, store)(raw, masked=False).state).text, raw.input_ids)


def test_groups_are_neighbouring_rows_of_the_global_order(spec: ModelSpec, store: Store) -> None:
    keys = State(*inputs_of(spec, store)(raw_batches(store, 8, 1)[0]).state).keys
    assert keys[:, 2].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert keys[:, 3].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_pixels_are_normalised_as_timm_trained(spec: ModelSpec, store: Store) -> None:
    from timm.data import create_transform, resolve_data_config
    from timm.models import get_pretrained_cfg
    from torchvision.transforms.functional import to_pil_image

    raw = raw_batches(store, 2, 1)[0]
    config = resolve_data_config(pretrained_cfg=get_pretrained_cfg(spec.image.timm).to_dict())
    transform = create_transform(**config | {"input_size": (3, 32, 32), "crop_pct": 1.0})
    expected = torch.stack([transform(to_pil_image(image)) for image in raw.images])
    torch.testing.assert_close(State(*inputs_of(spec, store)(raw).state).image, expected)


def test_pad_token_must_be_the_stores(spec: ModelSpec, store: Store) -> None:
    manifest = store.manifest.model_copy(update={"pad_id": 7})
    with pytest.raises(UserError, match="pads with 7"):
        Inputs.create(spec, manifest, 0, torch.device("cpu"))
