"""``vlfit data``: pack, inspect, verify, export, and what comes back in from an export."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from data_makers import write_folder
from PIL import Image

from launcher.commands import data
from launcher.data.store import Store
from models.errors import DataError, UserError


def vlfit_data(*words: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "source", 30, captions=2)
    (folder / "0007.jpg").write_bytes(b"")
    options = ("--image-size", 24, "--max-length", 20, "--workers", 0)
    assert vlfit_data("pack", folder, tmp_path / "store", *options) == 0
    return tmp_path / "store"


def test_pack_says_packed_and_skipped_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "source", 30, captions=2)
    (folder / "0007.jpg").write_bytes(b"")
    vlfit_data("pack", folder, tmp_path / "store", "--image-size", 24, "--workers", 0)
    out = capsys.readouterr().out
    assert "packed 58 samples (29 images, 58 captions), skipped 2 (image: empty file 2)" in out
    assert "errors.jsonl says which and why" in out


def test_pack_with_on_error_fail_exits_with_3(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", 3)
    (folder / "0001.jpg").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        vlfit_data("pack", folder, tmp_path / "store", "--on-error", "fail", "--workers", 0)
    assert caught.value.exit_code == 3


def test_inspect_gives_counts_and_a_contact_sheet(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert vlfit_data("inspect", store, "--json", "--sheet", tmp_path / "sheet.png") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["images"], facts["skipped"]) == (58, 29, 2)
    lengths = Store.open(store).lengths
    assert facts["tokens_per_caption"]["median"] == pytest.approx(np.median(lengths), abs=0.05)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width > 900 and len(set(sheet.convert("L").tobytes())) > 100


def test_verify_exits_with_3_and_names_the_damaged_file(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vlfit_data("verify", store) == 0
    path = store / "images-00000.npy"
    content = bytearray(path.read_bytes())
    content[5000] ^= 255
    path.write_bytes(content)
    assert vlfit_data("verify", store) == 3
    assert "images-00000.npy: its content is not what was packed" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["webdataset", "parquet"])
@pytest.mark.parametrize("keep", ["decoded", "encoded"])
def test_an_export_packs_back_to_the_same_pairs(form: str, keep: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", 12, captions=2)
    options = ("--image-size", 24, "--max-length", 20, "--workers", 0)
    vlfit_data("pack", folder, tmp_path / "store", *options, "--keep", keep)
    assert vlfit_data("export", tmp_path / "store", tmp_path / "out", "--form", form) == 0
    tokenizer = tmp_path / "store" / "tokenizer.json"
    vlfit_data("pack", tmp_path / "out", tmp_path / "again", *options, "--tokenizer", tokenizer)
    before, after = Store.open(tmp_path / "store"), Store.open(tmp_path / "again")
    assert len(before) == len(after) == 24
    for one, other in zip(map(before.__getitem__, range(24)), map(after.__getitem__, range(24)), strict=True):
        assert np.array_equal(one.image, other.image)
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert (one.image_id, one.caption_id) == (other.image_id, other.caption_id)


def test_exported_parquet_loads_with_datasets(store: Path, tmp_path: Path) -> None:
    import datasets

    vlfit_data("export", store, tmp_path / "out", "--form", "parquet")
    (file,) = (tmp_path / "out").glob("*.parquet")
    table = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
    assert np.array_equal(np.asarray(table[3]["image"]).transpose(2, 0, 1), Store.open(store).image(3))


def test_export_does_not_overwrite(store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(UserError, match="not an empty folder"):
        vlfit_data("export", store, tmp_path / "out")
