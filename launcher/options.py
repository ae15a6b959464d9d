"""The options of ``launcher/train.py``, defined once.

``vlfit launch`` and ``vlfit submit`` take every one of them as well and hand them on through
``train_arguments``. Only the standard library is imported, so that ``--help`` stays instant.
"""

import argparse
import base64
import binascii
import json
from collections.abc import Sequence

from models.errors import UserError

ENCODED = "--arguments-base64="
"""Carries arguments that a remote shell would take apart; expands in place. See ``encode_arguments``."""


def add_train_options(parser: argparse.ArgumentParser, config_required: bool = True) -> None:
    """Add every option of train.py; dest names are the field names that train.py reads."""
    plan = parser.add_argument_group("plan")
    plan.add_argument("--config", required=config_required, metavar="JSON", help="DeepSpeed configuration")
    plan.add_argument("--model", metavar="SPEC", help="model spec: a file or a name of models/specs/")
    plan.add_argument("--partition", metavar="YAML", help="partition file: stages and recomputation")
    plan.add_argument(
        "--pipeline", choices=("fairscale", "deepspeed"), help="engine of a partition with stages"
    )
    plan.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")

    run = parser.add_argument_group("run")
    run.add_argument("--data", metavar="STORE", help="data store (vlfit data pack)")
    run.add_argument("--output", metavar="DIR", help="run directory")
    run.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps in all")
    run.add_argument("--epochs", type=_positive, metavar="N", help="passes over the data, instead of --steps")
    run.add_argument("--seed", type=int, metavar="S", help="seed of weights, order and dropout")
    run.add_argument("--no-eval", action="store_true", help="leave the held-out evaluation out")
    run.add_argument("--eval-every", type=_positive, metavar="N", help="evaluate retrieval every N steps")

    saving = parser.add_argument_group("saving and resuming")
    saving.add_argument(
        "--resume", metavar="auto|none|DIR", help="checkpoint to go on from (auto: the newest)"
    )
    saving.add_argument(
        "--save-every",
        type=_interval,
        metavar="N|Mm|none",
        help="save every N steps or M minutes (10m); always at the end and on a signal, but for none",
    )
    saving.add_argument("--keep", type=_positive, metavar="N", help="checkpoints to keep")
    saving.add_argument("--save-required", action="store_true", help="end the run when a save fails")
    saving.add_argument(
        "--max-skipped",
        type=_positive,
        metavar="K",
        help="end the run after K steps in a row whose loss or gradients are not finite (default 10)",
    )
    saving.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume although KEY of the plan changed (repeatable)",
    )

    fitting = parser.add_argument_group("fitting")
    fitting.add_argument(
        "--batch-memory",
        metavar="SIZE",
        help="bytes that a micro-batch may take, such as 2GiB, or auto: rows by length",
    )
    fitting.add_argument("--cache", choices=("node", "none"), help="node: one copy of the data per node")
    fitting.add_argument("--workers", type=_not_negative, metavar="N", help="data loading processes per rank")

    parser.add_argument("--debug", action="store_true", help="show the traceback of an expected error")
    # deepspeed writes --local_rank, old torch.distributed.launch --local-rank; the environment has it as well
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    # tells the processes of one `vlfit launch` from those of another, on hosts reached through ssh
    parser.add_argument("--launch-id", help=argparse.SUPPRESS)


_NOT_HANDED_ON = {"local_rank", "launch_id"}


def train_arguments(arguments: argparse.Namespace) -> list[str]:
    """Turn parsed options back into an argument vector that gives the same namespace.

    Options of the namespace that train.py does not have are left out. Values are joined by ``=``, so
    that one that starts with a dash stays a value.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_train_options(parser)
    vector: list[str] = []
    for action in parser._actions:
        value = getattr(arguments, action.dest, action.default)
        if action.dest in _NOT_HANDED_ON or value == action.default:
            continue
        name = action.option_strings[0]
        if value is True:
            vector.append(name)
        else:
            vector += [f"{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return vector


def encode_arguments(vector: Sequence[str]) -> str:
    """Pack arguments into one word without any character that a shell or pdsh interprets."""
    return ENCODED + base64.urlsafe_b64encode(json.dumps(list(vector)).encode()).decode()


def decode_arguments(vector: Sequence[str]) -> list[str]:
    """Undo ``encode_arguments`` wherever it occurs; train.py calls this before it parses."""
    decoded: list[str] = []
    for word in vector:
        if word.startswith(ENCODED):
            try:
                decoded += json.loads(base64.urlsafe_b64decode(word.removeprefix(ENCODED)))
            except (binascii.Error, ValueError) as error:
                raise UserError(f"{ENCODED[:-1]} was damaged on its way to this node: {error}") from None
        else:
            decoded.append(word)
    return decoded


def _interval(text: str) -> str:
    number = text.removesuffix("m")
    if text != "none" and not (number.isdecimal() and int(number) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no interval; give steps (100), minutes (10m) or none")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative")
    return number
