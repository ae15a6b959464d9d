"""Layer names: the shell patterns that plan files use to point at layers."""

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from models.errors import UserError


def select(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """Give the names that any pattern matches, in the order of ``names``.

    Raises UserError for a pattern that matches nothing: it is a misspelling, never a wish.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.3)
            hint = f"; the nearest layer is '{near[0]}'" if near else ""
            raise UserError(f"'{pattern}' matches no layer{hint}")
        chosen.update(matched)
    return [name for name in names if name in chosen]


def is_repeated(name: str) -> bool:
    """Tell whether a layer is one of a stack (``text.layer.3``): what recomputation is for."""
    return re.search(r"\.\d+$", name) is not None
