"""Packing: complete or resumable, the same bytes whatever happens, every record accounted for."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from data_makers import caption, contents, encode, picture, write_folder, write_parquet
from tokenizers import Tokenizer

import launcher.data.columns
import launcher.data.manifest
import launcher.data.pack
import launcher.data.writer
from launcher.data.decode import decode
from launcher.data.manifest import Manifest
from launcher.data.pack import pack
from launcher.data.pool import OrderedPool
from launcher.data.store import Store
from launcher.data.verify import verify
from models.errors import DataError

SETTINGS = {"image_size": 16, "max_length": 12, "vocab_size": 200, "shard_size_bytes": 20 * 3 * 16 * 16}


def errors(store: Path) -> list[dict]:
    return [json.loads(line) for line in (store / "errors.jsonl").read_text().splitlines()]


def test_pixels_tokens_and_ids_are_those_of_the_source(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 70, captions=2)
    result = pack(tmp_path / "source", tmp_path / "store", **SETTINGS)
    store = Store.open(tmp_path / "store")
    assert (result.counts.samples, result.counts.images, result.counts.records) == (140, 70, 70)
    assert len(store.manifest.image_shards) == 4
    for sample_id in (0, 1, 39, 40, 41, 139):
        sample = store[sample_id]
        number = sample_id // 2
        expected = np.asarray(decode(encode(picture(number)), 16)).transpose(2, 0, 1)
        assert np.array_equal(sample.image, expected)
        assert store.caption(sample.caption_id) == caption(number, sample_id % 2)
        assert (sample.input_ids[0], sample.input_ids[-1]) == (store.manifest.cls_id, store.manifest.sep_id)
    assert store.lengths.tolist() == [len(store[number].input_ids) for number in range(140)]
    assert verify(tmp_path / "store") == []


def test_mean_and_deviation_are_exact(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 30)
    pack(tmp_path / "source", tmp_path / "store", **SETTINGS)
    store = Store.open(tmp_path / "store")
    pixels = np.stack([store.image(number) for number in range(30)]) / 255
    np.testing.assert_allclose(store.manifest.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(store.manifest.std, pixels.std(axis=(0, 2, 3)), rtol=1e-9)


def test_the_same_picture_and_the_same_text_have_one_id(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, number, form in (("a.png", 1, "PNG"), ("b.png", 2, "PNG"), ("c.bmp", 1, "BMP")):
        (folder / name).write_bytes(encode(picture(number), form))
    rows = [("a.png", "one"), ("b.png", "two"), ("c.bmp", "one "), ("a.png", "two")]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    pack(folder, tmp_path / "store", **SETTINGS)
    store = Store.open(tmp_path / "store")
    assert store.image_ids.tolist() == [0, 1, 0, 0]
    assert store.caption_ids.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("keep", ["decoded", "encoded"])
def test_workers_do_not_change_the_bytes(keep: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", 100)
    for workers in (0, 2):
        pack(tmp_path / "a.parquet", tmp_path / f"store{workers}", workers=workers, keep=keep, **SETTINGS)
    assert contents(tmp_path / "store0") == contents(tmp_path / "store2")


def test_encoded_store_gives_nearly_the_same_pixels_in_less_space(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 40)
    settings = SETTINGS | {"image_size": 64}
    for keep in ("decoded", "encoded"):
        pack(tmp_path / "source", tmp_path / keep, keep=keep, **settings)
    decoded, encoded = Store.open(tmp_path / "decoded"), Store.open(tmp_path / "encoded")
    assert len(encoded.manifest.image_shards) > 1
    for number in (0, 17, 39):
        difference = np.abs(decoded.image(number).astype(int) - encoded.image(number).astype(int))
        assert difference.mean() < 2
    assert encoded.manifest.total_bytes < decoded.manifest.total_bytes / 2
    assert np.array_equal(decoded.image_ids, encoded.image_ids)
    assert verify(tmp_path / "encoded") == []


def kill_at(call: int) -> None:
    """Make this process die in the middle of its ``call``-th write, and half-write what it was writing."""
    state = {"calls": 0}
    write_all, atomically, unlink = (
        launcher.data.columns._write_all,
        launcher.data.manifest.write_atomically,
        Path.unlink,
    )

    def due() -> bool:
        state["calls"] += 1
        return state["calls"] == call

    def dying_write(descriptor: int, data: bytes) -> None:
        if due():
            write_all(descriptor, memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(descriptor, data)

    def dying_atomically(path: Path, text: str, **options: bool) -> None:
        if due():
            path.with_name(path.name + ".partial").write_text(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        atomically(path, text, **options)
        if due():
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_unlink(path: Path, **options: bool) -> None:
        if due():
            os.kill(os.getpid(), signal.SIGKILL)
        unlink(path, **options)

    launcher.data.columns._write_all = dying_write
    for module in (launcher.data.manifest, launcher.data.writer, launcher.data.pack):
        module.write_atomically = dying_atomically
    Path.unlink = dying_unlink


def in_a_fork(action) -> int:
    """Run in a forked process; gives its wait status."""
    child = os.fork()
    if not child:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(9)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("keep", ["decoded", "encoded"])
def test_killed_at_any_write_and_run_again_gives_the_same_bytes(keep: str, tmp_path: Path) -> None:
    source = write_parquet(
        tmp_path / "a.parquet", 80, [{"image": {"bytes": b"x", "path": ""}, "caption": "bad"}]
    )
    pack(source, tmp_path / "whole", keep=keep, **SETTINGS)
    whole = contents(tmp_path / "whole")
    kills, call = 0, 1
    while True:
        # Each run is killed a few writes further than the one before, and resumed by the next.
        store = tmp_path / f"killed{call}"

        def once(call: int = call, store: Path = store) -> None:
            kill_at(call)
            pack(source, store, keep=keep, **SETTINGS)

        status = in_a_fork(once)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        kills += 1
        if not (store / "manifest.json").is_file():
            with pytest.raises(DataError, match=r"not finished|no manifest\.json"):
                Store.open(store)
        pack(source, store, keep=keep, **SETTINGS)
        assert contents(store) == whole, f"killed at write {call}"
        call = call + 1 if call < 25 else call + 41
    assert kills > 30


def test_killed_again_and_again_still_ends_in_the_same_bytes(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 150)
    pack(source, tmp_path / "whole", **SETTINGS)
    store, call = tmp_path / "killed", 60
    for _ in range(100):

        def once(call: int = call) -> None:
            kill_at(call)
            pack(source, store, **SETTINGS)

        if os.waitstatus_to_exitcode(in_a_fork(once)) == 0:
            break
        call += 37
    assert contents(store) == contents(tmp_path / "whole")


def test_command_killed_with_workers_leaves_no_process_and_resumes(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 600)
    program = (
        "import sys, argparse; from launcher.commands import data; parser = argparse.ArgumentParser(); "
        "data.add_arguments(parser); sys.exit(data.run(parser.parse_args()))"
    )
    command = [sys.executable, "-c", program, "pack", str(source)]
    options = ["--image-size", "64", "--workers", "2", "--max-length", "12", "--vocab-size", "200"]
    store = tmp_path / "killed"
    process = subprocess.Popen([*command, str(store), *options], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        journal = store / "packing.json"
        if journal.is_file() and json.loads(journal.read_text()).get("records", 0) >= 64:
            break
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    done = json.loads((store / "packing.json").read_text())["records"]
    assert 0 < done < 600
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "workers outlive the packer"
    again = subprocess.run([*command, str(store), *options], capture_output=True, text=True, check=True)
    assert "records were packed before" in again.stdout
    pack(source, tmp_path / "whole", image_size=64, max_length=12, vocab_size=200)
    assert contents(store) == contents(tmp_path / "whole")


def test_a_finished_store_is_left_alone_and_other_settings_are_refused(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 20)
    first = pack(source, tmp_path / "store", **SETTINGS)
    before = contents(tmp_path / "store")
    again = pack(source, tmp_path / "store", **SETTINGS)
    assert again.counts == first.counts
    assert contents(tmp_path / "store") == before
    with pytest.raises(DataError, match="another source or with other settings"):
        pack(source, tmp_path / "store", **(SETTINGS | {"image_size": 8}))


def test_a_copy_of_the_source_is_the_same_source(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 20)
    pack(source, tmp_path / "store", **SETTINGS)
    os.utime(source, (1, 1))  # as a new installation does
    pack(source, tmp_path / "store", **SETTINGS)
    write_parquet(source, 21)
    with pytest.raises(DataError, match="another source"):
        pack(source, tmp_path / "store", **SETTINGS)


def test_two_packs_do_not_write_one_store(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 70)

    def meanwhile(done: int, total: int | None) -> None:
        with pytest.raises(DataError, match="another pack is writing it"):
            pack(source, tmp_path / "store", **SETTINGS)

    pack(source, tmp_path / "store", progress=meanwhile, **SETTINGS)
    assert verify(tmp_path / "store") == []


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "a.parquet", 5)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "images-00000.npy").write_text("precious")
    with pytest.raises(DataError, match=r"is not empty \(images-00000\.npy\)"):
        pack(source, tmp_path / "thesis", **SETTINGS)


BAD_CAPTIONS = {
    "": "caption: empty",
    "   ": "caption: empty",
    None: "caption: empty",
    "nan": "caption: empty",
    "caf\udc92": "caption: not UTF-8",
    7: "caption: not text",
}


def test_bad_captions_are_reported_by_row_and_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", 3)
    with (folder / "metadata.jsonl").open("a") as file:
        for value in [*BAD_CAPTIONS, "long " * 3000, "word " * 20]:
            file.write(json.dumps({"file_name": "0001.jpg", "text": value}) + "\n")
    result = pack(folder, tmp_path / "store", **SETTINGS)
    tokens = Tokenizer.from_file(str(tmp_path / "store" / "tokenizer.json")).encode
    found = [(entry["row"], entry["reason"], entry["samples"]) for entry in errors(tmp_path / "store")]
    expected = [(4 + place, reason, 1) for place, reason in enumerate(BAD_CAPTIONS.values())]
    assert found == [*expected, (10, "caption: very long", 0)]
    assert result.counts.samples == 5
    assert result.counts.truncated == 2 + sum(len(tokens(text)) > 12 for text in map(caption, range(3)))
    assert result.counts.skipped == len(BAD_CAPTIONS)
    assert "skipped 6 (caption: empty 4, caption: not UTF-8 1, caption: not text 1)" in result.summary()


def test_fail_stops_at_the_first_bad_record_and_skip_goes_on_from_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", 50)
    (folder / "0040.jpg").write_bytes(b"\xff\xd8 not much")
    with pytest.raises(DataError, match=r"metadata\.jsonl, row 41: image: "):
        pack(folder, tmp_path / "store", on_error="fail", **SETTINGS)
    with pytest.raises(DataError, match="not finished"):
        Store.open(tmp_path / "store")
    result = pack(folder, tmp_path / "store", on_error="skip", **SETTINGS)
    assert (result.counts.samples, result.counts.skipped, result.resumed_records) == (49, 1, 32)


def test_a_source_with_nothing_good_makes_no_store(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", 2)
    for file in folder.glob("*.jpg"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match="nothing could be packed"):
        pack(folder, tmp_path / "store", **SETTINGS)
    with pytest.raises(DataError):
        Store.open(tmp_path / "store")


def damaged_files(count: int) -> list[bytes]:
    """Files damaged in every way: cut, wrong header, wrong type, empty, huge, flipped bytes, garbage."""
    rng = np.random.default_rng(5)
    forms = [("JPEG", {}), ("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {}), ("PPM", {})]
    forms += [("JPEG2000", {}), ("TIFF", {"compression": "tiff_lzw"}), ("AVIF", {}), ("TGA", {}), ("ICO", {})]
    good = [
        encode(picture(number, (64, 64)), form, **options) for number, (form, options) in enumerate(forms)
    ]
    files = [
        b"",
        b"\0" * 1000,
        b"hello",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"%PDF-1.7",
        b"II*\0" + b"\xff" * 60,
    ]
    while len(files) < count:
        data = bytearray(good[rng.integers(len(good))])
        kind = rng.integers(6)
        if kind == 0:  # cut
            data = data[: rng.integers(len(data))]
        elif kind == 1:  # wrong header
            data[:8] = rng.bytes(8)
        elif kind == 2:  # huge dimensions: random bytes where formats keep their sizes
            place = int(rng.integers(4, 40))
            data[place : place + 4] = b"\xff" * 4
        elif kind == 3:  # flipped bytes
            for place in rng.integers(0, len(data), 40):
                data[place] = rng.integers(256)
        elif kind == 4:  # two files in one
            data = data[: len(data) // 2] + bytearray(good[rng.integers(len(good))])[30:]
        else:  # a hole
            start = int(rng.integers(len(data)))
            data[start : start + 200] = b"\0" * len(data[start : start + 200])
        files.append(bytes(data))
    return files


@pytest.mark.parametrize("workers", [0, 2])
def test_hundreds_of_damaged_files_are_all_accounted_for(workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    lines = []
    for number, data in enumerate(damaged_files(400)):
        (folder / f"{number:04}.jpg").write_bytes(data)
        lines.append(json.dumps({"file_name": f"{number:04}.jpg", "text": caption(number)}))
    lines.append(json.dumps({"file_name": "missing.jpg", "text": "not there"}))
    lines.append(json.dumps({"file_name": ".", "text": "a folder"}))
    lines.append(json.dumps({"file_name": "x\0y", "text": "a NUL"}))
    (folder / "good.png").write_bytes(encode(picture(0), "PNG"))
    lines.append(json.dumps({"file_name": "good.png", "text": "good"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    result = pack(folder, tmp_path / "store", workers=workers, **SETTINGS)
    counts = result.counts
    assert counts.records == len(lines) == counts.samples + counts.skipped
    assert counts.skipped > 200
    reported = Counter(entry["reason"] for entry in errors(tmp_path / "store") if entry["samples"])
    assert reported == counts.skipped_by_reason
    assert not any("crashed" in reason for reason in reported)
    assert verify(tmp_path / "store") == []


@pytest.mark.parametrize("damage", ["cut", "hole", "not parquet"])
def test_damaged_parquet_files_are_skipped_and_the_others_packed(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    for name in ("a", "b", "c"):
        write_parquet(folder / f"{name}.parquet", 130)
    path = folder / "b.parquet"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "hole":
        data[len(data) // 4 : len(data) // 3] = b"\0" * (len(data) // 3 - len(data) // 4)
    else:
        data = bytearray(b"hello")
    path.write_bytes(data)
    result = pack(folder, tmp_path / "store", **SETTINGS)
    assert result.counts.samples >= 260
    assert result.counts.skipped
    if damage == "hole":  # the file's own count of rows is known
        assert result.counts.samples + result.counts.skipped == 390


def double_or_die(numbers: list[int]) -> list[int]:
    if 13 in numbers:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [2 * number for number in numbers]


def do_nothing() -> None:
    pass


def test_an_item_that_kills_its_worker_costs_only_itself() -> None:
    pool = OrderedPool(double_or_die, lambda item: -item, workers=2, initializer=do_nothing, arguments=())
    try:
        batches = [list(range(start, start + 3)) for start in range(0, 30, 3)]
        outcomes = [outcome for batch in pool.map(batches) for outcome in batch]
    finally:
        pool.close()
    assert outcomes == [-13 if number == 13 else 2 * number for number in range(30)]


def test_manifest_and_arrays_need_nothing_of_ours(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", 10)
    pack(tmp_path / "source", tmp_path / "store", **SETTINGS)
    program = """
import json, sys, numpy as np
manifest = json.load(open("manifest.json"))
images = np.load("images-00000.npy", mmap_mode="r")
tokens, ends = np.load("caption_tokens.npy"), np.load("caption_token_ends.npy")
caption = np.load("sample_captions.npy")[4]
print(images.shape, images.dtype, tokens[ends[caption - 1]] == manifest["cls_id"])
import hashlib
print(hashlib.sha256(images.tobytes()).hexdigest() == manifest["files"]["images-00000.npy"]["sha256"])
assert not any(name.startswith(("launcher", "models")) for name in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path / "store",
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split("\n")[:2] == ["(10, 3, 16, 16) uint8 True", "True"]


def test_given_tokenizer_is_stored_with_the_data(tmp_path: Path) -> None:
    from launcher.data.tokenizer import train_wordpiece

    train_wordpiece(["a picture with red and blue"] * 3, 100).save(str(tmp_path / "mine.json"))
    write_folder(tmp_path / "source", 5)
    pack(tmp_path / "source", tmp_path / "store", tokenizer=tmp_path / "mine.json", **SETTINGS)
    manifest = Manifest.read(tmp_path / "store")
    assert json.loads((tmp_path / "store" / manifest.tokenizer).read_text())["model"]["type"] == "WordPiece"
