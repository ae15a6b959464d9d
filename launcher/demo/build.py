"""Builds the demo's Parquet from npm packages: ``python -m launcher.demo.build [--check]``.

Only whoever rebuilds the file needs this: ``npm`` on PATH, and ``pip install resvg-py==0.5.0`` to draw SVG.
The same package versions give the same bytes.
"""

import argparse
import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = {
    "noto": "@iconify-json/noto@1.2.9",
    "fluent": "@iconify-json/fluent-emoji-flat@1.2.6",
    "labels": "emojibase-data@17.0.0",
}
PIXELS = 64
TAGS = 6
"""Tags of a caption: the demo model reads 24 tokens."""
HELD_OUT = 300
HELD_OUT_STYLE = "fluent"
FAINT = 4.0
"""Standard deviation of pixels below which a drawing is taken for blank."""
SKIN_TONES = {"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF"}
OUTPUT = Path(__file__).with_name("emoji.parquet")


def build(folder: Path) -> bytes:
    """Download into ``folder`` and give the Parquet file's bytes."""
    sources = {name: _unpack(package, folder / name) for name, package in PACKAGES.items()}
    captions = _captions(sources["labels"] / "en" / "data.json")
    drawn = {style: _drawings(sources[style]) for style in ("noto", "fluent")}
    in_both = [concept for concept in captions if all(concept in icons for icons in drawn.values())]
    held_out = set(sorted(in_both, key=_hash)[:HELD_OUT])
    texts = [captions[concept] for concept in held_out]
    assert len(set(texts)) == len(texts) == HELD_OUT, "held-out captions must differ, or R@1 means nothing"
    rows = [
        {
            "image": {"bytes": png, "path": f"{style}/{concept}.png"},
            "caption": captions[concept],
            "split": "eval" if style == HELD_OUT_STYLE and concept in held_out else "train",
            "concept": concept,
            "style": style,
        }
        for style, icons in drawn.items()
        for concept, svg in sorted(icons.items())
        if concept in captions and (png := _png(svg)) is not None
    ]
    rows.sort(key=lambda row: (row["split"], _hash(f"{row['concept']} {row['style']}")))
    return _parquet(rows)


def main() -> None:
    """Write the file, or compare it with a fresh build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="build again and compare with the file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = build(Path(folder))
    if arguments.check:
        same = OUTPUT.read_bytes() == data
        raise SystemExit(0 if same else f"{OUTPUT.name} differs from a fresh build")
    OUTPUT.write_bytes(data)
    print(f"{OUTPUT.name}: {len(data) / 1e6:.2f} MB")


def _unpack(package: str, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def _captions(path: Path) -> dict[str, str]:
    """Concept (hexcode without variation selectors) → "label: tag, tag"; emoji without skin tone."""
    captions = {}
    for emoji in json.loads(path.read_text()):
        if SKIN_TONES & set(emoji["hexcode"].split("-")):
            continue
        label = emoji["label"]
        tags = [tag for tag in emoji.get("tags", []) if tag.lower() not in label.lower()][:TAGS]
        captions[_concept(emoji["hexcode"])] = f"{label}: {', '.join(tags)}" if tags else label
    return captions


def _drawings(package: Path) -> dict[str, str]:
    """Concept → SVG of one style."""
    icons: dict[str, Any] = json.loads((package / "icons.json").read_text())
    names = json.loads((package / "chars.json").read_text())
    found = {}
    for code, name in names.items():
        icon = icons["icons"].get(icons.get("aliases", {}).get(name, {}).get("parent", name))
        if icon is None:
            continue
        width = icon.get("width", icons.get("width", 16))
        height = icon.get("height", icons.get("height", 16))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        # Two codes, with and without U+FE0F, may name one drawing; the dictionary keeps one.
        found[_concept(code)] = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">{icon["body"]}</svg>'
        )
    return found


def _concept(code: str) -> str:
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _png(svg: str) -> bytes | None:
    """Draw an SVG; None where nothing shows on white."""
    import resvg_py
    from PIL import Image, ImageStat

    drawn = bytes(resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", width=PIXELS, height=PIXELS))
    # A drawing that is not square comes out narrower: it is set in the middle of a square.
    small = Image.new("RGB", (PIXELS, PIXELS), "white")
    with Image.open(io.BytesIO(drawn)) as image:
        drawing = image.convert("RGB")
    drawing.thumbnail((PIXELS, PIXELS))
    small.paste(drawing, ((PIXELS - drawing.width) // 2, (PIXELS - drawing.height) // 2))
    if max(ImageStat.Stat(small).stddev) < FAINT:
        return None
    # 64 colours are enough for flat drawings at this size and halve the file.
    small = small.quantize(64, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow.parquet
    from datasets import Dataset, Features, Image, Value

    features = Features({"image": Image()} | {name: Value("string") for name in _columns()})
    table = Dataset.from_list(rows, features=features).with_format("arrow")[:]
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out, compression="zstd", row_group_size=1000)
    return out.getvalue()


def _columns() -> Iterator[str]:
    yield from ("caption", "split", "concept", "style")


if __name__ == "__main__":
    main()
