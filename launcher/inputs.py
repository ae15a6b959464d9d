"""From a batch of the store to what an engine takes: masking, random bits, identities, normalised pixels.

Everything random here is a hash of (seed, row), where a row is a place in the endless stream of samples.
So masking does not depend on workers, ranks or micro-batches, and a resumed run masks as the first did.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from launcher.data.loader import RawBatch
from launcher.data.manifest import Manifest
from launcher.engines.engine import MicroBatch
from models.errors import UserError
from models.image import normalise_pixels, pixel_statistics
from models.losses import IGNORED, Targets
from models.spec import ModelSpec
from models.state import State

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""BERT's shares of masked tokens that become [MASK] or a random word; the rest stay (Devlin et al., 2019)."""


@dataclass(frozen=True)
class Inputs:
    """Callable ``RawBatch → MicroBatch`` on a device."""

    spec: ModelSpec
    manifest: Manifest
    seed: int
    device: torch.device
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batches_per_step: int = 1
    """Micro-batches of a step over all ranks."""

    @classmethod
    def create(
        cls, spec: ModelSpec, manifest: Manifest, seed: int, device: torch.device, batches_per_step: int = 1
    ) -> "Inputs":
        """Check that the store fits the model. Raises UserError: vocabulary, special ids, image size."""
        if manifest.vocab_size > spec.text.vocab_size:
            raise UserError(
                f"model {spec.name}: text.vocab_size is {spec.text.vocab_size}, but the store's tokenizer has "
                f"{manifest.vocab_size} tokens; enlarge it or pack with another tokenizer"
            )
        if manifest.pad_id != spec.text.pad_token_id:
            raise UserError(
                f"model {spec.name}: text.pad_token_id is {spec.text.pad_token_id}, "
                f"but the store's tokenizer pads with {manifest.pad_id}"
            )
        if manifest.image_size != spec.image.size:
            raise UserError(
                f"model {spec.name}: image.size is {spec.image.size}, but the store holds images of "
                f"{manifest.image_size} pixels; pack with --image-size {spec.image.size}"
            )
        mean, std = pixel_statistics(spec.image)
        return cls(spec, manifest, seed, device, mean, std, batches_per_step)

    def __call__(self, batch: RawBatch, masked: bool = True) -> MicroBatch:
        """Give state and targets; ``masked=False`` leaves the captions whole (for retrieval)."""
        ids_BL, positions_BM, labels_BM = self._mask(
            batch.input_ids.numpy(), batch.attention_mask.numpy(), batch.rows
        )
        rows = batch.rows.numpy()
        bits_BG = random_bits(self.seed, rows, self.spec.group, purpose=1)
        group = rows // self.spec.group
        keys_B4 = torch.stack(
            [
                batch.image_ids,
                batch.caption_ids,
                torch.from_numpy(group),
                torch.from_numpy(rows - group * self.spec.group),
            ],
            dim=1,
        )
        images = batch.images.to(self.device, non_blocking=True)
        state = State(
            image=normalise_pixels(images, self.mean, self.std),
            text=torch.from_numpy(ids_BL) if masked else batch.input_ids,
            pairing=torch.from_numpy((bits_BG >> np.uint64(33)).astype(np.int32)),
            mask=batch.attention_mask,
            keys=keys_B4,
            positions=torch.from_numpy(positions_BM),
        )
        targets = Targets(labels=torch.from_numpy(labels_BM), identities=keys_B4[:, :2].contiguous())
        weight = float(batch.weights.sum()) * self.batches_per_step
        return MicroBatch(self._move(state), self._move(targets), weight)

    def _move(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)

    def _mask(self, ids_BL: np.ndarray, mask_BL: np.ndarray, rows: Tensor) -> tuple[np.ndarray, ...]:
        """Mask the words with the largest hashes of each row; ids [B,L], positions and labels [B,M]."""
        places, mlm = self.spec.masked_positions, self.spec.objectives.mlm
        if mlm is None:
            empty = np.zeros((len(ids_BL), places), dtype=np.int64)
            return ids_BL, empty, np.full_like(empty, IGNORED)
        bits_BL = random_bits(self.seed, rows.numpy(), ids_BL.shape[1], purpose=2)
        special = (self.manifest.cls_id, self.manifest.sep_id, self.manifest.pad_id)
        words_BL = mask_BL & ~np.isin(ids_BL, special)
        words_B = words_BL.sum(axis=1)
        wanted_B = np.minimum(np.maximum(np.rint(words_B * mlm.probability), words_B > 0), places).astype(
            np.int64
        )
        # Bit 63 cleared where there is no word, so that words come first.
        order_BL = np.argsort(
            np.where(words_BL, bits_BL | np.uint64(1 << 63), bits_BL >> np.uint64(1)), axis=1
        )
        positions_BM = order_BL[:, ::-1][:, :places].copy()
        missing = places - positions_BM.shape[1]
        positions_BM = np.pad(positions_BM, ((0, 0), (0, missing)))
        real_BM = np.arange(places) < wanted_B[:, None]
        positions_BM[~real_BM] = 0
        row_B1 = np.arange(len(ids_BL))[:, None]
        labels_BM = np.where(real_BM, ids_BL[row_B1, positions_BM], IGNORED)
        chance_BM = random_bits(self.seed, rows.numpy(), places, purpose=3) / 2.0**64
        word_BM = random_bits(self.seed, rows.numpy(), places, purpose=4) % np.uint64(
            self.manifest.vocab_size
        )
        replaced_BM = np.where(
            chance_BM < MASK_SHARE,
            self.manifest.mask_id,
            np.where(chance_BM < MASK_SHARE + RANDOM_SHARE, word_BM.astype(np.int64), labels_BM),
        )
        masked_BL = ids_BL.copy()
        row_of, place_of = np.nonzero(real_BM)
        masked_BL[row_of, positions_BM[row_of, place_of]] = replaced_BM[row_of, place_of]
        return masked_BL, positions_BM, labels_BM


def random_bits(seed: int, rows: np.ndarray, number: int, purpose: int) -> np.ndarray:
    """Give uint64 [len(rows), number], a pure function of its arguments (SplitMix64 as a hash)."""
    from launcher.data.order import mix

    key = mix(np.array([seed], dtype=np.int64).astype(np.uint64) + np.uint64(purpose << 32))
    row_B = mix(rows.astype(np.uint64) ^ key)
    return mix(row_B[:, None] + mix(np.arange(1, number + 1, dtype=np.uint64))[None, :])
