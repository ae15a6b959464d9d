"""``vlfit data``: pack, inspect, verify and export data stores."""

import argparse
import json
import os
import sys

HELP = "pack image-text data into a store, look into it, check it, export it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    pack = actions.add_parser("pack", help="decode and tokenize once (resumes after a kill)")
    pack.add_argument(
        "source", metavar="SOURCE", help="folder, .parquet, .jsonl, .csv, .json, .token or .tar"
    )
    pack.add_argument("store", metavar="STORE", help="folder to write")
    pack.add_argument("--image-size", type=_positive, default=224, metavar="N", help="side in pixels (224)")
    pack.add_argument("--tokenizer", metavar="PATH", help="Hugging Face tokenizer (default: train one)")
    pack.add_argument(
        "--vocab-size", type=_positive, default=4096, metavar="N", help="of a trained one (4096)"
    )
    pack.add_argument("--max-length", type=_positive, default=64, metavar="L", help="tokens per caption (64)")
    pack.add_argument(
        "--workers", type=int, default=None, metavar="K", help="processes (default: one per core)"
    )
    pack.add_argument(
        "--on-error", choices=("skip", "fail"), default="skip", help="what a bad record does (skip)"
    )
    pack.add_argument("--keep", choices=("encoded", "decoded"), default="decoded", help="pixels or JPEG")
    pack.add_argument("--shard-size", type=float, default=4.0, metavar="GB", help="size of an image file (4)")
    pack.add_argument("--split", metavar="NAME", help="only this split")
    pack.add_argument("--images", metavar="DIR", help="folder of the images, if not the listing's own")
    pack.add_argument("--image-column", metavar="NAME", help="column of the image")
    pack.add_argument("--caption-column", metavar="NAME", help="column of the caption or captions")
    pack.add_argument("--json", action="store_true", help="print the result as JSON")

    inspect = actions.add_parser("inspect", help="counts, sizes, a contact sheet")
    inspect.add_argument("store", metavar="STORE")
    inspect.add_argument("--sheet", metavar="PNG", help="write a contact sheet of random samples")
    inspect.add_argument("--json", action="store_true", help="print as JSON")

    verify = actions.add_parser("verify", help="check checksums, sizes and ids (exit 3 if damaged)")
    verify.add_argument("store", metavar="STORE")

    export = actions.add_parser("export", help="write WebDataset tars or Parquet")
    export.add_argument("store", metavar="STORE")
    export.add_argument("out", metavar="OUT", help="new folder")
    export.add_argument("--form", choices=("webdataset", "parquet"), default="webdataset")


def run(arguments: argparse.Namespace) -> int:
    """Do the chosen action."""
    actions = {"pack": _pack, "inspect": _inspect, "verify": _verify, "export": _export}
    return actions[arguments.action](arguments)


def _pack(arguments: argparse.Namespace) -> int:
    from launcher.data.pack import pack
    from launcher.data.progress import Progress

    workers = arguments.workers if arguments.workers is not None else len(os.sched_getaffinity(0))
    with Progress("packing") as report:
        result = pack(
            arguments.source,
            arguments.store,
            image_size=arguments.image_size,
            tokenizer=arguments.tokenizer,
            max_length=arguments.max_length,
            workers=workers,
            on_error=arguments.on_error,
            keep=arguments.keep,
            shard_size_bytes=int(arguments.shard_size * 1e9),
            split=arguments.split,
            images=arguments.images,
            image_column=arguments.image_column,
            caption_column=arguments.caption_column,
            vocab_size=arguments.vocab_size,
            progress=report,
        )
    if arguments.json:
        print(result.counts.model_dump_json())
        return 0
    if result.resumed_records:
        print(f"{result.resumed_records} records were packed before")
    print(f"{arguments.store}: {result.summary()}")
    if result.counts.skipped:
        print(f"{arguments.store}/errors.jsonl says which and why")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from launcher.data.inspect import contact_sheet, describe
    from launcher.data.store import Store

    store = Store.open(arguments.store)
    facts = describe(store)
    if arguments.json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    if arguments.sheet:
        contact_sheet(store).save(arguments.sheet)
        print(f"contact sheet: {arguments.sheet}", file=sys.stderr)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from launcher.data.verify import verify
    from models.errors import DataError

    found = verify(arguments.store)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return DataError.exit_code
    print(f"{arguments.store}: all checksums, sizes and ids are right")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from launcher.data.export import export
    from launcher.data.progress import Progress
    from launcher.data.store import Store

    with Progress("exporting") as report:
        files = export(Store.open(arguments.store), arguments.out, arguments.form, report)
    print(f"{arguments.out}: {len(files)} file{'s' * (len(files) != 1)}")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number
