"""The planner: the fastest strategy that fits, best first.

Every candidate's time is predicted (microseconds each) and its memory bounded from below by arithmetic. Then they
are taken in the order of their time: what the bound leaves is simulated (tenths of a second), until enough that
fit are found. A candidate whose layers to recompute are still to be chosen stands in the order with its time
without recomputation, which no choice can beat, and comes back with the time of the cheapest set that fits.
So nothing that was not simulated could have been better, given the predicted times.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from launcher.config.training import Precision
from launcher.memory.candidates import candidates, recompute_sets
from launcher.memory.plan_files import zero_name, zero_options
from launcher.memory.planned import Answer, Planned
from launcher.memory.prediction import DevicePrediction, Prediction
from launcher.memory.recompute import chain_of, cheapest_recompute
from launcher.memory.scaling import scaled_table, traced_ahead
from launcher.memory.simulate import predict
from launcher.memory.strategy import Strategy
from launcher.memory.table import LayerTable
from launcher.memory.timing import Cluster, LayerSeconds, step_time
from launcher.memory.weights import OPTIMIZER_STATES
from models.names import is_repeated
from models.spec import ModelSpec

OPEN = "optimal"
"""The name of the set that is still to be chosen."""

BEST, MISSES = 5, 3
SIMULATED_MAX = 300
"""Once the best is known, the runners-up are looked for until so many were simulated."""


@dataclass(frozen=True)
class Limits:
    """What a plan may use."""

    device_bytes: int
    host_bytes: int


def search(
    spec: ModelSpec,
    cluster: Cluster,
    global_batch: int,
    *,
    margin: float,
    precisions: Sequence[Precision],
) -> Answer:
    """Give the fastest plans that fit, and the nearest of the faster ones that do not."""
    hardware = cluster.hardware
    limits = Limits(
        round(hardware.memory_bytes * (1 - margin)), round(hardware.host_memory_bytes * (1 - margin))
    )
    with traced_ahead(spec, precisions, hardware.device_type):
        found = list(candidates(spec, cluster, global_batch, precisions))
        return _Search(spec, cluster, limits).run(found)


def evaluate(
    strategy: Strategy, cluster: Cluster, limits: Limits, prediction: Prediction, label: str
) -> Planned:
    """Put the costs of one strategy beside its choices."""
    time = step_time(strategy, LayerSeconds(table_for(strategy), cluster.hardware), cluster)
    return Planned(
        choices=choices_of(strategy, label),
        prediction=prediction,
        step=dict(vars(time)),
        limit_bytes=limits.device_bytes,
        host_limit_bytes=limits.host_bytes,
        processes_per_node=max(1, strategy.world_size // cluster.nodes),
    )


def choices_of(strategy: Strategy, label: str) -> dict:
    """A strategy in plain data, the model left out."""
    names = strategy.layers
    return {
        "engine": strategy.engine,
        "precision": strategy.precision,
        "zero": zero_name(strategy.zero),
        "world_size": strategy.world_size,
        "data_parallel": strategy.data_world,
        "micro_batch_size": strategy.micro_batch_size,
        "accumulation_steps": strategy.accumulation_steps,
        "global_batch_size": strategy.global_batch_size,
        "stages": strategy.stages,
        "bounds": list(strategy.bounds),
        "chunks": strategy.chunks,
        "recompute": label,
        "recomputed_layers": [name for name in names if name in strategy.recompute],
        "contrastive_rows": _contrastive_rows(strategy),
        "device_type": strategy.device_type,
        "fused_optimizer": strategy.fused_optimizer,
    }


def strategy_of(spec: ModelSpec, choices: dict) -> Strategy:
    """The strategy again, from ``choices_of``."""
    return Strategy(
        spec=spec,
        zero=zero_options(choices["zero"]),
        bounds=tuple(choices["bounds"]),
        recompute=frozenset(choices["recomputed_layers"]),
        **{
            key: choices[key]
            for key in (
                "engine",
                "precision",
                "world_size",
                "micro_batch_size",
                "accumulation_steps",
                "chunks",
            )
        },
        **{key: choices[key] for key in ("device_type", "fused_optimizer")},
    )


def table_for(strategy: Strategy) -> LayerTable:
    """The layer table of a strategy without tracing it for just these rows."""
    return scaled_table(
        strategy.spec,
        strategy.precision,
        strategy.rows,
        strategy.device_type,
        strategy.engine != "fairscale" and strategy.precision.startswith("autocast"),
        # Without recomputation the tables differ by little, and the best plan is traced for itself in the end.
        strategy.zero.stage == 3 and bool(strategy.recompute),
        strategy.micro_batch_size if strategy.engine == "fairscale" else None,
    )


@dataclass
class _Search:
    spec: ModelSpec
    cluster: Cluster
    limits: Limits
    seconds: dict[tuple, LayerSeconds] = field(default_factory=dict)
    predictions: dict[Strategy, Prediction] = field(default_factory=dict)
    failing: dict[tuple, int] = field(default_factory=dict)
    """Rows of the smallest micro-batch that was seen not to fit, by everything else."""

    def run(self, bases: list[Strategy]) -> Answer:
        sets = recompute_sets(self.spec)
        heap: list[tuple[float, int, str, Strategy]] = []
        number = count()
        searched = 0
        bounded: list[tuple[int, float, str, Strategy]] = []
        for base in bases:
            for label, chosen in (*sets.items(), (OPEN, sets["none"])):
                strategy = replace(base, recompute=chosen)
                searched += 1
                over = self.lower_bound(strategy, label) - self.limits.device_bytes
                time = self.time(strategy)
                if over > 0:
                    bounded.append((over, time, label, strategy))
                else:
                    heapq.heappush(heap, (time, next(number), label, strategy))
        plans: list[Planned] = []
        misses: list[Planned] = []
        done: set[Strategy] = set()
        while heap and len(plans) < BEST and (not plans or len(self.predictions) < SIMULATED_MAX):
            time, _, label, strategy = heapq.heappop(heap)
            base = replace(strategy, recompute=frozenset())
            if base in done or self._known_to_fail(strategy, label):
                continue
            if label == OPEN and time == self.time(base):
                cheapest = self.choose(base, sets["all"])
                if cheapest is None:
                    self._fails(base, label)
                elif cheapest not in sets.values():
                    solved = replace(base, recompute=cheapest)
                    heapq.heappush(heap, (self.time(solved), next(number), OPEN, solved))
                continue
            planned = self.plan(strategy, label)
            if planned.over_bytes:
                misses.append(planned)
                self._fails(strategy, label)
                continue
            exact = self.plan(strategy, label, exact=not plans)
            if exact.over_bytes:
                misses.append(exact)
                continue
            plans.append(exact)
            done.add(base)
        bounded.sort(key=lambda item: item[:2])
        if not plans:
            for _, _, label, strategy in bounded[: 4 * MISSES]:
                if label != OPEN:
                    planned = self.plan(strategy, label)
                    (misses if planned.over_bytes else plans).append(planned)
        misses.sort(key=lambda plan: (plan.over_bytes, plan.step_seconds))
        return Answer(searched, len(self.predictions), tuple(plans), tuple(misses[:MISSES]))

    def time(self, strategy: Strategy) -> float:
        """Predicted seconds of a step."""
        return step_time(strategy, self._seconds(strategy), self.cluster).seconds

    def plan(self, strategy: Strategy, label: str, exact: bool = False) -> Planned:
        """Simulate; ``exact`` traces the layers for just these rows."""
        prediction = predict(strategy) if exact else self._predict(strategy)
        return evaluate(strategy, self.cluster, self.limits, prediction, label)

    def choose(self, base: Strategy, everything: frozenset[str]) -> frozenset[str] | None:
        """The cheapest set of layers to recompute that fits, by the simulator's own word; None: there is none."""
        without, with_all = self._predict(base), self._predict(replace(base, recompute=everything))
        rows = table_for(base).layers
        seconds = dict(zip(rows, self._seconds(base).forward, strict=True))
        limit = self.limits.device_bytes
        for _ in range(4):
            chosen: set[str] = set()
            for number, (one, other) in enumerate(zip(without.devices, with_all.devices, strict=True)):
                names = _layers_of(one, list(rows))
                kept = [
                    (row.kept_bytes + row.boundary_bytes, row.kept_recomputed_bytes + row.boundary_bytes)
                    for row in (rows[name] for name in names)
                ]
                flight = _in_flight(base, number)
                beside = max(one.needed_bytes, other.needed_bytes) - max(one.peak_bytes, other.peak_bytes)
                chain = chain_of(names, one, other, kept, [seconds[name] for name in names], flight)
                found = cheapest_recompute(chain, limit - beside, flight)
                if found is None:
                    return None
                chosen |= found
            strategy = replace(base, recompute=frozenset(chosen))
            over = self._predict(strategy).worst.needed_bytes - self.limits.device_bytes
            if over <= 0:
                return strategy.recompute
            limit -= over
        return None

    def lower_bound(self, strategy: Strategy, label: str) -> int:
        """Bytes that a device needs at least: weights, state, gradients, and what its layers keep."""
        table = self._table(strategy)
        rows, names = table.layers, list(table.layers)
        half = strategy.precision in ("fp16", "bf16") and strategy.engine != "fairscale"
        states = OPTIMIZER_STATES.get(strategy.optimizer, 2)
        ranks, zero = strategy.data_world, strategy.zero
        highest = 0
        bounds = strategy.stage_bounds
        for stage, (first, end) in enumerate(pairwise(bounds)):
            elements = self._seconds(strategy).parameter_sums
            owned = elements[end] - elements[first]
            width = 2 if half else 4
            weights = width * owned / (ranks if zero.stage == 3 else 1)
            state = (4 * states + (4 if half else 0)) * owned / (ranks if zero.stage else 1)
            gradients = width * owned / (ranks if zero.stage >= 2 else 1)
            if zero.offload_optimizer:
                state, gradients = 0, gradients if zero.stage < 2 else 0
            if zero.offload_param:
                weights = 0
            kept = 0
            for name in names[first:end]:
                row = rows[name]
                again = name in strategy.recompute
                if label == OPEN and is_repeated(name):
                    kept += min(row.kept_bytes, row.kept_recomputed_bytes)
                else:
                    kept += row.kept_recomputed_bytes if again else row.kept_bytes
            forward = weights + state + _in_flight(strategy, stage) * kept
            if strategy.accumulation_steps == 1:
                forward = max(forward, weights + state + gradients)
            else:
                forward += gradients
            highest = max(highest, round(forward))
        return highest

    def _seconds(self, strategy: Strategy) -> LayerSeconds:
        key = (
            strategy.precision,
            strategy.rows,
            strategy.engine == "fairscale" and strategy.micro_batch_size,
        )
        if key not in self.seconds:
            self.seconds[key] = LayerSeconds(self._table(strategy), self.cluster.hardware)
        return self.seconds[key]

    def _table(self, strategy: Strategy) -> LayerTable:
        """Layers cost the same time under every engine, and nowhere less memory than in a pipeline."""
        whole = strategy.micro_batch_size if strategy.engine == "fairscale" else None
        device_type = strategy.device_type
        return scaled_table(self.spec, strategy.precision, strategy.rows, device_type, False, False, whole)

    def _predict(self, strategy: Strategy) -> Prediction:
        if strategy not in self.predictions:
            self.predictions[strategy] = predict(strategy, table_for(strategy))
        return self.predictions[strategy]

    def _known_to_fail(self, strategy: Strategy, label: str) -> bool:
        found = self.failing.get(_all_but_rows(strategy, label))
        return found is not None and strategy.rows * strategy.chunks >= found and label != OPEN

    def _fails(self, strategy: Strategy, label: str) -> None:
        key = _all_but_rows(strategy, label)
        self.failing[key] = min(strategy.rows * strategy.chunks, self.failing.get(key, 2**62))


def _all_but_rows(strategy: Strategy, label: str) -> tuple:
    """More rows need more memory where all else is equal. (More recomputation need not need less.)"""
    return (
        *(label, strategy.precision, strategy.engine, strategy.bounds, strategy.zero),
        *(strategy.chunks, strategy.accumulation_steps > 1),
    )


def _layers_of(device: DevicePrediction, names: list[str]) -> list[str]:
    """The layers that a device runs, in order."""
    ran = {moment.where for moment in device.timeline if moment.phase == "forward"}
    return [name for name in names if name in ran]


def _in_flight(strategy: Strategy, stage: int) -> int:
    """Micro-batches whose activations a stage keeps at most."""
    if strategy.engine == "fairscale":
        return strategy.chunks
    if strategy.engine == "deepspeed":
        return min(strategy.chunks * strategy.accumulation_steps, strategy.stages - stage)
    return 1


def _contrastive_rows(strategy: Strategy) -> int:
    """Rows among which ITC finds its negatives: fewer where batches are cut smaller."""
    seen = strategy.rows if strategy.engine == "deepspeed" else strategy.micro_batch_size
    return seen * strategy.data_world if strategy.spec.objectives.itc else 0
