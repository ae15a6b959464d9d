"""Writes a store: gives ids to images and captions, appends to the columns, notes how far it came.

    images-00000.npy …          uint8 [n,3,S,S]   decoded; one row per different picture (row = image id)
                                uint8 [bytes]     encoded: JPEG files one after the other
    image_places.npy            int64 [I,3]       encoded only: shard, first byte, bytes
    image_hashes.npy            uint8 [I,16]      of the pixels
    caption_text.npy            uint8 [bytes]     UTF-8, one after the other
    caption_text_ends.npy       int64 [C]
    caption_tokens.npy          int32 [tokens]    [CLS] … [SEP], one after the other (row = caption id)
    caption_token_ends.npy      int64 [C]
    sample_images.npy           int64 [N]         image id of each sample
    sample_captions.npy         int64 [N]         caption id of each sample
    errors.jsonl                what was left out
    packing.json                the journal; only until the manifest is there

After a kill the journal says how long every column was when the last batch of records was complete; all
is cut back to that, and the pack goes on with the next record: the bytes come out the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np

from launcher.data.columns import HEADER_BYTES, Column
from launcher.data.manifest import JOURNAL, Counts, FileEntry, write_atomically
from launcher.data.work import Result
from models.errors import DataError

ERRORS = "errors.jsonl"
Channels = tuple[float, float, float]
_COLUMNS = {
    "image_hashes": ("uint8", (16,)),
    "caption_text": ("uint8", ()),
    "caption_text_ends": ("int64", ()),
    "caption_tokens": ("int32", ()),
    "caption_token_ends": ("int64", ()),
    "sample_images": ("int64", ()),
    "sample_captions": ("int64", ()),
}


class StoreWriter:
    """Everything of a store but the manifest and the tokenizer; resumes by itself from a journal."""

    def __init__(
        self, folder: Path, *, image_size: int, encoded: bool, shard_size_bytes: int, fingerprint: str
    ) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.encoded = encoded
        self.image_shape = () if encoded else (3, image_size, image_size)
        self.shard_rows = max(1, shard_size_bytes // (3 * image_size * image_size))
        self.shard_size_bytes = shard_size_bytes
        journal = self._read_journal()
        if not journal:
            # First of all: whatever else is found here is then known to be ours.
            write_atomically(folder / JOURNAL, json.dumps({"fingerprint": fingerprint}))
        self.records: int = journal.get("records", 0)
        self.truncated: int = journal.get("truncated", 0)
        self.skipped = Counter(journal.get("skipped", {}))
        self.histogram = np.array(journal.get("histogram", np.zeros((3, 256))), dtype=np.int64)
        self.hashing = ThreadPoolExecutor(1)
        rows: dict[str, int] = journal.get("rows", {})
        columns = dict(_COLUMNS) | ({"image_places": ("int64", (3,))} if encoded else {})
        self.columns = {
            name: Column(folder / f"{name}.npy", dtype, shape, rows.get(name, 0), hashing=self.hashing)
            for name, (dtype, shape) in columns.items()
        }
        self.shards = [
            Column(self._shard_path(number), "uint8", self.image_shape, count, hashing=self.hashing)
            for number, count in enumerate(journal.get("shards", [0]))
        ]
        self.errors = (folder / ERRORS).open("r+b" if journal.get("errors_bytes") else "w+b")
        self.errors.truncate(journal.get("errors_bytes", 0))
        self.errors.seek(0, 2)
        self._remember_ids()

    def add(self, results: Sequence[Result]) -> None:
        """Append a batch of results, in the order of the source, and note that it is complete."""
        for result in results:
            self._add(result)
            self.records += 1
        self._note()

    @property
    def samples(self) -> int:
        """Samples written so far."""
        return self.columns["sample_images"].rows

    def finish(self) -> tuple[dict[str, FileEntry], Counts]:
        """Complete and close every file; gives their entries and the counts."""
        files = {column.path.name: FileEntry.model_validate(column.finish()) for column in self._all()}
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.close()
        files[ERRORS] = FileEntry(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
        counts = Counts(
            samples=self.samples,
            images=self.columns["image_hashes"].rows,
            captions=self.columns["caption_token_ends"].rows,
            tokens=self.columns["caption_tokens"].rows,
            records=self.records,
            truncated=self.truncated,
            skipped=sum(self.skipped.values()),
            skipped_by_reason=dict(sorted(self.skipped.items())),
        )
        return files, counts

    def close(self) -> None:
        """Close the files and leave the pack unfinished."""
        self.errors.close()
        self.hashing.shutdown()
        for column in self._all():
            column.close()

    def mean_and_std(self) -> tuple[Channels, Channels]:
        """Per channel, of pixels in [0, 1], over all different pictures; exact, from the histogram."""
        values = np.arange(256) / 255
        total = np.maximum(self.histogram.sum(axis=1), 1)
        mean = self.histogram @ values / total
        variance = self.histogram @ values**2 / total - mean**2
        return tuple(mean.tolist()), tuple(np.sqrt(np.maximum(variance, 0)).tolist())

    def _add(self, result: Result) -> None:
        for problem in result.problems:
            self.errors.write((json.dumps(asdict(problem)) + "\n").encode())
            if problem.samples:
                self.skipped[problem.reason] += problem.samples
        if result.image is None or not result.captions:
            return
        image = self.image_ids.get(result.digest)
        if image is None:
            image = self.image_ids[result.digest] = len(self.image_ids)
            self._add_image(result)
        captions = [self._caption_id(caption.text, caption.tokens) for caption in result.captions]
        self.truncated += sum(caption.truncated for caption in result.captions)
        self.columns["sample_images"].append(np.full(len(captions), image, dtype=np.int64))
        self.columns["sample_captions"].append(np.array(captions, dtype=np.int64))

    def _add_image(self, result: Result) -> None:
        assert result.image is not None and result.histogram is not None
        data = np.frombuffer(result.image, dtype=np.uint8)
        rows = data if self.encoded else data.reshape(1, *self.image_shape)
        limit = self.shard_size_bytes if self.encoded else self.shard_rows
        if self.shards[-1].rows and self.shards[-1].rows + len(rows) > limit:
            path = self._shard_path(len(self.shards))
            self.shards.append(Column(path, "uint8", self.image_shape, hashing=self.hashing))
        if self.encoded:
            place = [len(self.shards) - 1, self.shards[-1].rows, len(rows)]
            self.columns["image_places"].append(np.array([place], dtype=np.int64))
        self.shards[-1].append(rows)
        self.columns["image_hashes"].append(np.frombuffer(result.digest, dtype=np.uint8)[None])
        self.histogram += result.histogram

    def _caption_id(self, text: str, tokens: np.ndarray) -> int:
        data = text.encode()
        key = _caption_key(data)
        number = self.caption_ids.get(key)
        if number is None:
            number = self.caption_ids[key] = len(self.caption_ids)
            self._append_with_end("caption_text", np.frombuffer(data, dtype=np.uint8))
            self._append_with_end("caption_token", tokens, plural="s")
        return number

    def _append_with_end(self, name: str, values: np.ndarray, plural: str = "") -> None:
        column = self.columns[name + plural]
        column.append(values)
        self.columns[f"{name}_ends"].append(np.array([column.rows], dtype=np.int64))

    def _note(self) -> None:
        self.errors.flush()
        journal = {
            "fingerprint": self.fingerprint,
            "records": self.records,
            "truncated": self.truncated,
            "skipped": self.skipped,
            "errors_bytes": self.errors.tell(),
            "rows": {name: column.rows for name, column in self.columns.items()},
            "shards": [shard.rows for shard in self.shards],
            "histogram": self.histogram.tolist(),
        }
        write_atomically(self.folder / JOURNAL, json.dumps(journal), durable=False)

    def _read_journal(self) -> dict:
        path = self.folder / JOURNAL
        if not path.is_file():
            return {}
        journal = json.loads(path.read_text())
        if journal["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self.folder}: holds an unfinished pack of another source or with other settings; "
                "repeat that command, or remove the folder"
            )
        return journal

    def _remember_ids(self) -> None:
        """Read back which pictures and captions have an id already."""
        self.image_ids: dict[bytes, int] = {}
        self.caption_ids: dict[bytes, int] = {}
        if self.columns["image_hashes"].rows:
            hashes = _read_back(self.columns["image_hashes"])
            self.image_ids = {row.tobytes(): number for number, row in enumerate(hashes)}
        if self.columns["caption_text_ends"].rows:
            text = _read_back(self.columns["caption_text"]).tobytes()
            start = 0
            for number, end in enumerate(_read_back(self.columns["caption_text_ends"]).tolist()):
                self.caption_ids[_caption_key(text[start:end])] = number
                start = end

    def _shard_path(self, number: int) -> Path:
        return self.folder / f"images-{number:05}.npy"

    def _all(self) -> list[Column]:
        return [*self.columns.values(), *self.shards]


def _caption_key(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _read_back(column: Column) -> np.ndarray:
    """Read an unfinished column, whose header does not know its length yet."""
    flat = np.fromfile(column.path, dtype=column.dtype, offset=HEADER_BYTES)
    return flat.reshape(-1, *column.row_shape)
