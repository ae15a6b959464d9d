"""A store, opened: NumPy arrays mapped from files, one copy in memory whatever the number of processes."""

from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image

from launcher.data.manifest import FileEntry, Manifest
from models.errors import DataError


@dataclass(frozen=True, slots=True)
class Sample:
    """One image with one of its captions."""

    image: np.ndarray
    """uint8 [3,S,S]; of a decoded store a view of the mapped file (writing to it changes no file)."""
    input_ids: np.ndarray
    """int32 [L], [CLS] first and [SEP] last."""
    sample_id: int
    image_id: int
    """Equal for the same picture."""
    caption_id: int
    """Equal for the same text."""


class Store:
    """A packed data set; ``store[i]`` gives a Sample. Pickles as its path and reopens there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.manifest = Manifest.read(self.path)
        _check_sizes(self.path, self.manifest.files)
        self._shards = [self._map(name) for name in self.manifest.image_shards]
        self._places = self._map("image_places.npy") if self.manifest.keep == "encoded" else None
        self._text, self._text_ends = self._map("caption_text.npy"), self._map("caption_text_ends.npy")
        self._tokens, self._token_ends = self._map("caption_tokens.npy"), self._map("caption_token_ends.npy")
        self.image_ids = self._map("sample_images.npy")
        """int64 [N]: image id of each sample."""
        self.caption_ids = self._map("sample_captions.npy")
        """int64 [N]: caption id of each sample."""

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a finished store. Raises DataError, naming the file that is missing, cut short or grown."""
        return cls(path)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, sample_id: int) -> Sample:
        sample_id = range(len(self))[sample_id]
        image_id, caption_id = int(self.image_ids[sample_id]), int(self.caption_ids[sample_id])
        return Sample(self.image(image_id), self.input_ids(caption_id), sample_id, image_id, caption_id)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [N]: tokens of each sample."""
        return np.diff(self._token_ends, prepend=0).astype(np.int32)[self.caption_ids]

    @cached_property
    def _token_starts(self) -> np.ndarray:
        return np.concatenate([[0], self._token_ends[:-1]])

    def image(self, image_id: int) -> np.ndarray:
        """Give a picture as uint8 [3,S,S]; zero-copy from a decoded store."""
        if self._places is None:
            shard, row = divmod(image_id, self.manifest.shard_rows)
            return self._shards[shard][row]
        with Image.open(BytesIO(self.encoded(image_id).data)) as image:
            return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    def encoded(self, image_id: int) -> np.ndarray:
        """Give the JPEG bytes of a picture of an encoded store, as a uint8 view."""
        assert self._places is not None, "the store is decoded"
        shard, start, size = self._places[image_id].tolist()
        return self._shards[shard][start : start + size]

    def gather_images(self, image_ids: np.ndarray, out: np.ndarray) -> None:
        """Copy pictures into ``out``, uint8 [B,3,S,S]."""
        for place, image_id in enumerate(image_ids.tolist()):
            out[place] = self.image(image_id)

    def gather_tokens(
        self, caption_ids: np.ndarray, length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give captions as int64 [B,L], padded or cut to ``length`` (None: the longest), and bool [B,L].

        A caption that is cut still ends with [SEP]. The mask is true for real tokens.
        """
        starts, ends = self._token_starts[caption_ids], self._token_ends[caption_ids]
        lengths = ends - starts
        length = length or int(lengths.max())
        place = np.arange(length)
        mask_BL = place < lengths[:, None]
        ids_BL = np.full((len(caption_ids), length), self.manifest.pad_id, dtype=np.int64)
        ids_BL[mask_BL] = self._tokens[(starts[:, None] + place)[mask_BL]]
        ids_BL[lengths > length, -1] = self.manifest.sep_id
        return ids_BL, mask_BL

    def input_ids(self, caption_id: int) -> np.ndarray:
        """Give a caption's tokens, int32 [L], as a view."""
        return self._tokens[slice(*_bounds(self._token_ends, caption_id))]

    def caption(self, caption_id: int) -> str:
        """Give a caption's text."""
        return self._text[slice(*_bounds(self._text_ends, caption_id))].tobytes().decode("utf-8")

    @property
    def tokenizer_path(self) -> Path:
        """The Hugging Face ``tokenizer.json`` that the captions were tokenized with."""
        return self.path / self.manifest.tokenizer

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path,)

    def _map(self, name: str) -> np.ndarray:
        """Map a column. Copy-on-write: the file is opened read-only, and torch gets an array it may keep."""
        entry = self.manifest.files[name]
        path = self.path / name
        if entry.shape is not None and 0 in entry.shape:
            return np.empty(entry.shape, dtype=entry.dtype)  # an empty file cannot be mapped
        try:
            array = np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not the array that was packed ({error}); pack again") from None
        if array.shape != entry.shape or array.dtype.str != entry.dtype:
            raise DataError(
                f"{path}: holds {array.dtype.str} {array.shape}, "
                f"the manifest says {entry.dtype} {entry.shape}; pack again"
            )
        return array


def _bounds(ends: np.ndarray, number: int) -> tuple[int, int]:
    return (int(ends[number - 1]) if number else 0), int(ends[number])


def _check_sizes(folder: Path, files: dict[str, FileEntry]) -> None:
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: missing; copy the store again or pack again")
        size = path.stat().st_size
        if size != entry.bytes:
            what = "cut short" if size < entry.bytes else "grown"
            raise DataError(
                f"{path}: {what}, {size} bytes instead of {entry.bytes}; copy or pack the store again"
            )
