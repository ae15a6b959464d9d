"""Look into a store: counts, sizes, and a contact sheet of pictures with their captions."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from launcher.data.order import epoch_order
from launcher.data.store import Store

_TILE = 160
_TEXT = 44
_GAP = 8


def describe(store: Store) -> dict[str, object]:
    """Give the facts of a store, ready to print or to write as JSON."""
    manifest = store.manifest
    lengths = store.lengths
    return {
        "path": str(store.path),
        "samples": manifest.counts.samples,
        "images": manifest.counts.images,
        "captions": manifest.counts.captions,
        "skipped": manifest.counts.skipped,
        "skipped_by_reason": manifest.counts.skipped_by_reason,
        "captions_cut": manifest.counts.truncated,
        "keep": manifest.keep,
        "image_size": manifest.image_size,
        "bytes": manifest.total_bytes,
        "tokens_per_caption": {
            name: round(float(np.quantile(lengths, quantile)), 1)
            for name, quantile in (("min", 0), ("median", 0.5), ("p95", 0.95), ("max", 1))
        },
        "vocab_size": manifest.vocab_size,
        "mean": manifest.mean,
        "std": manifest.std,
        "checksum": manifest.checksum,
    }


def contact_sheet(store: Store, count: int = 24, columns: int = 6, seed: int = 0) -> Image.Image:
    """Draw ``count`` random samples, each picture above its caption."""
    count = min(count, len(store))
    chosen = np.sort(epoch_order(len(store), seed, 0)[np.arange(count)])
    rows = -(-count // columns)
    cell_width, cell_height = _TILE + _GAP, _TILE + _TEXT + _GAP
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    for place, sample_id in enumerate(chosen.tolist()):
        sample = store[sample_id]
        left = _GAP + place % columns * cell_width
        top = _GAP + place // columns * cell_height
        picture = Image.fromarray(np.ascontiguousarray(sample.image.transpose(1, 2, 0)))
        sheet.paste(picture.resize((_TILE, _TILE)), (left, top))
        draw.multiline_text(
            (left, top + _TILE + 2), _wrapped(store.caption(sample.caption_id)), "black", font
        )
    return sheet


def _wrapped(text: str, width: int = 27, lines: int = 3) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))
