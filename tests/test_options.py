"""train.py's options survive being handed on."""

import argparse
import subprocess
import sys

import pytest

from launcher.options import add_train_options, decode_arguments, encode_arguments, train_arguments

AWKWARD = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "$(touch /x)",
    "`id`",
    "new\nline",
    "-dash",
    "%h",
    "ü\udcff",
    "",
    "\\",
]


def parse(vector):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_train_options(parser)
    return parser.parse_args(vector)


def test_arguments_give_the_same_namespace_again():
    vector = [
        "--config=c.json",
        "--steps=3",
        "--debug",
        "--allow-change=seed",
        "--allow-change=lr",
        "--workers=0",
    ]
    assert parse(train_arguments(parse(vector))) == parse(vector)


@pytest.mark.parametrize("value", AWKWARD)
def test_awkward_values_stay_one_value(value):
    options = parse(["--config=c.json", f"--output={value}"])
    assert parse(train_arguments(options)).output == value


def test_launch_options_beside_them_are_not_handed_on():
    options = parse(["--config=c.json"])
    options.nodes = 2
    assert train_arguments(options) == ["--config=c.json"]


def test_local_rank_of_the_deepspeed_launcher_is_accepted_and_not_handed_on():
    options = parse(["--local_rank=1", "--config=c.json"])
    assert options.local_rank == 1
    assert train_arguments(options) == ["--config=c.json"]


def test_encoded_arguments_survive_a_shell():
    word = encode_arguments(AWKWARD)
    echoed = subprocess.run(
        ["sh", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True
    ).stdout
    assert decode_arguments(["--a", echoed, "--b"]) == ["--a", *AWKWARD, "--b"]


def test_importing_the_options_is_light():
    code = "import sys, launcher.options, launcher.distributed; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
