"""What a pack's worker process does: read, decode and hash images, clean and tokenize captions.

A worker gets a few records and gives back as many results; it writes nothing. So a worker can die at any
point without harm, and the bytes of a store do not depend on how many there are.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from launcher.data.decode import BadImage, decode
from launcher.data.helper_process import follow_parent
from launcher.data.sources import Record, read_image
from launcher.data.tokenizer import encode

JPEG_QUALITY = 95
_VERY_LONG = 8
"""A caption this many times longer than what is kept of it is reported by row; it is kept, cut."""


@dataclass(frozen=True)
class WorkOrder:
    """What all workers of a pack must know."""

    image_size: int
    encoded: bool
    tokenizer: Path
    special: dict[str, int]
    max_length: int


@dataclass(slots=True)
class Problem:
    """A line of ``errors.jsonl``: ``samples`` pairs were left out for ``reason`` (0: reported only)."""

    source: str
    row: int
    reason: str
    detail: str
    samples: int


@dataclass(slots=True)
class Caption:
    """A caption that is kept."""

    text: str
    tokens: np.ndarray
    truncated: bool


@dataclass(slots=True)
class Result:
    """What became of one record; ``image`` is None where nothing is kept."""

    image: bytes | None = None
    """Pixels, uint8 [3,S,S] in C order, or JPEG bytes."""
    digest: bytes = b""
    """First 16 bytes of SHA-256 over the pixels: the same for the same picture in any file."""
    histogram: np.ndarray | None = None
    """int64 [3,256]: pixels of each value, from which mean and deviation follow exactly."""
    captions: list[Caption] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class Worker:
    """The work on one batch of records; built once in each process."""

    def __init__(self, order: WorkOrder) -> None:
        self.order = order
        self.tokenizer = Tokenizer.from_file(str(order.tokenizer))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def __call__(self, records: Sequence[Record]) -> list[Result]:
        """Give one result per record; never raises for what is wrong with the data."""
        return [self._one(record) for record in records]

    def _one(self, record: Record) -> Result:
        result = Result()
        if record.problem is not None:
            reason, detail = record.problem
            result.problems.append(
                Problem(record.source, record.row, reason, detail, max(record.lost, len(record.captions)))
            )
            return result
        texts = []
        for row, value in record.captions:
            text, reason = clean_caption(value)
            if reason:
                result.problems.append(Problem(record.source, row, reason, repr(value)[:200], 1))
            else:
                texts.append((row, text))
        if not record.captions:
            result.problems.append(Problem(record.source, record.row, "caption: none given", "", 1))
        if not texts:
            return result
        try:
            image = decode(read_image(record.image), self.order.image_size)
        except BadImage as error:
            result.problems.append(Problem(record.source, record.row, error.reason, error.detail, len(texts)))
            return result
        self._add_image(result, image)
        self._add_captions(result, record, texts)
        return result

    def _add_image(self, result: Result, image: Image.Image) -> None:
        pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
        result.digest = image_digest(pixels)
        result.histogram = np.array(image.histogram(), dtype=np.int64).reshape(3, 256)
        if self.order.encoded:
            buffer = BytesIO()
            image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
            result.image = buffer.getvalue()
        else:
            result.image = pixels.tobytes()

    def _add_captions(self, result: Result, record: Record, texts: list[tuple[int, str]]) -> None:
        encoded = encode(
            self.tokenizer,
            [text for _, text in texts],
            special=self.order.special,
            max_length=self.order.max_length,
        )
        for (row, text), (tokens, length) in zip(texts, encoded, strict=True):
            if length > _VERY_LONG * self.order.max_length:
                detail = f"{length} tokens, {self.order.max_length} kept"
                result.problems.append(Problem(record.source, row, "caption: very long", detail, 0))
            result.captions.append(Caption(text, tokens, length > self.order.max_length))


def image_digest(pixels: np.ndarray) -> bytes:
    """Hash uint8 pixels [3,S,S] to 16 bytes."""
    return hashlib.sha256(pixels.data).digest()[:16]


def clean_caption(value: object) -> tuple[str, str]:
    """Give (text, "") or ("", reason). A caption is text, or bytes that are UTF-8; not empty, not NaN."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            return "", "caption: not UTF-8"
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "", "caption: empty"
    if not isinstance(value, str):
        return "", "caption: not text"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates: bytes that a reader could not decode
        return "", "caption: not UTF-8"
    text = " ".join(value.split())
    if not text or text.lower() == "nan":
        return "", "caption: empty"
    return text, ""


_worker: Worker | None = None


def start_worker(order: WorkOrder) -> None:
    """Initialise a worker process."""
    global _worker
    follow_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(order)


def work(records: Sequence[Record]) -> list[Result]:
    """Do a batch of records in this worker process."""
    assert _worker is not None
    return _worker(records)
