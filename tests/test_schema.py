"""Closed YAML schemas: one line says which file and key to mend."""

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from models.errors import UserError
from models.schema import ClosedModel, load_yaml, nearest


class Stage(ClosedModel):
    name: str
    layers: tuple[str, ...] = ()
    device: Annotated[int, Field(ge=0)] = 0


class Plan(ClosedModel):
    model: str
    rate: float = 1.0
    pretrained: str | bool | None = None
    stages: tuple[Stage, ...] = ()
    named: dict[str, Stage] = Field(default_factory=dict)


@pytest.fixture
def load(tmp_path):
    def read(text):
        path = tmp_path / "plan.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_yaml(path, Plan)

    return read


def test_lists_become_tuples_and_numbers_keep_their_meaning(load):
    plan = load("model: m\nrate: 1e-3\nstages:\n  - {name: a, layers: ['x.*']}\n")
    assert plan == Plan(model="m", rate=0.001, stages=(Stage(name="a", layers=("x.*",)),))
    with pytest.raises(ValidationError):
        plan.model = "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: m", 'unknown key "modle"; the nearest known key is "model" (and 1 more)'),
        ("model: m\nstages: [{name: a, devise: 0}]", 'unknown key "stages[0].devise"; '),
        ("model: m\nstages: [{name: a, devise: 0}]", 'the nearest known key is "device"'),
        ("model: m\nnamed: {x: {nmae: a}}", 'the nearest known key is "name"'),
        ("rate: 1.0", 'key "model" is missing'),
        ("model: m\nstages: [{}]", 'key "stages[0].name" is missing'),
        ("model: 3", "model is 3; it must be a string"),
        ("model: m\nrate: '1'", 'rate is "1"; it must be a number'),
        ("model: m\nrate: true", "rate is true; it must be a number"),
        ("model: m\nrate: .inf", "it must be a finite number"),
        ("model: m\npretrained: 3", "pretrained is 3; it must be a string or true or false"),
        ("model: m\nstages: [{name: a, device: 1.0}]", "stages[0].device is 1.0; it must be a whole number"),
        ("model: m\nstages: [{name: a, device: -1}]", "stages[0].device is -1; it should be greater than"),
        ("model: 2024-01-01", "was read as a date; write it in quotes"),
        ("model: m\nmodel: n", '(line 2, column 1): key "model" is given twice'),
        ("model: [", "not valid YAML (line 1"),
        ("model: &a [*a]", "Circular"),
        ("", "is empty; a mapping with these keys is needed: model, rate"),
        ("- 1", "holds [1]; a mapping"),
        (b"model: \xff", "not UTF-8 text"),
    ],
)
def test_mistake_is_one_line_with_file_and_key(load, text, message):
    with pytest.raises(UserError) as error:
        load(text)
    assert message in str(error.value) and "plan.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    for path, message in ((tmp_path / "no.yaml", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=message):
            load_yaml(path, Plan)


def test_nearest_looks_past_the_case():
    assert nearest("WEIGHT", ["width", "weight"]) == 'the nearest known key is "weight"'
    assert nearest("x", []) == "no key is known here"
