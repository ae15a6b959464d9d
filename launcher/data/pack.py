"""Pack a source into a store: decode once, so that training only copies memory."""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from launcher.data.manifest import (
    JOURNAL,
    MANIFEST,
    SCHEMA,
    Counts,
    FileEntry,
    Manifest,
    content_checksum,
    write_atomically,
)
from launcher.data.pool import OrderedPool
from launcher.data.sources import Record, Source, open_source
from launcher.data.tokenizer import load_tokenizer, special_ids, train_wordpiece
from launcher.data.work import Problem, Result, Worker, WorkOrder, clean_caption, start_worker, work
from launcher.data.writer import StoreWriter
from models.errors import DataError

TOKENIZER = "tokenizer.json"
_RECORDS_AT_ONCE = 32
DEFAULT_VOCAB_SIZE = 4096

Progress = Callable[[int, int | None], None]
"""Called with (records done, records in all, or None where that is not known)."""


@dataclass(frozen=True)
class PackResult:
    """A finished pack."""

    store: Path
    counts: Counts
    resumed_records: int
    """Records that an earlier, interrupted run had done."""

    def summary(self) -> str:
        """Say packed and skipped, by reason, in one line."""
        counts = self.counts
        line = f"packed {counts.samples} samples ({counts.images} images, {counts.captions} captions)"
        line += f", skipped {counts.skipped}"
        if counts.skipped:
            line += (
                " ("
                + ", ".join(f"{reason} {number}" for reason, number in counts.skipped_by_reason.items())
                + ")"
            )
        if counts.truncated:
            line += f", cut {counts.truncated} captions"
        return line


def pack(
    source: str | Path,
    store: str | Path,
    *,
    image_size: int = 224,
    tokenizer: str | Path | None = None,
    max_length: int = 64,
    workers: int = 0,
    on_error: Literal["skip", "fail"] = "skip",
    keep: Literal["decoded", "encoded"] = "decoded",
    shard_size_bytes: int = 4_000_000_000,
    split: str | None = None,
    images: str | Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    progress: Progress | None = None,
) -> PackResult:
    """Pack ``source`` into the folder ``store``; goes on where a killed pack stopped, to the same bytes.

    ``workers``: processes that decode; 0 decodes in this one. ``vocab_size`` counts only where no tokenizer
    is given and one is trained. Raises DataError: unreadable source, nothing left to train on, another
    pack's folder, and with ``on_error="fail"`` the first bad record.
    """
    folder = Path(store)
    opened = open_source(
        source, split=split, images=images, image_column=image_column, caption_column=caption_column
    )
    settings = {
        "source": opened.fingerprint(),
        "image_size": image_size,
        "max_length": max_length,
        "keep": keep,
        "shard_size_bytes": shard_size_bytes,
        "tokenizer": _file_hash(tokenizer) if tokenizer else f"trained {vocab_size}",
    }
    fingerprint = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    with _claimed(folder):
        finished = _finished(folder, fingerprint)
        if finished is not None:
            return PackResult(folder, finished.counts, resumed_records=finished.counts.records)
        writer = StoreWriter(
            folder,
            image_size=image_size,
            encoded=keep == "encoded",
            shard_size_bytes=shard_size_bytes,
            fingerprint=fingerprint,
        )
        resumed = writer.records
        try:
            special, vocabulary = _prepare_tokenizer(folder, opened, tokenizer, vocab_size)
            order = WorkOrder(image_size, keep == "encoded", folder / TOKENIZER, special, max_length)
            _fill(writer, opened, order, workers, on_error, progress)
            if not writer.samples:
                raise DataError(
                    f"{source}: nothing could be packed; {folder / 'errors.jsonl'} says why; "
                    f"mend the source, remove {folder} and pack again"
                )
            counts = _complete(writer, order, vocabulary)
        finally:
            writer.close()
    return PackResult(folder, counts, resumed)


def _complete(writer: StoreWriter, order: WorkOrder, vocabulary: int) -> Counts:
    """Close the files and put the manifest in place, last of all."""
    folder = writer.folder
    mean, std = writer.mean_and_std()
    files, counts = writer.finish()
    files[TOKENIZER] = FileEntry(
        bytes=(folder / TOKENIZER).stat().st_size, sha256=_file_hash(folder / TOKENIZER)
    )
    manifest = Manifest(
        schema_version=SCHEMA,
        keep="encoded" if order.encoded else "decoded",
        image_size=order.image_size,
        max_length=order.max_length,
        tokenizer=TOKENIZER,
        vocab_size=vocabulary,
        **{f"{role}_id": number for role, number in order.special.items()},
        mean=mean,
        std=std,
        shard_rows=writer.shard_rows,
        counts=counts,
        files=files,
        checksum=content_checksum(files),
        fingerprint=writer.fingerprint,
    )
    manifest.write(folder)
    (folder / JOURNAL).unlink(missing_ok=True)
    return counts


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep other packs out of a folder; the kernel lets go if this one is killed. Raises DataError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # network file systems may have no locks on folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{folder}: another pack is writing it; wait for that one") from None
        yield
    finally:
        os.close(descriptor)


def _fill(
    writer: StoreWriter,
    source: Source,
    order: WorkOrder,
    workers: int,
    on_error: str,
    progress: Progress | None,
) -> None:
    """Run every record that the writer does not have yet through the workers."""
    total = source.rows
    if progress and total is None:
        total = sum(1 for _ in source.read(False))
    batches = _batches(islice(source.read(True), writer.records, None))
    pool = None
    if workers:
        pool = OrderedPool(work, _crashed, workers=workers, initializer=start_worker, arguments=(order,))
    outcomes: Iterable[list[Result]] = pool.map(batches) if pool else map(Worker(order), batches)
    try:
        for results in outcomes:
            if on_error == "fail":
                _stop_at_first(results)
            writer.add(results)
            if progress:
                progress(writer.records, total)
    finally:
        if pool:
            pool.close()


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(islice(records, _RECORDS_AT_ONCE)):
        yield batch


def _stop_at_first(results: list[Result]) -> None:
    for result in results:
        for problem in result.problems:
            if problem.samples:
                detail = f" ({problem.detail})" if problem.detail else ""
                raise DataError(
                    f"{problem.source}, row {problem.row}: {problem.reason}{detail}; "
                    "mend it, or leave such rows out with --on-error skip"
                )


def _crashed(record: Record) -> Result:
    problem = Problem(record.source, record.row, "image: decoder crashed", "", max(1, len(record.captions)))
    return Result(problems=[problem])


def _finished(folder: Path, fingerprint: str) -> Manifest | None:
    """Give the manifest if this very pack is complete; refuse a folder that holds something else."""
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        if manifest.fingerprint != fingerprint:
            raise DataError(
                f"{folder}: holds a store of another source or with other settings; choose another folder"
            )
        (folder / JOURNAL).unlink(missing_ok=True)
        return manifest
    if not (folder / JOURNAL).is_file():
        foreign = [entry.name for entry in folder.iterdir() if entry.name != JOURNAL + ".partial"]
        if foreign:
            raise DataError(f"{folder}: is not empty ({foreign[0]}); choose another folder")
    return None


def _prepare_tokenizer(
    folder: Path, source: Source, given: str | Path | None, vocab_size: int
) -> tuple[dict[str, int], int]:
    """Put the tokenizer into the store, unless an interrupted run did; gives its special ids and size."""
    path = folder / TOKENIZER
    if not path.is_file():
        made = load_tokenizer(given) if given else train_wordpiece(_captions(source), vocab_size)
        special_ids(made)
        write_atomically(path, made.to_str(pretty=True))
    tokenizer = load_tokenizer(path)
    return special_ids(tokenizer), tokenizer.get_vocab_size()


def _captions(source: Source) -> Iterator[str]:
    for record in source.read(False):
        for _, value in record.captions:
            text, reason = clean_caption(value)
            if not reason:
                yield text


def _file_hash(path: str | Path) -> str:
    """Hash a file, or the names and sizes in a folder; a Hugging Face id stands for itself."""
    path = Path(path)
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if path.is_dir():
        states = sorted((entry.name, entry.stat().st_size) for entry in path.iterdir())
        return hashlib.sha256(repr(states).encode()).hexdigest()
    return str(path)
