"""A training session: everything that one rank holds while it trains. ``launcher.opening`` builds it."""

import contextlib
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from launcher.agreement import from_all_ranks, largest_of_all_ranks
from launcher.checkpoint import Checkpoints, Progress
from launcher.checkpoint.interval import Interval
from launcher.console import Console
from launcher.data.batches import Plan
from launcher.data.loader import Loader
from launcher.data.order import DataPosition
from launcher.data.store import Store
from launcher.distributed import Distributed
from launcher.engines.engine import Engine, MicroBatch, StepResult
from launcher.evaluate import evaluate
from launcher.forecast import Forecast
from launcher.inputs import Inputs
from launcher.memory.measure import MemoryMeter
from launcher.plan import TrainPlan
from launcher.run_directory import RunDirectory
from launcher.signals import StopRequest
from launcher.skipped_steps import why_to_stop
from launcher.summary import closing_lines, evaluation_line, largest_by_device, sum_counts, versions
from models.errors import EXIT_INTERRUPTED, UserError
from models.losses import Objectives


@dataclass
class Session:
    """One rank's run. ``batches`` feeds the loop, ``record`` follows it, ``finish`` evaluates and sums up."""

    plan: TrainPlan
    distributed: Distributed
    device: torch.device
    engine: Engine
    loader: Loader
    data_plan: Plan
    inputs: Inputs
    eval_store: Store | None
    meter: MemoryMeter
    forecast: Forecast
    console: Console
    directory: RunDirectory | None
    eval_every: int | None
    progress: Progress
    checkpoints: Checkpoints
    interval: Interval
    save_required: bool
    max_skipped: int
    """Steps in a row that may be skipped because their numbers are not finite."""
    stop: StopRequest
    resources: contextlib.ExitStack
    """What stays open while the run lasts: the node's copy of the data."""
    step_rows: int = 0
    samples_here: int = 0
    """Of this process, not of those that it goes on from."""
    exit_code: int = 0
    results: list[StepResult] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    evaluations: dict[str, float] = field(default_factory=dict)
    _mark: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> bool:
        """All optimizer steps are done."""
        return self.progress.step >= self.plan.steps

    def batches(self) -> Iterator[Sequence[MicroBatch]]:
        """Give the micro-batches of this rank, one optimizer step at a time."""
        stream = iter(self.loader)
        count = len(
            self.data_plan.step(self.progress.position, self.engine.data_rank, self.engine.data_world)
        )
        while True:
            self._mark = time.perf_counter()
            raw = [next(stream) for _ in range(count)]
            # Every row of a step weighs the same, and the weights sum to 1 over all ranks.
            self.step_rows = round(1 / float(raw[0].weights[0]))
            yield [self.inputs(batch) for batch in raw]

    def record(self, result: StepResult) -> None:
        """Count a step: metrics, progress, evaluation where it is due."""
        progress = self.progress
        progress.step += 1
        before, progress.position = progress.position, self.data_plan.after(progress.position)
        progress.loss_first = result.loss if progress.loss_first is None else progress.loss_first
        progress.loss_last = result.loss
        progress.skipped_steps += result.overflow
        seconds = time.perf_counter() - self._mark
        self.step_seconds.append(seconds)
        self.results.append(result)
        progress.samples += self.step_rows
        self.samples_here += self.step_rows
        rate = self.step_rows / seconds
        if self.directory is not None:
            warning = self.directory.write_step(
                {
                    "step": progress.step,
                    "epoch": progress.position.epoch,
                    "loss": result.loss,
                    "losses": result.losses,
                    "skipped_rows": result.skipped_rows,
                    "lr": result.lr,
                    "grad_norm": result.grad_norm,
                    "loss_scale": result.loss_scale,
                    "overflow": result.overflow,
                    "samples": progress.samples,
                    "samples_per_second": rate,
                    "step_seconds": seconds,
                    "peak_allocated_bytes": self.meter.peak_bytes(),
                }
            )
            if warning:
                self.console.say(f"warning: {warning}")
        self.console.step(progress.step, result, rate)
        self._stop_over_skipped_steps(before)
        if self.eval_every and progress.step % self.eval_every == 0 and not self.finished:
            self._evaluate()
        self._save_where_due()

    def _stop_over_skipped_steps(self, position: DataPosition) -> None:
        """Raises UserError on every rank: a requeued run would only come to the same place."""
        if not self.results[-1].overflow:
            return
        ids = [int(number) for batch in self.data_plan.step(position, 0, 1) for number in batch.sample_ids]
        reason = why_to_stop(self.results, self.max_skipped, self.plan.config.loss_scale, ids)
        if reason is not None:
            raise UserError(f"step {self.progress.step}: {reason}")

    def _save_where_due(self) -> None:
        """Save at the interval, and on a signal to any rank; then the run is to end."""
        signal_number, due = largest_of_all_ranks(
            self.device,
            int(self.stop.received or 0),
            int(self.distributed.rank == 0 and self.interval.due(self.progress.step)),
        )
        if signal_number and not self.finished:
            self.console.say(f"{signal.Signals(signal_number).name}: saving after step {self.progress.step}")
            self.save(required=True)
            self.exit_code = EXIT_INTERRUPTED
        elif due and not self.finished:
            self.save(required=self.save_required)

    def save(self, required: bool) -> None:
        """Write a checkpoint. What is not ``required`` may fail with a warning: the last good one stays."""
        try:
            path = self.checkpoints.save(self.progress)
        except OSError as error:
            problem = f"no checkpoint after step {self.progress.step}: {error}"
            if required:
                raise UserError(f"{problem}; free space below {self.checkpoints.folder}") from None
            self.console.say(f"warning: {problem}; the last good one stays")
        else:
            self.console.say(f"saved {path}")
        self.interval.saved()
        self._mark = time.perf_counter()

    def finish(self, seconds: float) -> None:
        """Evaluate, and write and print the summary."""
        peaks = self.meter.stop()
        if self.eval_store is not None:
            self._evaluate()
        if self.interval.ever and self.results:
            self.save(required=True)  # there is no later one
        predicted = from_all_ranks(self.forecast.on(list(map(str, self.meter.devices)), self.engine.stage))
        summary = self.summary(from_all_ranks(peaks), predicted, seconds)
        if self.directory is not None:
            self.directory.write_summary(summary)
            self.console.close()
            for line in closing_lines(summary, self.directory.path):
                self.console.say(line)

    def summary(
        self, peaks: list[dict[str, int]], predicted: list[dict[str, int] | None], seconds: float
    ) -> dict[str, Any]:
        """Give ``summary.json`` as the design lists it."""
        config = self.plan.config
        # The first steps compile, allocate and warm caches up.
        steady = self.step_seconds[min(2, len(self.step_seconds) - 1) :] or [0.0]
        seconds_here = sum(self.step_seconds)
        return {
            "steps": self.progress.step,
            "epoch": self.progress.position.epoch,
            "loss_first": self.progress.loss_first,
            "loss_last": self.progress.loss_last,
            "samples": self.progress.samples,
            "samples_per_second": self.samples_here / seconds_here if seconds_here else 0.0,
            "step_seconds_median": statistics.median(steady),
            "training_seconds": seconds,
            "peak_allocated_bytes": largest_by_device(peaks),
            "peak_allocated_bytes_by_rank": peaks,
            "peak_reserved_bytes": self.meter.reserved_bytes(),
            "peak_rss_bytes": self.meter.rss_bytes(),
            "predicted_peak_bytes": largest_by_device(known)
            if (known := [p for p in predicted if p])
            else None,
            "precision_requested": config.precision_requested,
            "precision_used": config.precision_used,
            "recomputed_layers": len(self.plan.recompute),
            "engine": self.engine.name,
            "chunks": self.engine.chunks,
            "world_size": self.distributed.world_size,
            "skipped_rows": sum_counts([result.skipped_rows for result in self.results]),
            "skipped_steps": self.progress.skipped_steps,
            "metrics": self.evaluations,
            "versions": versions(),
        }

    def close(self) -> None:
        """End workers, threads and process groups; safe after a failure."""
        self.console.close()
        if self.directory is not None:
            self.directory.close()
        self.engine.close()
        self.resources.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _evaluate(self) -> None:
        if self.eval_store is None:
            return
        rows = self.plan.config.micro_batch_size
        self.evaluations = evaluate(
            self.engine, Objectives(self.plan.spec), self.eval_store, self.inputs, rows
        )
        self._mark = time.perf_counter()
        self.console.say(evaluation_line(self.progress.step, self.evaluations))
