"""Partition files: which layers form which stage on which device, and which layers are recomputed.

    model: bert_vit_base
    chunks: 8
    stages:
      - {name: image, layers: ["image.*"], device: 0}
      - {name: text-fusion, layers: ["text.*", "fusion.*", "head"], device: 1}
    recompute: ["fusion.*"]

A partition is a contiguous split of the flat list of layers. One stage means no pipeline; then the file only
selects recomputation. Usable without the rest of vlfit:

    spec = load_spec("demo")
    layers = build_layers(spec)
    partition = load_partition("models/partitions/demo.image-alone.yaml")
    partition.validate_against([layer.name for layer in layers], spec.name)
    pipe = partition.to_pipe(layers, devices=["cuda:0", "cuda:1"])        # FairScale
    module = partition.to_pipeline_module(layers, loss_fn=loss)           # DeepSpeed
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, model_validator

from models.errors import UserError
from models.names import select
from models.schema import ClosedModel, load_yaml


class StageSpec(ClosedModel):
    """One stage: a name, the patterns of its layers, and the index of its device within a pipeline."""

    name: str
    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    device: Annotated[int, Field(ge=0)] = 0


class PartitionSpec(ClosedModel):
    """A partition file. Patterns mean something only beside the names of a model's layers."""

    model: str
    """Name of the spec that the partition was made for."""
    chunks: Annotated[int, Field(gt=0)] = 1
    """Micro-batches that a mini-batch is split into, to keep the stages busy."""
    stages: Annotated[tuple[StageSpec, ...], Field(min_length=1)]
    recompute: tuple[str, ...] = ()
    """Patterns of the layers that are recomputed."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(
                f"two stages are called '{next(name for name in names if names.count(name) > 1)}'"
            )
        devices = [stage.device for stage in self.stages]
        if len(set(devices)) < len(devices):
            raise ValueError(f"two stages are on device {next(d for d in devices if devices.count(d) > 1)}")
        for stage in self.stages:
            if stage.device >= len(devices):
                raise ValueError(
                    f"stage '{stage.name}' is on device {stage.device}; {len(devices)} stage(s) have devices 0 to "
                    f"{len(devices) - 1}"
                )
        return self

    @property
    def devices(self) -> list[int]:
        """Device index of each stage."""
        return [stage.device for stage in self.stages]

    def stage_layers(self, names: Sequence[str]) -> list[list[str]]:
        """Give the layer names of each stage, in order.

        Raises UserError, naming stage and layer: a pattern that matches nothing, a layer in two stages or in
        none, stages that are not contiguous or not in order.
        """
        if len(self.stages) > len(names):
            raise UserError(
                f"partition: {len(self.stages)} stages for the {len(names)} layers of {self.model}"
            )
        owner: dict[str, str] = {}
        found = []
        for stage in self.stages:
            try:
                chosen = select(names, stage.layers)
            except UserError as error:
                raise UserError(f"partition: stage '{stage.name}': {error}") from None
            for layer in chosen:
                if layer in owner:
                    raise UserError(
                        f"partition: layer '{layer}' is in stage '{owner[layer]}' and in '{stage.name}'"
                    )
                owner[layer] = stage.name
            found.append(chosen)
        for layer in names:
            if layer not in owner:
                raise UserError(f"partition: layer '{layer}' is in no stage")
        order = [layer for stage in found for layer in stage]
        for expected, layer in zip(names, order, strict=True):
            if layer != expected:
                raise UserError(
                    f"partition: stage '{owner[layer]}' has '{layer}' where '{expected}' must come first; "
                    "stages are contiguous and in the order of the layers"
                )
        return found

    def validate_against(self, names: Sequence[str], model: str) -> None:
        """Check the partition against a model's layers. Raises UserError."""
        if self.model != model:
            raise UserError(f"partition: made for model '{self.model}', but the model is '{model}'")
        self.stage_layers(names)
        try:
            select(names, self.recompute)
        except UserError as error:
            raise UserError(f"partition: recompute: {error}") from None

    @property
    def balance(self) -> list[int]:
        """Number of layers of each stage (FairScale's ``balance``), for the spec of this name."""
        return self.balance_of(self._names_of_model())

    @property
    def bounds(self) -> list[int]:
        """First layer of each stage, and the end: ``[0, 14, 28]`` for two stages of 14 layers."""
        return self.bounds_of(self._names_of_model())

    def balance_of(self, names: Sequence[str]) -> list[int]:
        """``balance`` for a model with these layers."""
        return [len(stage) for stage in self.stage_layers(names)]

    def bounds_of(self, names: Sequence[str]) -> list[int]:
        """``bounds`` for a model with these layers."""
        return [0, *accumulate(self.balance_of(names))]

    def _names_of_model(self) -> list[str]:
        from models.build import layer_names
        from models.spec import load_spec

        return layer_names(load_spec(self.model))

    def to_pipe(self, layers: Sequence[Any], devices: Sequence[Any] | None = None) -> Any:
        """Give a FairScale ``Pipe`` of the layers; ``devices`` by stage (default: ``cuda:<device>``).

        FairScale's own checkpointing stays off (it hangs under data parallelism): the layers recompute
        themselves. Raises UserError: too few devices, or parameters that two stages share.
        """
        from fairscale.nn import Pipe
        from torch import nn

        from models.layer import set_recompute

        names = [layer.name for layer in layers]
        devices = list(devices) if devices is not None else [f"cuda:{index}" for index in self.devices]
        if len(devices) < len(self.stages):
            raise UserError(
                f"partition: {len(self.stages)} stages need as many devices; there are {len(devices)}"
            )
        self.refuse_shared_parameters(layers)
        if self.recompute:
            set_recompute(layers, self.recompute)
        return Pipe(
            nn.Sequential(*layers),
            balance=self.balance_of(names),
            devices=devices[: len(self.stages)],
            chunks=self.chunks,
            checkpoint="never",
        )

    def to_pipeline_module(
        self, layers: Sequence[Any], loss_fn: Callable | None = None, **options: Any
    ) -> Any:
        """Give a DeepSpeed ``PipelineModule`` with the same bounds. torch.distributed must be initialised.

        Raises UserError: parameters that two stages share.
        """
        from deepspeed.pipe import PipelineModule

        from models.layer import set_recompute

        names = [layer.name for layer in layers]
        bounds = self.bounds_of(names)
        self.refuse_shared_parameters(layers)
        if self.recompute:
            set_recompute(layers, self.recompute)

        class BoundedPipelineModule(PipelineModule):
            """PipelineModule that is cut where the partition says (DeepSpeed knows only its own methods)."""

            def _partition_layers(self, method: str = "given") -> None:
                stage = self._topo.get_coord(self.global_rank).pipe
                self.parts = list(bounds)
                self._set_bounds(start=bounds[stage], stop=bounds[stage + 1])

        module = BoundedPipelineModule(list(layers), num_stages=len(self.stages), loss_fn=loss_fn, **options)
        for parameter in module.parameters():
            # Else DeepSpeed 0.19.8 leaves all stages but the first out of the norm that it clips fp32 gradients
            # by (runtime/utils.py, clip_grad_norm_).
            parameter.model_parallel = True
        return module

    def refuse_shared_parameters(self, layers: Sequence[Any]) -> None:
        """Refuse a parameter that two stages hold: it passes on the CPU and fails on GPUs."""
        owner: dict[int, str] = {}
        stages = self.stage_layers([layer.name for layer in layers])
        stage_of = {
            name: stage.name for stage, names in zip(self.stages, stages, strict=True) for name in names
        }
        for layer in layers:
            for key, parameter in layer.named_parameters():
                other = owner.setdefault(id(parameter), layer.name)
                if stage_of[other] != stage_of[layer.name]:
                    raise UserError(
                        f"partition: stages '{stage_of[other]}' and '{stage_of[layer.name]}' share "
                        f"the parameter {key} of layers '{other}' and '{layer.name}'; keep both in one stage"
                    )

    def dump_yaml(self) -> str:
        """Give the file's text."""
        return yaml.safe_dump(
            self.model_dump(mode="json", exclude_defaults=True),
            sort_keys=False,
            default_flow_style=None,
            width=110,
        )

    def save(self, path: str | Path, made_by: str = "") -> None:
        """Write the file, with a first line that says by which command."""
        head = f"# Generated by `{made_by}`.\n" if made_by else ""
        Path(path).write_text(head + self.dump_yaml())


def load_partition(path: str | Path) -> PartitionSpec:
    """Read a partition file. Raises UserError with file and key."""
    return load_yaml(path, PartitionSpec)
