"""Which layers to recompute: the set that costs the least time and fits, for a chain of layers.

Layer i runs forward or backward on top of what the layers before it keep, so with kept bytes k and a spike p
that depend on whether a layer is recomputed, and n micro-batches in flight of which n - 1 are whole:

    (n - 1) * sum of all k  +  sum of k before i  +  p of i   <=   limit           for every layer i

Walking up the chain, three numbers say all about a prefix: bytes kept, the highest spike so far, seconds. A
prefix that is no better in any of them than another can be dropped, whatever follows: for sums and maxima only
grow with them. What is left at the end is exact. Nothing assumes that recomputing a layer saves memory: it
lowers k, but can raise p.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.memory.prediction import DevicePrediction
from models.names import is_repeated


@dataclass(frozen=True)
class Choice:
    """A layer with or without recomputation."""

    kept_bytes: int
    """Kept from its forward to its backward."""
    peak_bytes: int
    """Highest point of its forward and its backward above what the layers before it keep."""
    seconds: float
    """What recomputing costs; 0 without."""


@dataclass(frozen=True)
class Link:
    """One layer of the chain."""

    name: str
    plain: Choice
    recomputed: Choice | None
    """None: cannot be recomputed."""


Prefix = tuple[float, int, int, tuple | None]
"""Seconds, kept bytes, highest point, and the layers recomputed as a linked list."""


def cheapest_recompute(chain: Sequence[Link], limit_bytes: int, in_flight: int = 1) -> frozenset[str] | None:
    """Give the layers to recompute so that no point is above ``limit_bytes`` and time is least; None: none fits."""
    front: list[Prefix] = [(0.0, 0, 0, None)]
    for link in chain:
        longer = []
        for seconds, kept, highest, names in front:
            for choice in (link.plain, link.recomputed):
                if choice is None:
                    continue
                top = max(highest, kept + choice.peak_bytes)
                whole = kept + choice.kept_bytes
                if (in_flight - 1) * whole + top > limit_bytes:
                    continue
                taken = names if choice is link.plain else (link.name, names)
                # With one micro-batch a spike that fits is forgotten.
                longer.append((seconds + choice.seconds, whole, top if in_flight > 1 else 0, taken))
        front = _undominated(longer)
    if not front:
        return None
    found, names = set(), front[0][3]
    while names is not None:
        name, names = names
        found.add(name)
    return frozenset(found)


def chain_of(
    names: Sequence[str],
    without: DevicePrediction,
    everything: DevicePrediction,
    kept: Sequence[tuple[int, int]],
    seconds: Sequence[float],
    in_flight: int = 1,
) -> list[Link]:
    """Give the chain of one device from its predictions without and with all recomputation.

    Whatever else is allocated at a layer (weights, gradients so far, buffers) is part of both predictions, and so
    of the spikes. ``kept`` are each layer's bytes without and with recomputation, ``seconds`` its forward.
    """
    spikes = []
    for column, prediction in enumerate((without, everything)):
        top: dict[str, int] = {}
        for moment in prediction.timeline:
            if moment.phase in ("forward", "backward"):
                top[moment.where] = max(top.get(moment.where, 0), moment.total_bytes)
        before = (in_flight - 1) * sum(pair[column] for pair in kept)
        found = []
        for name, pair in zip(names, kept, strict=True):
            found.append(top.get(name, 0) - before)
            before += pair[column]
        spikes.append(found)
    return [
        Link(
            name,
            Choice(kept[i][0], spikes[0][i], 0.0),
            Choice(kept[i][1], spikes[1][i], seconds[i]) if is_repeated(name) else None,
        )
        for i, name in enumerate(names)
    ]


def _undominated(prefixes: list[Prefix]) -> list[Prefix]:
    """Keep those for which no other is at least as good in time, kept bytes and highest point; fastest first.

    Those kept so far form a staircase: of those with at most so many kept bytes, the last has the lowest highest.
    """
    prefixes.sort(key=lambda prefix: prefix[:3])
    front: list[Prefix] = []
    stairs_kept: list[int] = []
    stairs_highest: list[int] = []
    for prefix in prefixes:
        _, kept, highest, _ = prefix
        place = bisect_right(stairs_kept, kept)
        if place and stairs_highest[place - 1] <= highest:
            continue
        front.append(prefix)
        start = place - 1 if place and stairs_kept[place - 1] == kept else place
        end = place
        while end < len(stairs_kept) and stairs_highest[end] >= highest:
            end += 1
        stairs_kept[start:end], stairs_highest[start:end] = [kept], [highest]
    return front
