"""Runs that are killed at random moments, also while they save, and go on: ``python tests/bench/torture.py``.

    python tests/bench/torture.py [--kills 60] [--cases NAME …] [--seed S] [--json FILE]

For each engine: a run that nobody kills, then one whose ranks get SIGKILL again and again, each time from
another moment of it, and which is started again with ``--resume auto``. Checked after every kill: the newest checkpoint
verifies, and is not older than the last that the log calls saved. Checked in the end: every loss equals the unkilled
run's (to the bit but for FairScale), and the sample ids of every epoch are complete and single.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml
from forked_ranks import fork_ranks, import_libraries
from synthetic import synthetic_store

STEPS, SAMPLES, BATCH, SAVE_EVERY = 48, 64, 16, 2
DOWN_SECONDS, START_SECONDS = 30.0, 3.0
SPEC = {
    "name": "small",
    "image": {"timm": "vit_tiny_patch16_224", "size": 32, "patch": 16, "width": 32, "depth": 2, "heads": 2},
    "text": {
        **{"vocab_size": 128, "width": 32, "layers": 2, "heads": 2, "feed_forward": 64, "positions": 32},
        "length": 12,
    },
    "fusion": {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64},
    "objectives": {"itc": {"width": 16}, "itm": {"group": 4}, "mlm": {}},
}  # fmt: skip
# The pipelines train without dropout. FairScale's adds up gradients in an order that differs from process to process,
# killed or not (four plain runs of one seed gave two sets of losses, 1e-7 apart): equal to 1e-5 must do for it.
DROPOUTS = {"text": ("dropout", "attention_dropout"), "fusion": ("dropout", "attention_dropout")}
STAGES = [
    {"name": "image", "layers": ["image.*"], "device": 0},
    {"name": "rest", "layers": ["text.*", "fusion.*", "head"], "device": 1},
]


@dataclass(frozen=True)
class Case:
    """An engine and its world."""

    ranks: int
    zero: int = 0
    pipeline: str = ""
    dropout: float = 0.1
    tolerance: float = 0.0
    """Largest relative difference of a loss."""


CASES = {
    "zero-0": Case(2, 0),
    "zero-1": Case(2, 1),
    "zero-2": Case(2, 2),
    "zero-3": Case(2, 3),
    "fairscale": Case(1, 0, "fairscale", 0.0, tolerance=1e-5),
    "deepspeed": Case(2, 0, "deepspeed", 0.0),
}


@dataclass
class Outcome:
    """What happened to the killed run of one case."""

    kills: int = 0
    while_saving: int = 0
    before_first_step: int = 0
    ended_by_force: int = 0
    resumed_from: tuple[int, ...] = ()
    slowest_down_seconds: float = 0.0
    problems: tuple[str, ...] = ()


def write_plan(case: Case, folder: Path) -> list[str]:
    """Write the files of a case; gives train.py's options for them."""
    spec = json.loads(json.dumps(SPEC))
    for part, names in DROPOUTS.items():
        spec[part] |= dict.fromkeys(names, case.dropout)
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": case.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    (folder / "config.json").write_text(json.dumps(config))
    words = [
        f"--config={folder}/config.json",
        f"--model={folder}/model.yaml",
        f"--steps={STEPS}",
        "--no-eval",
    ]
    if case.pipeline:
        partition = {"model": "small", "chunks": 2, "stages": STAGES}
        (folder / "partition.yaml").write_text(yaml.safe_dump(partition))
        words += [f"--partition={folder}/partition.yaml", f"--pipeline={case.pipeline}"]
    return words


def note_samples(folder: Path) -> Callable[[], None]:
    """In a rank: append what each step trained on to ``RANK.jsonl``."""

    def prepare() -> None:
        from launcher.inputs import Inputs
        from launcher.session import Session

        read: list[int] = []
        call, record = Inputs.__call__, Session.record

        def call_and_note(self, batch):
            read.extend(batch.sample_ids.tolist())
            return call(self, batch)

        def record_and_note(self, result):
            line = {"step": self.progress.step + 1, "data_rank": self.engine.data_rank, "samples": [*read]}
            read.clear()
            with (folder / f"{self.distributed.rank}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            record(self, result)

        Inputs.__call__, Session.record = call_and_note, record_and_note

    return prepare


def wait(children: list[int], seconds: float) -> list[int] | None:
    """Exit codes of all children; None where one of them still runs after ``seconds``."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
    return [codes[child] for child in children]


def ended(children: list[int], seconds: float) -> bool:
    """Whether all ended by themselves; after ``seconds`` they are killed."""
    deadline = time.monotonic() + seconds
    left = set(children)
    while left and time.monotonic() < deadline:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.002)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def last_step(run: Path) -> int:
    """Of the lines that were written to their end."""
    try:
        return sum(1 for _ in (run / "metrics.jsonl").open())
    except OSError:
        return 0


def saves_now(run: Path) -> bool:
    """Whether a checkpoint is half-written."""
    return any((run / "checkpoints").glob("step-*.partial"))


def wait_for_moment(kind: str, run: Path, alive: Callable[[], bool], rng: random.Random) -> None:
    """Return at a random moment of a kind: in a save, at a step, or before the first one."""
    if kind == "start":
        time.sleep(rng.uniform(0, 2.0))
        return
    target = last_step(run) + rng.randint(1, 5)
    while alive() and last_step(run) < target:
        time.sleep(0.002)
    if kind == "save":
        while alive() and not saves_now(run):
            pass
        time.sleep(rng.uniform(0, 0.02))
    else:
        time.sleep(rng.uniform(0, 0.1))


def torture(name: str, case: Case, kills: int, folder: Path, rng: random.Random) -> Outcome:
    """Train once alone and once under fire, and compare."""
    from models.spec import load_spec

    folder.mkdir(parents=True)
    words = write_plan(case, folder)
    store = synthetic_store(folder / "data", load_spec(f"{folder}/model.yaml"), SAMPLES)
    words.append(f"--data={store}")
    alone = folder / "alone"
    done = wait(
        fork_ranks([*words, "--save-every=none", f"--output={alone}"], case.ranks, folder / "alone.log"), 240
    )
    if done != [0] * case.ranks:
        return Outcome(problems=(f"{name}: the unkilled run ended with {done}",))

    outcome = Outcome()
    while outcome.kills < kills and not outcome.problems:  # a run may reach its end before it got all of them
        run = folder / f"run-{outcome.kills}"
        under_fire(name, case, [*words, f"--output={run}"], kills, run, rng, outcome)
        outcome.problems += tuple(f"{name}: {text}" for text in differences(alone, run, case.tolerance))
    return outcome


def under_fire(
    name: str, case: Case, words: list[str], kills: int, run: Path, rng: random.Random, outcome: Outcome
) -> None:
    """Train to the end, killed up to ``kills`` times in all; ``outcome`` is told."""
    from launcher.checkpoint import find
    from launcher.checkpoint.resume import saved_step

    arguments = [*words, f"--save-every={SAVE_EVERY}", "--keep=2", "--resume=auto"]
    samples, log = run.with_suffix(".samples"), run.with_suffix(".log")
    samples.mkdir()
    problems = []
    while True:
        before = find("auto", run)
        expected = saved_step(before.path) if before else 0
        position = log.stat().st_size if log.exists() else 0
        children = fork_ranks(arguments, case.ranks, log, note_samples(samples))
        before_start = last_step(run)

        def alive(first: int = children[0]) -> bool:
            return os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

        if outcome.kills < kills:
            kind = rng.choices(("save", "step", "start"), (0.5, 0.35, 0.15))[0]
            wait_for_moment(kind, run, alive, rng)
        if outcome.kills == kills or not alive():
            codes = wait(children, 240)
            break
        for victim in children if rng.random() < 0.5 else [rng.choice(children)]:
            os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        outcome.kills += 1
        at_start = last_step(run) <= before_start
        if not ended(children, START_SECONDS if at_start else DOWN_SECONDS):
            # Ranks that wait for each other at the start do so for minutes: a launcher ends them.
            if not at_start:
                problems.append(
                    f"{name}, kill {outcome.kills}: a rank outlived the killed one by {DOWN_SECONDS} s"
                )
            outcome.ended_by_force += 1
        outcome.slowest_down_seconds = max(outcome.slowest_down_seconds, time.monotonic() - killed_at)
        outcome.while_saving += saves_now(run)
        outcome.before_first_step += at_start
        said = log.read_text()[position:]
        found = find("auto", run)
        step = saved_step(found.path) if found else 0
        saved = [int(line.rsplit("-", 1)[1]) for line in said.splitlines() if line.startswith("saved ")]
        if found and found.passed_over:
            problems.append(f"{name}, kill {outcome.kills}: passed over {found.passed_over}")
        if step < max([expected, *saved]):
            problems.append(f"{name}, kill {outcome.kills}: {saved} saved, {step} found")
        if expected and kind != "start" and f"resuming after step {expected} from" not in said:
            problems.append(f"{name}, kill {outcome.kills}: did not resume after step {expected}")
        outcome.resumed_from += (step,)
    if codes != [0] * case.ranks:
        problems.append(f"{name}: ended with {codes}: {log.read_text()[-1500:]}")
    if saves_now(run):
        problems.append(f"{name}: a half-written checkpoint is left")
    outcome.problems += tuple(problems)


def differences(alone: Path, run: Path, tolerance: float) -> list[str]:
    """What the killed run did otherwise than the one that nobody killed."""
    found = []
    losses = [
        {line["step"]: line["loss"] for line in map(json.loads, (path / "metrics.jsonl").open())}
        for path in (alone, run)
    ]
    if list(losses[1]) != list(range(1, STEPS + 1)):
        found.append(f"steps of the metrics: {list(losses[1])}")
    odd = [
        step
        for step, loss in losses[0].items()
        if abs(losses[1].get(step, float("inf")) - loss) > tolerance * abs(loss)
    ]
    if odd:
        found.append(f"losses differ at steps {odd}")
    if not (run / "summary.json").exists():
        return [*found, "no summary"]
    summaries = [json.loads((path / "summary.json").read_text()) for path in (alone, run)]
    for key in ("steps", "epoch", "samples"):
        if summaries[0][key] != summaries[1][key]:
            found.append(f"{key} of the summary: {summaries[1][key]}, not {summaries[0][key]}")
    # what was trained last for a step counts: the run forgot what came before
    trained: dict[tuple[int, int], list[int]] = {}
    for path in sorted(run.with_suffix(".samples").glob("*.jsonl")):
        for line in map(json.loads, path.open()):
            trained[line["step"], line["data_rank"]] = line["samples"]
    epochs: dict[int, list[int]] = defaultdict(list)
    for (step, _), samples in trained.items():
        epochs[(step - 1) * BATCH // SAMPLES].extend(samples)
    for epoch, samples in epochs.items():
        if sorted(samples) != list(range(SAMPLES)):
            found.append(f"epoch {epoch}: {len(samples)} samples, {len(set(samples))} different of {SAMPLES}")
    if len(epochs) != STEPS * BATCH // SAMPLES:
        found.append(f"{len(epochs)} epochs")
    return found


def main() -> int:
    """Print a line for each case; exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="over all cases")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_libraries()
    rng = random.Random(options.seed)
    started = time.monotonic()
    outcomes = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for index, name in enumerate(options.cases):
            share = (options.kills + index) // len(options.cases)
            outcome = outcomes[name] = torture(name, CASES[name], share, folder / name, rng)
            print(
                f"{name:10} {outcome.kills} kills, {outcome.while_saving} of them in a save, "
                f"{outcome.before_first_step} before a step ({outcome.ended_by_force} where the others had to "
                f"be ended); resumed after steps {outcome.resumed_from}; all down "
                f"within {outcome.slowest_down_seconds:.1f} s; {'; '.join(outcome.problems) or 'nothing lost'}",
                flush=True,
            )
    kills, saving = (sum(getattr(o, key) for o in outcomes.values()) for key in ("kills", "while_saving"))
    failed = [problem for outcome in outcomes.values() for problem in outcome.problems]
    print(f"{kills} kills, {saving} in a save, {len(failed)} problems, {time.monotonic() - started:.0f} s")
    if options.json:
        options.json.write_text(
            json.dumps({name: vars(outcome) for name, outcome in outcomes.items()}, indent=1)
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
