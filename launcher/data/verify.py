"""Check a store thoroughly: every checksum, every id, every picture's hash."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from launcher.data.columns import HEADER_BYTES
from launcher.data.manifest import FileEntry, Manifest, content_checksum
from launcher.data.store import Store
from launcher.data.work import image_digest
from models.errors import DataError

_BLOCK_BYTES = 1 << 24


def verify(path: str | Path) -> list[str]:
    """Give what is wrong with a store, one line for each; an empty list if nothing is.

    Raises DataError where the store cannot even be opened.
    """
    store = Store.open(path)
    found = [*_checksums(store.path, store.manifest), *_ids(store)]
    return found or list(_pictures(store))


def _checksums(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        if data_sha256(folder / name, entry) != entry.sha256:
            yield f"{folder / name}: its content is not what was packed"
    if content_checksum(manifest.files) != manifest.checksum:
        yield f"{folder}: the manifest's checksum does not follow from those of its files"


def data_sha256(path: Path, entry: FileEntry) -> str:
    """Hash a file; of an array only the data, as the manifest does."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES if entry.shape is not None else 0)
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def _ids(store: Store) -> Iterator[str]:
    counts, manifest = store.manifest.counts, store.manifest
    images = np.load(store.path / "image_hashes.npy", mmap_mode="r")
    token_ends = np.load(store.path / "caption_token_ends.npy", mmap_mode="r")
    tokens = np.load(store.path / "caption_tokens.npy", mmap_mode="r")
    expected = {
        "samples": (len(store), counts.samples),
        "images": (len(images), counts.images),
        "captions": (len(token_ends), counts.captions),
        "tokens": (len(tokens), counts.tokens),
    }
    for what, (there, counted) in expected.items():
        if there != counted:
            yield f"{store.path}: {there} {what}, the manifest counts {counted}"
    for name, ids, limit in (
        ("sample_images.npy", store.image_ids, counts.images),
        ("sample_captions.npy", store.caption_ids, counts.captions),
    ):
        if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
            yield f"{store.path / name}: has ids outside 0 … {limit - 1}"
    if len(np.unique(np.asarray(images), axis=0)) != len(images):
        yield f"{store.path / 'image_hashes.npy'}: one picture has two ids"
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < manifest.vocab_size):
        yield f"{store.path / 'caption_tokens.npy'}: has tokens above {manifest.vocab_size - 1}"
    starts = np.concatenate([[0], token_ends[:-1]])
    if not (np.all(tokens[starts] == manifest.cls_id) and np.all(tokens[token_ends - 1] == manifest.sep_id)):
        yield f"{store.path / 'caption_tokens.npy'}: a caption lacks [CLS] or [SEP]"
    if np.any(token_ends - starts > manifest.max_length):
        yield f"{store.path / 'caption_tokens.npy'}: a caption has more than {manifest.max_length} tokens"


def _pictures(store: Store) -> Iterator[str]:
    """Check each picture against its hash; JPEG (encoded) is lossy, there it is decoded only."""
    hashes = np.load(store.path / "image_hashes.npy", mmap_mode="r")
    size = store.manifest.image_size
    for image_id, expected in enumerate(hashes):
        try:
            pixels = store.image(image_id)
        except (OSError, SyntaxError, ValueError) as error:
            yield f"{store.path}: picture {image_id} cannot be decoded ({error})"
            continue
        if pixels.shape != (3, size, size):
            yield f"{store.path}: picture {image_id} has shape {pixels.shape}"
        elif store.manifest.keep == "decoded" and image_digest(pixels) != expected.tobytes():
            yield f"{store.path}: picture {image_id} does not match its hash"


def refuse_if_damaged(path: str | Path) -> Manifest:
    """Verify and give the manifest. Raises DataError with the first finding."""
    found = verify(path)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise DataError(f"{found[0]}{more}; copy the store again or pack again")
    return Manifest.read(Path(path))
