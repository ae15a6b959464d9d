"""All strategies worth a look: what ``vlfit plan`` searches, as a list of values for each choice.

    zero        precision × ZeRO stage and offload × micro-batch × recompute
    fairscale   precision × ZeRO 0, 1 × stages and split × micro-batch × chunks × recompute
    deepspeed   precision × ZeRO 0, 1 × stages and split × micro-batch × recompute

Micro-batches are whole ITM groups where the batch allows it. DeepSpeed's pipeline runs the accumulation steps
through its stages, so that chunks would only be another name for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.config.training import Precision
from launcher.memory.plan_files import ZERO_SECTIONS, zero_options
from launcher.memory.scaling import anchors, scaled_table
from launcher.memory.strategy import Strategy
from launcher.memory.timing import Cluster, LayerSeconds
from models.balance import balance
from models.build import is_frozen, layer_names
from models.names import is_repeated
from models.spec import ModelSpec

STAGES = (2, 3, 4, 6, 8)
CHUNKS = (2, 4, 8, 16, 32)


def candidates(
    spec: ModelSpec, cluster: Cluster, global_batch: int, precisions: Sequence[Precision]
) -> Iterator[Strategy]:
    """Give each strategy without recomputation; which layers are recomputed is decided for each of them."""
    device_type = cluster.hardware.device_type
    for precision in precisions:
        base = Strategy(
            spec=spec,
            precision=precision,
            world_size=cluster.devices,
            micro_batch_size=0,
            accumulation_steps=0,
            fused_optimizer=device_type == "cuda",
            device_type=device_type,
        )
        offload_helps = device_type == "cuda"
        for name in ZERO_SECTIONS:
            options = zero_options(name)
            if (offload_helps or not options.offload_optimizer) and (cluster.devices > 1 or _alone(name)):
                yield from _batched(replace(base, zero=options), global_batch)
        for stages in STAGES:
            if cluster.devices % stages or stages > len(layer_names(spec)):
                continue
            for bounds in splits(spec, stages, cluster, precision):
                yield from _pipelines(replace(base, bounds=bounds), global_batch, cluster)


def _alone(zero: str) -> bool:
    """On one device only offloading makes ZeRO useful."""
    return zero == "0" or "offload" in zero


def _pipelines(base: Strategy, global_batch: int, cluster: Cluster) -> Iterator[Strategy]:
    stages = base.stages
    names = base.layers
    trains = all(
        any(not is_frozen(base.spec, name) for name in names[first:end])
        for first, end in zip(base.bounds, base.bounds[1:], strict=False)
    )
    for zero in ("0", "1"):
        if zero == "1" and cluster.devices == stages:
            continue
        sharded = replace(base, zero=zero_options(zero))
        if cluster.per_node % stages == 0 and base.precision not in ("fp16", "bf16"):
            # FairScale's process keeps fp32 weights and computes under autocast whatever 16 bits are asked for.
            inside = replace(sharded, engine="fairscale", world_size=cluster.devices // stages)
            for strategy in _batched(inside, global_batch):
                for chunks in CHUNKS:
                    rows, rest = divmod(strategy.micro_batch_size, chunks)
                    if rows and not rest and rows % min(base.spec.group, strategy.micro_batch_size) == 0:
                        yield replace(strategy, chunks=chunks)
        if trains:
            yield from _batched(replace(sharded, engine="deepspeed"), global_batch)


def _batched(base: Strategy, global_batch: int) -> Iterator[Strategy]:
    """All micro-batches of whole ITM groups; where a rank has no whole group, all its rows at once."""
    local, rest = divmod(global_batch, base.data_world)
    if rest or not local:
        return
    group = base.spec.group if local % base.spec.group == 0 else local
    for rows in range(group, local + 1, group):
        if local % rows == 0:
            yield replace(base, micro_batch_size=rows, accumulation_steps=local // rows)


def splits(spec: ModelSpec, stages: int, cluster: Cluster, precision: Precision) -> list[tuple[int, ...]]:
    """Bounds of the splits into stages: balanced by time, by memory, by parameters, and tower by tower."""
    table = scaled_table(spec, precision, anchors(spec)[1], cluster.hardware.device_type, False, False)
    seconds = LayerSeconds(table, cluster.hardware)
    rows = list(table.layers.values())
    costs = (
        [forward + backward for forward, backward in zip(seconds.forward, seconds.backward, strict=True)],
        [row.kept_bytes + row.boundary_bytes + 16.0 * sum(row.parameters) for row in rows],
        [float(sum(row.parameters)) for row in rows],
    )
    found = [_bounds(balance(cost, stages)) for cost in costs]
    names = list(table.layers)
    text = names.index("text.embed")
    fusion = next(i for i, name in enumerate(names) if name.startswith("fusion."))
    if stages == 2:
        found.append((0, text, len(names)))
    if stages == 3:
        found.append((0, text, fusion, len(names)))
    return list(dict.fromkeys(found))


def recompute_sets(spec: ModelSpec) -> dict[str, frozenset[str]]:
    """The sets that have a name: none, the fusion's layers, every repeated layer."""
    repeated = [name for name in layer_names(spec) if is_repeated(name)]
    return {
        "none": frozenset(),
        "fusion": frozenset(name for name in repeated if name.startswith("fusion.")),
        "all": frozenset(repeated),
    }


def _bounds(sizes: Sequence[int]) -> tuple[int, ...]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(bounds)
