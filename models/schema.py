"""Closed, typed schemas of YAML files, and one-line messages for what is wrong in one.

``ClosedModel`` is the base of every schema: no unknown key, no silent conversion, frozen after
validation. ``load_yaml`` reads a file into one and says in a line which file and key to mend.
"""

import difflib
import json
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic
import yaml
from pydantic_core import ErrorDetails

from models.errors import UserError


class ClosedModel(pydantic.BaseModel):
    """Base of all schemas: unknown keys, conversions such as "8" to 8, and later changes are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=pydantic.BaseModel)


def load_yaml(path: str | Path, model_class: type[Model]) -> Model:
    """Read a YAML file into ``model_class``.

    Raises UserError, one or two lines that name file and key: unreadable file, syntax (with line and
    column), duplicate key, unknown key (with the nearest known one), wrong type or value, missing key.
    """
    try:
        data = yaml.load(read_text(path), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UserError(f"{path}: not valid YAML{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return validate(data, model_class, path)


def validate(data: object, model_class: type[Model], source: str | Path) -> Model:
    """Validate plain data (what YAML or JSON gives) as ``model_class``; ``source`` is named in errors.

    Raises UserError, one or two lines.
    """
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {_shown(data)}"
        raise UserError(f"{source}: {found}; a mapping with these keys is needed: {_names(model_class)}")
    try:
        # pydantic's strict mode for JSON takes a list for a tuple and a string for a path, as files need
        return model_class.model_validate_json(json.dumps(data, default=_refuse_object))
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error.errors(), data, model_class)}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: {error}") from None


def read_text(path: str | Path) -> str:
    """Give the text of a file; raises UserError where there is no readable UTF-8 text file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known word is nearest to an unknown one: ``the nearest known key is "size"``.

    Gives ``no key is known here`` when ``known`` is empty.
    """
    by_lower = {name.lower(): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.0)
    return f'the nearest known key is "{by_lower[found[0]]}"' if found else "no key is known here"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and reads 1e-3 as a number as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'key "{key.value}" is given twice', key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML implements, takes 1e-3 for a string: its floats need a dot and a signed exponent
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _refuse_object(value: object) -> None:
    raise TypeError(f"{value!s} was read as a {type(value).__name__}; write it in quotes")


_NEEDED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
    "int_from_float": "a whole number",
}


def _first_problem(errors: Sequence[ErrorDetails], data: dict, model_class: type[pydantic.BaseModel]) -> str:
    """Phrase the first problem of a validation; those of one key (branches of a union) are one."""
    by_path: dict[tuple, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_data_path(error, data), []).append(error)
    # an unknown key is most often the misspelling that makes another one missing, so it goes first
    path, first = min(by_path.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    more = f" (and {len(by_path) - 1} more)" if len(by_path) > 1 else ""
    return _phrase(path, first, model_class) + more


def _phrase(path: tuple, errors: list[ErrorDetails], model_class: type[pydantic.BaseModel]) -> str:
    key, kind = dotted(path), errors[0]["type"]
    if kind == "extra_forbidden":
        return f'unknown key "{key}"; {nearest(str(path[-1]), _fields_at(model_class, path[:-1]))}'
    if kind == "missing":
        return f'key "{key}" is missing'
    if kind == "value_error":
        text = str(errors[0]["ctx"]["error"])
        return f"{key}: {text}" if key else text
    if all(error["type"] in _NEEDED for error in errors):
        needed = " or ".join(dict.fromkeys(_NEEDED[error["type"]] for error in errors))
        return f"{key} is {_shown(errors[0]['input'])}; it must be {needed}"
    text = errors[0]["msg"].removeprefix("Input ")
    return f"{key} is {_shown(errors[0]['input'])}; it {text}"


def dotted(path: Iterable[str | int]) -> str:
    """Join a path of keys and list positions: ``("stages", 0, "name")`` gives ``stages[0].name``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _data_path(error: ErrorDetails, data: object) -> tuple:
    """Path of an error in the data: pydantic's location also names the branch of a union."""
    path: list[str | int] = []
    for position, part in enumerate(error["loc"]):
        is_key = isinstance(data, dict) and part in data
        if is_key or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]  # type: ignore[index]
        elif not (error["type"] == "missing" and position == len(error["loc"]) - 1):
            continue
        path.append(part)
    return tuple(path)


def _fields_at(model_class: type[pydantic.BaseModel], path: tuple) -> list[str]:
    """Names of the fields that a key at ``path`` may have."""
    models = [model_class]
    for part in path:
        inner = [
            found
            for model in models
            if part in model.model_fields
            for found in _models_in(model.model_fields[part].annotation)
        ]
        models = inner or models  # a list position or a key of a mapping: its models are those found already
    return [name for model in models for name in model.model_fields]


def _models_in(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _names(model_class: type[pydantic.BaseModel]) -> str:
    return ", ".join(model_class.model_fields)


def _shown(value: object) -> str:
    """Show a value as JSON writes it, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
