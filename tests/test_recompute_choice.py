"""The optimal set of recomputed layers, against every set there is."""

import itertools
import random

import pytest

from launcher.memory.prediction import DevicePrediction, Moment
from launcher.memory.recompute import Choice, Link, chain_of, cheapest_recompute


def _highest(chain: list[Link], chosen: frozenset[str], in_flight: int) -> int:
    choices = [link.recomputed if link.name in chosen else link.plain for link in chain]
    whole = sum(choice.kept_bytes for choice in choices)
    before, highest = 0, 0
    for choice in choices:
        highest = max(highest, (in_flight - 1) * whole + before + choice.peak_bytes)
        before += choice.kept_bytes
    return highest


def _brute_force(chain: list[Link], limit: int, in_flight: int) -> float | None:
    open_names = [link.name for link in chain if link.recomputed]
    seconds = {link.name: link.recomputed.seconds for link in chain if link.recomputed}
    fitting = [
        sum(seconds[name] for name in chosen)
        for count in range(len(open_names) + 1)
        for chosen in itertools.combinations(open_names, count)
        if _highest(chain, frozenset(chosen), in_flight) <= limit
    ]
    return min(fitting, default=None)


def _random_chain(seed: int) -> list[Link]:
    """Kinds of equal layers, as in a model; a recomputed layer may have the higher spike."""
    chance = random.Random(seed)
    chain = []
    for kind in range(3):
        kept, spike, seconds = chance.randint(5, 40), chance.randint(0, 30), chance.randint(1, 9)
        plain, again = (
            Choice(kept, kept + spike, 0.0),
            Choice(chance.randint(0, 4), chance.randint(5, 90), seconds),
        )
        for number in range(chance.randint(1, 4)):
            chain.append(Link(f"{kind}.{number}", plain, again if chance.random() < 0.9 else None))
    return chain


@pytest.mark.parametrize("in_flight", [1, 3])
def test_cheapest_set_equals_brute_force(in_flight: int) -> None:
    answers = set()
    for seed in range(60):
        chain = _random_chain(seed)
        top = _highest(chain, frozenset(), in_flight)
        for limit in (top // 3, top // 2, 2 * top // 3, top - 1, top):
            expected = _brute_force(chain, limit, in_flight)
            found = cheapest_recompute(chain, limit, in_flight)
            if expected is None:
                assert found is None
            else:
                seconds = {link.name: link.recomputed.seconds for link in chain if link.recomputed}
                assert sum(seconds[name] for name in found) == expected
                assert _highest(chain, found, in_flight) <= limit
            answers.add(expected is None)
    assert answers == {True, False}


def test_recomputing_more_can_need_more_memory() -> None:
    """The last layer's own spike is what counts: it is better left alone."""
    chain = [
        Link("a.0", Choice(50, 60, 0.0), Choice(1, 60, 1.0)),
        Link("a.1", Choice(50, 60, 0.0), Choice(1, 90, 1.0)),
    ]
    assert cheapest_recompute(chain, 70) == {"a.0"}
    assert cheapest_recompute(chain, 59) is None


def test_chain_from_predictions_holds_what_is_allocated_beside_activations() -> None:
    def device(tops: dict[str, int]) -> DevicePrediction:
        return DevicePrediction(
            "cuda:0",
            tuple(
                Moment("backward", name, {"activations": top - 100, "parameters": 100})
                for name, top in tops.items()
            ),
        )

    chain = chain_of(
        ["embed", "a.0", "a.1"],
        device({"embed": 110, "a.0": 150, "a.1": 180}),
        device({"embed": 110, "a.0": 152, "a.1": 155}),
        kept=[(10, 10), (30, 2), (30, 2)],
        seconds=[1.0, 2.0, 2.0],
    )
    assert chain[0].recomputed is None
    assert chain[2].plain.peak_bytes == 180 - 40
    assert chain[2].recomputed == Choice(2, 155 - 12, 2.0)
    assert cheapest_recompute(chain, 180) == frozenset()
    assert cheapest_recompute(chain, 152) == {"a.0"}
    assert cheapest_recompute(chain, 151) is None
