"""The objectives: image-text contrastive (ITC), image-text matching (ITM), masked language modelling (MLM).

Losses are computed outside the layers, from the head's output state and the targets, in fp32. Each is a
mean over rows of a row's own loss, so their sum over micro-batches and ranks does not depend on how the
rows are split. Only ITC looks at other rows: those of the mini-batch, gathered over all ranks.

ITC: Radford et al., 2021 (CLIP), figure 3. ITM and MLM: Li et al., 2021 (ALBEF), section 3.2.
"""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from models.spec import ModelSpec
from models.state import State

IGNORED = -100
"""Label of a place that holds no masked token (torch's default ``ignore_index``)."""


class Targets(NamedTuple):
    """What the losses compare with; every tensor has the batch as dimension 0."""

    labels: Tensor
    """int64 [B,M]: the token that was masked at each position, or -100."""
    identities: Tensor
    """int64 [B,2]: image id and caption id. Rows that share one are never each other's negatives."""


@dataclass(frozen=True)
class LossTerms:
    """The weighted sum with its gradient, each term's detached value, and what had to be left out."""

    total: Tensor
    terms: dict[str, Tensor]
    skipped: dict[str, Tensor]
    """Rows for which an objective had no negative: ``itc`` in a batch of one, ``itm`` in a group of one."""


class Objectives:
    """Callable ``(head's output state, targets) → LossTerms``.

    ``group`` is the process group over which ITC gathers its negatives; None: this process only.
    Ranks may hold different numbers of rows when ``equal_rows`` is False (one more small gather).
    """

    def __init__(
        self, spec: ModelSpec, group: "dist.ProcessGroup | None" = None, equal_rows: bool = True
    ) -> None:
        self.objectives = spec.objectives
        self.group = group
        self.equal_rows = equal_rows

    def over(self, group: "dist.ProcessGroup | None") -> "Objectives":
        """The same objectives, with ITC's negatives from the ranks of ``group``."""
        others = copy.copy(self)
        others.group = group
        return others

    @property
    def names(self) -> list[str]:
        """The spec's objectives, in the order of the terms."""
        return [name for name in ("itc", "itm", "mlm") if getattr(self.objectives, name)]

    @property
    def skippable(self) -> list[str]:
        """Those that skip rows without a negative."""
        return [name for name in self.names if name != "mlm"]

    def __call__(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> LossTerms:
        state, targets = State(*outputs), Targets(*targets)
        rows: dict[str, Tensor] = {}
        skipped: dict[str, Tensor] = {}
        if self.objectives.itc:
            rows["itc"], skipped["itc"] = self.contrastive_rows(state.pairing, targets.identities)
        if self.objectives.itm:
            rows["itm"], skipped["itm"] = matching_rows(state.image, state.keys)
        if self.objectives.mlm:
            rows["mlm"] = masked_rows(state.text, targets.labels)
        means = {name: row_B.mean() for name, row_B in rows.items()}
        weights = {name: getattr(self.objectives, name).weight for name in means}
        total = torch.stack([weights[name] * mean for name, mean in means.items()]).sum()
        return LossTerms(
            total=total, terms={name: mean.detach() for name, mean in means.items()}, skipped=skipped
        )

    def contrastive_rows(self, features_B2E: Tensor, identities_B2: Tensor) -> tuple[Tensor, Tensor]:
        """Symmetric cross-entropy of each row against all rows of all ranks; fp32 [B] and rows skipped.

        Every row with the same image or caption counts as a positive, with equal probability.
        """
        features_B2E = features_B2E.float()
        everyone_R2E, everyone_R2 = self._gather(features_B2E), self._gather(identities_B2)
        skipped = features_B2E.new_tensor(
            len(features_B2E) if len(everyone_R2E) < 2 else 0, dtype=torch.int64
        )
        if len(everyone_R2E) < 2:
            # Times zero, not a constant: every parameter keeps a gradient, which reductions wait for.
            return features_B2E.sum(dim=(1, 2)) * 0, skipped
        same_BR = (identities_B2[:, None, :] == everyone_R2[None, :, :]).any(dim=2)
        target_BR = same_BR.float() / same_BR.sum(dim=1, keepdim=True)
        to_text_BR = features_B2E[:, 0] @ everyone_R2E[:, 1].T
        to_image_BR = features_B2E[:, 1] @ everyone_R2E[:, 0].T
        loss_B = functional.cross_entropy(to_text_BR, target_BR, reduction="none")
        loss_B = loss_B + functional.cross_entropy(to_image_BR, target_BR, reduction="none")
        return loss_B / 2, skipped

    def _gather(self, tensor: Tensor) -> Tensor:
        if self.group is None or dist.get_world_size(self.group) == 1:
            return tensor
        sizes = None if self.equal_rows else _gather_sizes(len(tensor), tensor.device, self.group)
        return _GatherRows.apply(tensor, sizes, self.group)


def matching_rows(logits_BK2: Tensor, usable_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of "belongs together" over a row's usable pairs; fp32 [B] and rows without a negative.

    Pair 0 is the image's own caption (class 1), the others are wrong ones (class 0).
    """
    labels_BK = torch.zeros_like(usable_BK, dtype=torch.int64)
    labels_BK[:, 0] = 1
    loss_BK = functional.cross_entropy(
        logits_BK2.float().flatten(0, 1), labels_BK.flatten(), reduction="none"
    )
    has_negative_B = usable_BK[:, 1:].any(dim=1)
    weight_BK = usable_BK * has_negative_B[:, None]
    loss_B = (loss_BK.view_as(usable_BK) * weight_BK).sum(dim=1) / weight_BK.sum(dim=1).clamp(min=1)
    return loss_B, (~has_negative_B).sum()


def masked_rows(logits_BMV: Tensor, labels_BM: Tensor) -> Tensor:
    """Cross-entropy at a row's masked tokens, averaged within the row; fp32 [B]. 0 for a row without any."""
    loss_BM = functional.cross_entropy(
        logits_BMV.flatten(0, 1).float(), labels_BM.flatten(), reduction="none", ignore_index=IGNORED
    ).view_as(labels_BM)
    return loss_BM.sum(dim=1) / (labels_BM != IGNORED).sum(dim=1).clamp(min=1)


def _gather_sizes(rows: int, device: torch.device, group: "dist.ProcessGroup") -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([rows], device=device), group=group)
    return [int(size) for size in sizes]


class _GatherRows(torch.autograd.Function):
    """Concatenate the rows of all ranks; the gradient is the sum over ranks of what they ask of ours.

    With losses that are means over local rows and gradients averaged over ranks, the result equals one
    process on the whole batch.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int] | None, group: "dist.ProcessGroup") -> Tensor:
        sizes = sizes or [len(tensor)] * dist.get_world_size(group)
        ctx.group, ctx.first = group, sum(sizes[: dist.get_rank(group)])
        ctx.rows = len(tensor)
        # Collectives want equal shapes: pad to the largest, cut again afterwards.
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.first : ctx.first + ctx.rows], None, None
