"""The order of samples: a pure function of (seed, epoch, position).

No list is shuffled and no generator has state: place p of epoch e is computed, so any number of workers
and ranks agree, and a resumed run goes on where it stopped. Samples form one endless stream, the epochs
one after the other; a *row* is a place in that stream, and a global batch is the next G rows. The last
rows of an epoch that do not fill a batch share one with the first of the next epoch: every epoch has each
sample exactly once, and every batch has G rows.

The permutation is a Feistel network over the next power of four, with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002) and the mixer of SplitMix64 (Steele et al., 2014) for rounds:
memory O(1), and the same on every version of NumPy (whose shuffles promise no such thing).
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from models.errors import DataError

_ROUNDS = 6
_BLOCK = 4096


@dataclass(frozen=True)
class DataPosition:
    """How far the optimizer has come: ``position`` samples of ``epoch`` are consumed.

    Saved with a checkpoint, so it follows optimizer steps, not what workers have prefetched.
    """

    seed: int = 0
    epoch: int = 0
    position: int = 0

    def advance(self, rows: int, count: int) -> Self:
        """Give the position ``rows`` further in a store of ``count`` samples."""
        epochs, position = divmod(self.position + rows, count)
        return replace(self, epoch=self.epoch + epochs, position=position)

    def row(self, count: int) -> int:
        """Give the place in the endless stream."""
        return self.epoch * count + self.position

    def to_json(self) -> str:
        """Give the state as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` gave. Raises DataError."""
        try:
            state = json.loads(text)
            return cls(seed=int(state["seed"]), epoch=int(state["epoch"]), position=int(state["position"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"data position {text[:80]!r}: {error}; resume from another checkpoint") from None


class EpochOrder:
    """The permutation of one epoch; ``order[places]`` gives sample ids (int64) for places 0 … count-1."""

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        if count < 1:
            raise DataError("the store has no samples; pack at least one")
        self.count = count
        self.half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
        self.half_mask = np.uint64((1 << int(self.half_bits)) - 1)
        start = np.array([seed, epoch], dtype=np.int64).astype(np.uint64)
        key = mix(mix(start[:1]) ^ start[1:])
        self.keys = [mix(key + np.uint64(number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: np.ndarray | int) -> np.ndarray:
        values = np.atleast_1d(np.asarray(places)).astype(np.uint64)
        values = self._scramble(values)
        # Outside the store (three of four at most): scrambled again until it falls inside.
        while (outside := values >= self.count).any():
            values[outside] = self._scramble(values[outside])
        return values.astype(np.int64)

    def _scramble(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self.half_bits, values & self.half_mask
        for key in self.keys:
            left, right = right, left ^ (mix(right + key) & self.half_mask)
        return (left << self.half_bits) | right


def epoch_order(count: int, seed: int, epoch: int) -> EpochOrder:
    """Give the order of an epoch; index it with places (an int or an integer array)."""
    return EpochOrder(count, seed, epoch)


def samples_of_rows(first: int, number: int, count: int, seed: int) -> np.ndarray:
    """Give the sample ids of neighbouring rows of the endless stream, which may span epochs; int64."""
    parts = []
    while number:
        epoch, place = divmod(first, count)
        block, start = divmod(place, _BLOCK)
        part = _block(count, seed, epoch, block)[start : start + number]
        parts.append(part)
        first, number = first + len(part), number - len(part)
    return np.concatenate(parts)


@lru_cache(maxsize=8)
def _block(count: int, seed: int, epoch: int, number: int) -> np.ndarray:
    """Compute a block of places at once: NumPy's calls cost more than their work on a few values."""
    return epoch_order(count, seed, epoch)[np.arange(number * _BLOCK, min((number + 1) * _BLOCK, count))]


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's step and output function on uint64 arrays; overflow is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
