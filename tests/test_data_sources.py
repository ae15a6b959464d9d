"""Every form of source gives the same pairs; where Hugging Face datasets reads it, the same as that does."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_makers import caption, encode, picture, write_folder, write_parquet, write_tar
from PIL import Image

from launcher.data.sources import Record, open_source, read_image
from models.errors import DataError

COUNT = 6
PAIRS = [(number, caption(number, which)) for number in range(COUNT) for which in range(2)]


def images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        (folder / f"{number:04}.jpg").write_bytes(encode(picture(number)))
    return folder


def image_folder(root: Path) -> Path:
    return write_folder(root / "folder", COUNT, captions=2)


def jsonl(root: Path) -> Path:
    images(root / "jsonl" / "pictures")
    rows = [{"image": f"pictures/{number:04}.jpg", "caption": text} for number, text in PAIRS]
    (root / "jsonl" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "jsonl" / "list.jsonl"


def json_list(root: Path) -> Path:
    images(root / "json")
    rows = [
        {"image": f"{number:04}.jpg", "caption": [caption(number, 0), caption(number, 1)]}
        for number in range(COUNT)
    ]
    (root / "json" / "train.json").write_text(json.dumps(rows))
    return root / "json" / "train.json"


def csv(root: Path) -> Path:
    images(root / "csv")
    rows = "".join(f'{number:04}.jpg,"{text}"\r\n' for number, text in PAIRS)
    (root / "csv" / "list.csv").write_text("\ufeffimage,caption\r\n" + rows)
    return root / "csv" / "list.csv"


def flickr_csv(root: Path) -> Path:
    images(root / "fcsv")
    rows = "".join(f"{number:04}.jpg| {place % 2}| {text}\n" for place, (number, text) in enumerate(PAIRS))
    (root / "fcsv" / "results.csv").write_text("image_name| comment_number| comment\n" + rows)
    return root / "fcsv" / "results.csv"


def coco(root: Path) -> Path:
    images(root / "coco" / "train2017")
    content = {
        "images": [{"id": 100 + number, "file_name": f"{number:04}.jpg"} for number in range(COUNT)],
        "annotations": [
            {"id": place, "image_id": 100 + number, "caption": text}
            for place, (number, text) in enumerate(PAIRS)
        ],
    }
    path = root / "coco" / "annotations" / "captions_train2017.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    return path


def karpathy(root: Path) -> Path:
    images(root / "karpathy" / "images")
    content = {
        "images": [
            {
                "filename": f"{number:04}.jpg",
                "split": "train",
                "sentences": [{"raw": caption(number, 0)}, {"raw": caption(number, 1)}],
            }
            for number in range(COUNT)
        ]
    }
    (root / "karpathy" / "dataset_flickr8k.json").write_text(json.dumps(content))
    return root / "karpathy" / "dataset_flickr8k.json"


def flickr_token(root: Path) -> Path:
    images(root / "flickr" / "flickr30k-images")
    lines = [f"{number:04}.jpg#{place % 2}\t{text}\n" for place, (number, text) in enumerate(PAIRS)]
    (root / "flickr" / "results_20130124.token").write_text("".join(lines))
    return root / "flickr" / "results_20130124.token"


def webdataset(root: Path) -> Path:
    for shard in range(2):
        members = []
        for number in range(shard * 3, shard * 3 + 3):
            texts = [caption(number, 0), caption(number, 1)]
            members += [
                (f"{number:06}.jpg", encode(picture(number))),
                (f"{number:06}.json", json.dumps({"captions": texts}).encode()),
            ]
        write_tar(root / "wds" / f"{shard:05}.tar", members)
    return root / "wds"


def saved(root: Path) -> Path:
    import datasets

    rows = {
        "image": [{"bytes": encode(picture(number)), "path": None} for number in range(COUNT)],
        "captions": [[caption(number, 0), caption(number, 1)] for number in range(COUNT)],
    }
    features = datasets.Features(
        {"image": datasets.Image(), "captions": datasets.List(datasets.Value("string"))}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(root / "saved"))
    return root / "saved"


def parquet(root: Path) -> Path:
    (root / "parquet").mkdir()
    rows = [
        {
            "image": {"bytes": encode(picture(number)), "path": "x.jpg"},
            "captions": [caption(number, 0), caption(number, 1)],
        }
        for number in range(COUNT)
    ]
    for shard in range(2):
        table = pa.Table.from_pylist(rows[shard * 3 : shard * 3 + 3])
        pq.write_table(table, root / "parquet" / f"train-{shard:05}-of-00002.parquet")
    return root / "parquet"


FORMS = [
    image_folder, jsonl, json_list, csv, flickr_csv, coco, karpathy, flickr_token, webdataset, saved, parquet,
]  # fmt: skip


def pairs_of(records: list[Record]) -> list[tuple[int, str]]:
    """Pairs (number of the picture, caption) by looking at the pixels."""
    pairs = []
    for record in records:
        assert record.problem is None, record
        seen = np.asarray(Image.open(io.BytesIO(read_image(record.image))), dtype=int)
        differences = [
            np.abs(seen - np.asarray(picture(number), dtype=int)).mean() for number in range(COUNT)
        ]
        number = int(np.argmin(differences))
        assert differences[number] < 6
        for _, value in record.captions:
            pairs.append((number, value.decode() if isinstance(value, bytes) else str(value).strip()))
    return pairs


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_same_pairs(form, tmp_path: Path) -> None:
    source = open_source(form(tmp_path))
    records = list(source.read(True))
    assert pairs_of(records) == PAIRS
    assert len(records) == COUNT, "each picture is decoded once"
    assert source.rows in (None, COUNT)
    assert [record.captions for record in source.read(False)] == [record.captions for record in records]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_two_readings_agree_and_the_fingerprint_too(form, tmp_path: Path) -> None:
    path = form(tmp_path)
    first, second = open_source(path), open_source(path)
    assert list(first.read(True)) == list(second.read(True)) == list(first.read(True))
    assert first.fingerprint() == second.fingerprint()


def test_parquet_agrees_with_datasets(tmp_path: Path) -> None:
    import datasets

    path = write_parquet(tmp_path / "a.parquet", 20)
    table = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    expected = [(row["image"]["bytes"], row["caption"]) for row in table if row["split"] == "train"]
    ours = [(record.image, record.captions[0][1]) for record in open_source(path, split="train").read(True)]
    assert ours == expected


def test_image_folder_agrees_with_datasets(tmp_path: Path) -> None:
    import datasets

    folder = write_folder(tmp_path / "folder", 5)
    table = datasets.load_dataset(
        "imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache")
    )
    expected = [(np.asarray(row["image"]).tolist(), row["text"]) for row in table]
    ours = [
        (np.asarray(Image.open(io.BytesIO(read_image(record.image)))).tolist(), record.captions[0][1])
        for record in open_source(folder).read(True)
    ]
    assert ours == expected


@pytest.mark.parametrize("form", ["webdataset", "files", "parquet"])
def test_img2dataset_output(form: str, tmp_path: Path) -> None:
    """The layouts that img2dataset's README and writer.py give."""
    metadata = [
        {"key": f"{number:09}", "url": "http://x", "caption": caption(number), "status": "success"}
        for number in range(COUNT)
    ]
    if form == "parquet":
        rows = [row | {"jpg": encode(picture(number))} for number, row in enumerate(metadata)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "00000.parquet")
    else:
        pq.write_table(pa.Table.from_pylist(metadata), tmp_path / "00000.parquet")
        (tmp_path / "00000_stats.json").write_text("{}")
        files = []
        for number, row in enumerate(metadata):
            files += [
                (f"{row['key']}.jpg", encode(picture(number))),
                (f"{row['key']}.txt", row["caption"].encode()),
                (f"{row['key']}.json", json.dumps(row).encode()),
            ]
        if form == "webdataset":
            write_tar(tmp_path / "00000.tar", files)
        else:
            (tmp_path / "00000").mkdir()
            for name, content in files:
                (tmp_path / "00000" / name).write_bytes(content)
    records = list(open_source(tmp_path).read(True))
    assert pairs_of(records) == [(number, caption(number)) for number in range(COUNT)]


def test_compressed_tar(tmp_path: Path) -> None:
    import gzip

    plain = write_tar(tmp_path / "a.tar", [("0.jpg", encode(picture(0))), ("0.txt", b"a caption")])
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (record,) = open_source(tmp_path / "b.tar.gz").read(True)
    assert record.image == encode(picture(0))


def test_garbage_inside_a_tar_is_reported_not_taken_for_its_end(tmp_path: Path) -> None:
    members = [(f"{number}.{ending}", b"x" * 600) for number in range(4) for ending in ("jpg", "txt")]
    path = write_tar(tmp_path / "a.tar", members)
    data = bytearray(path.read_bytes())
    data[512 * 3 * 4 : 512 * 3 * 4 + 512] = b"\xab" * 512
    path.write_bytes(data)
    records = list(open_source(path).read(True))
    assert [record.problem is None for record in records] == [True, True, False]
    assert records[-1].problem[0] == "source: tar file damaged"


def test_rows_that_cannot_be_read_are_reported_by_line(tmp_path: Path) -> None:
    lines = [
        b'{"image": "a.jpg", "caption": "fine"}',
        b'{"image": "b.jpg", "caption": ',
        b"[1, 2]",
        b'{"caption": "no image"}',
        b'{"image": "c.jpg", "caption": "caf\x92"}',
        b"",
        b'{"image": "d.jpg", "caption": NaN}',
    ]
    (tmp_path / "list.jsonl").write_bytes(b"\n".join(lines))
    records = list(open_source(tmp_path / "list.jsonl").read(True))
    assert [(record.row, record.problem and record.problem[0]) for record in records] == [
        (1, None),
        (2, "row: unreadable"),
        (3, "row: unreadable"),
        (4, "row: names no image"),
        (5, None),
        (7, None),
    ]


def test_csv_rows_with_too_few_cells_are_reported(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"image,caption\na.jpg,fine\nb.jpg\nc.jpg,caf\x92\n")
    records = list(open_source(tmp_path / "list.csv").read(True))
    assert [(record.row, record.problem is None) for record in records] == [(2, True), (3, False), (4, True)]


def test_file_names_that_are_not_utf8_are_found(tmp_path: Path) -> None:
    name = b"caf\xe9.jpg"
    with open(bytes(tmp_path) + b"/" + name, "wb") as file:
        file.write(encode(picture(0)))
    (tmp_path / "list.csv").write_bytes(b"image,caption\n" + name + b",fine\n")
    (record,) = open_source(tmp_path / "list.csv").read(True)
    assert read_image(record.image) == encode(picture(0))


def test_split_chooses_files_named_after_it(tmp_path: Path) -> None:
    for split, number in (("train", 0), ("test", 1)):
        rows = [{"image": {"bytes": encode(picture(number)), "path": None}, "caption": caption(number)}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet")
    assert pairs_of(list(open_source(tmp_path, split="test").read(True))) == [(1, caption(1))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"", "cannot tell its form"),
        ("a.json", b"{", "not JSON"),
        ("a.json", b'{"x": 1}', "neither a list of rows nor COCO"),
        ("a.csv", b"x,y\n1,2\n", "no image column among x, y; name it with --image-column"),
    ],
)
def test_sources_that_are_none_are_refused_by_name(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(open_source(tmp_path / name).read(True))


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no data that vlfit reads"):
        open_source(tmp_path)
