"""The demo's data: about 3,000 emoji with captions, in one Parquet file; see LICENSES.md."""

from pathlib import Path


def demo_parquet() -> Path:
    """Give the Parquet file: columns image, caption, split (train, eval), concept, style."""
    return Path(__file__).with_name("emoji.parquet")
