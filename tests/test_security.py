"""What our own code must not do: run what a file says, build shell commands, let others write."""

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import models.schema

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "launcher").rglob("*.py"), *(ROOT / "models").rglob("*.py")])
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression that is one, else an empty text."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> object:
    """Value of a keyword of a call; None where it is not there, the source's text where it is no constant."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ast.unparse(given.value)
    return None


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            yield from (f"{node.lineno}: imports {n}" for n in names if n.split(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name == "torch.load" and keyword(node, "weights_only") is not True:
            yield f"{node.lineno}: torch.load without weights_only=True"
        if name in ("yaml.load", "yaml.load_all") and keyword(node, "Loader") not in (
            "_Loader",
            "yaml.SafeLoader",
        ):
            yield f"{node.lineno}: {name} with another loader"
        if name.startswith("yaml.unsafe") or name.startswith("yaml.full"):
            yield f"{node.lineno}: {name}"
        if keyword(node, "allow_pickle") not in (None, False):
            yield f"{node.lineno}: allow_pickle"
        if keyword(node, "shell") not in (None, False) or name in SHELLS:
            yield f"{node.lineno}: a shell"
        if name in ("eval", "exec"):
            yield f"{node.lineno}: {name}"


def test_code_neither_unpickles_nor_starts_a_shell() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{offence}"
        for path in SOURCES
        for offence in offences(ast.parse(path.read_text()))
    ]
    assert len(SOURCES) > 100 and found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from dill import load", "torch.load(p)", "torch.load(p, weights_only=False)",
        "yaml.load(t, Loader=yaml.Loader)", "yaml.load(t)", "yaml.unsafe_load(t)", "np.load(p, allow_pickle=True)",
        "subprocess.run(c, shell=True)", "subprocess.run(c, shell=x)", "os.system(c)", "eval(t)",
    ],
)  # fmt: skip
def test_audit_sees_what_it_is_for(source: str) -> None:
    assert len(list(offences(ast.parse(source)))) == 1


def test_yaml_with_an_object_in_it_is_refused(tmp_path: Path) -> None:
    assert issubclass(models.schema._Loader, yaml.SafeLoader)
    path = tmp_path / "model.yaml"
    path.write_text(f"name: !!python/object/apply:os.system ['touch {tmp_path}/hacked']\n")
    from models.errors import UserError
    from models.spec import load_spec

    with pytest.raises(UserError, match="could not determine a constructor"):
        load_spec(path)
    assert not (tmp_path / "hacked").exists()


def test_checkpoint_with_a_pickle_in_place_of_the_weights_runs_nothing(tmp_path: Path) -> None:
    import pickle

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    class Hack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Hack()))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "model.safetensors")
    assert not (tmp_path / "hacked").exists()


def test_nobody_else_can_write_into_what_commands_make_under_umask_0(
    tmp_path: Path, tiny_spec_file: Path, tiny_data: Path
) -> None:
    config = tmp_path / "c.json"
    config.write_text('{"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}')
    config.chmod(0o644)
    train = f"--config {config} --model {tiny_spec_file} --data {tiny_data} --output {tmp_path}/run"
    train += " --steps 2 --workers 1 --device cpu --save-every 1 --cache node --debug"
    program = [sys.executable, str(ROOT / "launcher" / "train.py"), *train.split()]
    source = next(tiny_data.glob("train-source"))
    vlfit = [sys.executable, "-m", "launcher"]
    commands = [
        program,
        [*vlfit, "export", f"{tmp_path}/run", f"{tmp_path}/exported"],
        [*vlfit, "data", "pack", str(source), f"{tmp_path}/store", "--image-size=32", "--max-length=12"],
        [*vlfit, "submit", "--write", f"{tmp_path}/slurm"],
        [*vlfit, "config", "--out", f"{tmp_path}/configs"],
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": f"{tmp_path}/cache"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, umask=0, env=environ, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    made = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    for name in (
        "run/checkpoints/latest",
        "run/summary.json",
        "exported",
        "store",
        "slurm/1x1.sbatch",
        "cache",
    ):
        assert (tmp_path / name).exists(), name
    open_to_others = [path for path in made if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    assert open_to_others == []
