"""Reading a JSON file with errors that name the place."""

import json
import re
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.schema import read_text

# A string, or a comment. Strings are matched first, so that "http://…" is no comment.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*|//[^\n]*|/\*.*?\*/', re.DOTALL)


def read_json(path: str | Path) -> dict[str, Any]:
    """Give the object that a JSON file holds; comments are allowed, since DeepSpeed reads files as Hjson.

    Raises UserError: unreadable file, syntax (line and column), duplicate key, NaN, not an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f'{path}: key "{key}" is given twice in one object; keep one')
            found[key] = value
        return found

    def refuse_constant(name: str) -> None:
        raise UserError(f"{path}: {name} is not JSON; write a finite number")

    text = _STRING_OR_COMMENT.sub(_blank_comment, read_text(path))
    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON (line {error.lineno}, column {error.colno}): {error.msg}"
        ) from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {type(data).__name__}, not an object; DeepSpeed needs {{...}}")
    return data


def _blank_comment(found: re.Match) -> str:
    text = found.group()
    # blanks of the same length keep the line and column of what follows
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)
