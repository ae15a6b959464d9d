"""``vlfit config``: writes the generated DeepSpeed configs, or checks that they are as generated."""

import argparse
from pathlib import Path

HELP = "generate ds_configs/, or check it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("--out", metavar="DIR", help="folder of the files (default: ds_configs)")


def run(arguments: argparse.Namespace) -> int:
    """Write or check the files; gives 2 if a check found a difference."""
    from launcher.config import render_configs
    from models.errors import UserError

    folder = Path(arguments.out or "ds_configs")
    files = render_configs()
    if arguments.check:
        different = [name for name, text in files.items() if not _holds(folder / name, text)]
        if different:
            raise UserError(
                f"{folder}: not as generated: {', '.join(different)}; run vlfit config --out {folder}"
            )
        print(f"{folder}: {len(files)} files are as generated")
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    print(f"{folder}: wrote {len(files)} files")
    return 0


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
