"""A store opens whole or not at all, is mapped once, and pickles as a path."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_makers import write_folder

from launcher.data.loader import StoreBatches
from launcher.data.pack import pack
from launcher.data.store import Store
from launcher.data.verify import verify
from models.errors import DataError


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    write_folder(root / "source", 60, captions=2)
    pack(root / "source", root / "store", image_size=32, max_length=16, shard_size_bytes=25 * 3 * 32 * 32)
    return root / "store"


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "store"))


FILES = ["images-00001.npy", "caption_tokens.npy", "sample_images.npy", "tokenizer.json", "errors.jsonl"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused_by_name(store: Path, name: str) -> None:
    (store / name).unlink()
    with pytest.raises(DataError, match=f"{name}: missing"):
        Store.open(store)


@pytest.mark.parametrize("name", FILES)
def test_a_grown_file_is_refused_by_name(store: Path, name: str) -> None:
    with (store / name).open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=f"{name}: grown"):
        Store.open(store)


@pytest.mark.parametrize("name", FILES[:-1])
def test_a_file_that_was_cut_short_is_refused_by_name(store: Path, name: str) -> None:
    os.truncate(store / name, (store / name).stat().st_size - 1)
    with pytest.raises(DataError, match=f"{name}: cut short"):
        Store.open(store)


def test_an_array_of_the_right_size_but_another_shape_is_refused(store: Path) -> None:
    path = store / "sample_images.npy"
    array = np.load(path)
    np.save(path, array.view("float64"))
    with pytest.raises(DataError, match=r"sample_images\.npy: holds <f8"):
        Store.open(store)


def test_what_is_no_store_is_refused(tmp_path: Path, store: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json, so not a data store"):
        Store.open(tmp_path / "nowhere")
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        Store.open(store)
    (store / "manifest.json").write_text(text.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(DataError, match="schema version 99"):
        Store.open(store)


def test_verify_finds_one_flipped_bit(store: Path) -> None:
    assert verify(store) == []
    for name in ("images-00000.npy", "caption_text.npy", "sample_captions.npy", "tokenizer.json"):
        path = store / name
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        assert [line.split(": ")[0] for line in verify(store)][:1] == [str(path)]
        data[-3] ^= 1
        path.write_bytes(data)


def test_images_are_views_of_the_file_and_torch_takes_them_without_a_copy(packed: Path) -> None:
    image = Store.open(packed)[3].image
    assert image.base is not None and image.flags.c_contiguous
    assert torch.from_numpy(image).data_ptr() == image.ctypes.data


def test_files_are_opened_read_only_and_writing_changes_none(packed: Path) -> None:
    before = (packed / "images-00000.npy").read_bytes()
    store = Store.open(packed)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(packed) in line]
    assert maps and all(fields[1].endswith("p") for fields in maps), "private: never written back"
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.exists() and str(packed) in os.readlink(descriptor):
            flags = (Path("/proc/self/fdinfo") / descriptor.name).read_text().split("flags:")[1].split()[0]
            assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
    store[0].image[:] = 0
    assert (packed / "images-00000.npy").read_bytes() == before


def test_a_store_works_on_a_read_only_disk(store: Path) -> None:
    for file in store.iterdir():
        file.chmod(0o444)
    store.chmod(0o555)
    assert len(Store.open(store)) == 120
    store.chmod(0o755)


def test_pickle_is_small_and_reopens(packed: Path) -> None:
    data = pickle.dumps(StoreBatches(Store.open(packed)))
    assert len(data) < 1_000
    again = pickle.loads(data).store
    assert np.array_equal(again[7].image, Store.open(packed)[7].image)


def test_negative_and_outside_indices(packed: Path) -> None:
    store = Store.open(packed)
    assert store[-1].sample_id == 119
    with pytest.raises(IndexError):
        store[120]
