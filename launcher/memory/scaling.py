"""Layer tables of any number of rows from two traced ones: every tensor and FLOP of a layer is affine in the rows.

Weights, masks of fixed size and kernels' constants do not grow; activations grow by the row. Only where the highest
point of a stretch moves to another operator as rows grow is the line not exact. Tracing a large model for one
number of rows takes about a second, and a search looks at dozens; the plan that it finds is predicted again with
the table traced for just its rows.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from launcher.config.training import Precision
from launcher.memory.table import LayerRow, LayerTable, layer_table
from launcher.memory.tracing import Event, Trace, Work
from models.spec import ModelSpec


@lru_cache(maxsize=256)
def scaled_table(
    spec: ModelSpec,
    precision: Precision,
    rows: int,
    device_type: str,
    around: bool,
    zero_3: bool,
    whole_rows: int | None = None,
) -> LayerTable:
    """Give the table for ``rows`` rows, from the lines through two small ones (itself where it is one of those).

    The loss, of ``whole_rows`` where a pipeline cuts them into ``rows``, is that of one rank; what of it grows with
    the square of the rows is small.
    """

    def traced(count: int) -> LayerTable:
        return layer_table(
            spec,
            precision=precision,
            rows=count,
            device_type=device_type,
            around=around and precision.startswith("autocast"),
            zero_3=zero_3,
        )

    small, large = (traced(count) for count in anchors(spec))
    table = interpolate(small, large, rows)
    if whole_rows and whole_rows != rows:
        whole = interpolate(small, large, whole_rows)
        table = replace(table, loss=whole.loss, target_bytes=whole.target_bytes)
    return table


@contextlib.contextmanager
def traced_ahead(spec: ModelSpec, precisions: Sequence[Precision], device_type: str) -> Iterator[None]:
    """Trace what a search of these precisions starts from, in two processes, into the cache on disk.

    Within the context the second one goes on with what only some of the candidates need: weights cast by an
    autocast around the model, ZeRO-3's recomputation and linear layer. What is not there
    when it is asked for is traced then.
    """
    first = [(precision, rows, False, False) for precision in precisions for rows in anchors(spec)]
    later = [
        (precision, rows, precision.startswith("autocast"), zero_3)
        for zero_3 in (False, True)
        for precision in precisions[1:]
        for rows in anchors(spec)
    ]
    other = multiprocessing.get_context("fork").Process(
        target=_trace, args=(spec, [*first[1::2], *later], device_type), daemon=True
    )
    other.start()
    try:
        _trace(spec, first[::2], device_type)
        yield
    finally:
        other.terminate()
        other.join()


def _trace(spec: ModelSpec, wanted: Sequence[tuple[Precision, int, bool, bool]], device_type: str) -> None:
    """Into the cache; a failure comes again, and is reported, where the table is used."""
    for precision, rows, around, zero_3 in wanted:
        with contextlib.suppress(Exception):
            layer_table(
                spec,
                precision=precision,
                rows=rows,
                device_type=device_type,
                around=around,
                zero_3=zero_3,
            )


def anchors(spec: ModelSpec) -> tuple[int, int]:
    """The two numbers of rows that are traced: whole ITM groups."""
    group = max(2, spec.group)
    return group, 2 * group


def interpolate(small: LayerTable, large: LayerTable, rows: int) -> LayerTable:
    """Give the table on the line through two others."""
    if rows in (small.rows_per_pass, large.rows_per_pass):
        return small if rows == small.rows_per_pass else large
    share = (rows - small.rows_per_pass) / (large.rows_per_pass - small.rows_per_pass)

    def between(a: int, b: int) -> int:
        return round(a + (b - a) * share)

    known: dict[int, LayerRow] = {}
    layers = {}
    for name, low in small.layers.items():
        if id(low) not in known:
            known[id(low)] = _row(low, large.layers[name], between)
        layers[name] = known[id(low)]
    return replace(
        small,
        rows_per_pass=rows,
        layers=layers,
        loss=_row(small.loss, large.loss, between),
        input_bytes=tuple(map(between, small.input_bytes, large.input_bytes)),
        target_bytes=between(small.target_bytes, large.target_bytes),
    )


Between = Callable[[int, int], int]


def _row(low: LayerRow, high: LayerRow, between: Between) -> LayerRow:
    return replace(
        low,
        kept_bytes=between(low.kept_bytes, high.kept_bytes),
        kept_recomputed_bytes=between(low.kept_recomputed_bytes, high.kept_recomputed_bytes),
        boundary_bytes=between(low.boundary_bytes, high.boundary_bytes),
        forward_peak_bytes=between(low.forward_peak_bytes, high.forward_peak_bytes),
        backward_peak_bytes=between(low.backward_peak_bytes, high.backward_peak_bytes),
        recompute_peak_bytes=between(low.recompute_peak_bytes, high.recompute_peak_bytes),
        forward=_work(low.forward, high.forward, between),
        backward=_work(low.backward, high.backward, between),
        plain=_trace_between(low.plain, high.plain, between),
        recomputed=_trace_between(low.recomputed, high.recomputed, between),
    )


def _trace_between(low: Trace | None, high: Trace | None, between: Between) -> Trace | None:
    if low is None or high is None:
        return None
    return replace(
        low,
        inputs=tuple(map(between, low.inputs, high.inputs)),
        outputs=tuple(map(between, low.outputs, high.outputs)),
        cached_bytes=between(low.cached_bytes, high.cached_bytes),
        forward=_events(low.forward, high.forward, between),
        backward=_events(low.backward, high.backward, between),
        forward_work=_work(low.forward_work, high.forward_work, between),
        backward_work=_work(low.backward_work, high.backward_work, between),
    )


def _events(low: tuple[Event, ...], high: tuple[Event, ...], between: Between) -> tuple[Event, ...]:
    return tuple(
        (kind, between(a, other_a), between(b, other_b)) if kind == "run" else (kind, a, b)
        for (kind, a, b), (_, other_a, other_b) in zip(low, high, strict=True)
    )


def _work(low: Work, high: Work, between: Between) -> Work:
    return Work(
        between(low.flops, high.flops),
        between(low.matmul_bytes, high.matmul_bytes),
        between(low.other_bytes, high.other_bytes),
    )
