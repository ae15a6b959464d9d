"""The partition files of ``models/partitions/``, made from the specs by ``vlfit partition --write``.

Those are balanced by FLOPs, so that writing them again gives the same bytes on any machine.
"""

from collections.abc import Sequence
from pathlib import Path

from models.balance import balance, layer_costs
from models.build import build_layers, layer_names
from models.partition import PartitionSpec, StageSpec
from models.spec import ModelSpec, load_spec

FOLDER = Path(__file__).parent.parent / "models" / "partitions"
MODELS = ("demo", "bert_vit_base", "bert_vit_large")
CHUNKS = 8


def balanced(spec: ModelSpec, stages: int, costs: Sequence[float]) -> PartitionSpec:
    """Give the partition into ``stages`` whose costliest stage is cheapest. Raises UserError: too many stages."""
    names = layer_names(spec)
    sizes = balance(costs, stages)
    specs, first = [], 0
    for index, size in enumerate(sizes):
        layers = tuple(names[first : first + size])
        specs.append(StageSpec(name=f"stage-{index}", layers=layers, device=index))
        first += size
    return PartitionSpec(model=spec.name, chunks=CHUNKS, stages=tuple(specs))


def standard_partitions(spec: ModelSpec) -> dict[str, PartitionSpec]:
    """Give the partitions that are checked in for a model, by name."""
    whole = StageSpec(name="all", layers=("*",), device=0)
    rest = ("fusion.*", "head")

    def split(*stages: tuple[str, tuple[str, ...]]) -> PartitionSpec:
        specs = [
            StageSpec(name=name, layers=layers, device=index) for index, (name, layers) in enumerate(stages)
        ]
        return PartitionSpec(model=spec.name, chunks=CHUNKS, stages=tuple(specs))

    flops = layer_costs(spec, build_layers(spec, device="meta"), "flops")
    return {
        "image-alone": split(("image", ("image.*",)), ("text-fusion", ("text.*", *rest))),
        "image-text-fusion": split(("image", ("image.*",)), ("text", ("text.*",)), ("fusion", rest)),
        "balanced-2": balanced(spec, 2, flops),
        "balanced-4": balanced(spec, 4, flops),
        "recompute-fusion": PartitionSpec(model=spec.name, stages=(whole,), recompute=("fusion.layer.*",)),
        "recompute-all": PartitionSpec(
            model=spec.name, stages=(whole,), recompute=("image.block.*", "text.layer.*", "fusion.layer.*")
        ),
    }


def write_all(folder: Path = FOLDER) -> list[Path]:
    """Write every standard partition; gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for model in MODELS:
        for name, partition in standard_partitions(load_spec(model)).items():
            path = folder / f"{model}.{name}.yaml"
            partition.save(path, made_by="vlfit partition --write")
            written.append(path)
    return written
