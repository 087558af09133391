"""The ranks that compute one model together: their sums, and who of them is here.

A sum adds the ranks' numbers one after the other, rank 0's first. An all-reduce would send less from four ranks on, but
it cuts the numbers into pieces and begins each with another rank: where a token stands in a step would change its bits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loraplex.contracts.artifacts.families import HEAD
from loraplex.worker.engine.parallel.splits import RankPlan, Split

# Its name in torch 2.13, and before.
_gather_all: Callable[[Tensor, Tensor], Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Timeout of a sum: a rank that loads its weights makes the others wait; one that dies closes its connections.
_TIMEOUT = timedelta(minutes=30)


class RankGroup:
    """The ranks of a worker, from the view of one of them; all call the same methods in the same order."""

    def __init__(self, rank: int, ranks: int, store: str, device: torch.device) -> None:
        """Meet the other ranks by a file `store`, which rank 0 has made a place for."""
        self.rank, self.ranks, self._device = rank, ranks, device
        on_cuda = device.type == "cuda"
        # Without it they take an interface that other machines reach, and listen there.
        os.environ.setdefault(
            f"{'NCCL' if on_cuda else 'GLOO'}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"
        )
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.FileStore(store, ranks),  # type: ignore[attr-defined]  # torch's own list of names lacks it
            rank=rank,
            world_size=ranks,
            timeout=_TIMEOUT,
            device_id=device if on_cuda else None,
        )

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x; the same bits on each, whatever else is in x."""
        parts = self._all(x)
        # Numbers of 16 bits are added in 32.
        total = parts[0].float() if x.dtype != torch.float32 else parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def side_by_side(self, x: Tensor, count: int) -> Tensor:
        """Return all ranks' x [..., columns] as [..., count]: the first `count` columns."""
        return torch.cat(list(self._all(x)), -1)[..., :count]

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        return int(self._all(torch.tensor([number], device=self._device)).min())

    def send_to_all(self, x: Tensor) -> None:
        """Overwrite all ranks' x with rank 0's."""
        dist.broadcast(x, 0)

    def _all(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.ranks, *x.shape)
        _gather_all(parts.view(-1), x.contiguous().view(-1))
        return parts


def leave_group() -> None:
    """Leave the group that this process is in."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class SplitModel:
    """A model of which this rank has a part, which `plan` says; `linears` are the splits of its layers by rank.

    The tensors of experts are there too, as adapters have them.
    """

    group: RankGroup
    plan: RankPlan
    linears: tuple[Mapping[str, Split], ...]
    # (in_features, out_features) of the whole layers by name; of experts their number too.
    whole: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, group: RankGroup, config: Any, whole: Mapping[str, tuple[int, ...]], columns: int = 0) -> SplitModel:
        """Split a model by its transformers config; `columns` of quantized weights share a scale.

        Raises ModelUnusableError.
        """
        linears, plans = [], [RankPlan(config, rank, group.ranks, columns) for rank in range(group.ranks)]
        for plan in plans:
            splits = {
                name: (plan.split if len(sizes) == 2 else plan.split_experts)(name, sizes[1], sizes[0])
                for name, sizes in whole.items()
            }
            linears.append({name: split for name, split in splits.items() if split is not None})
        return cls(group, plans[group.rank], tuple(linears), whole)

    @property
    def own(self) -> Mapping[str, Split]:
        """Return the splits of this rank's linear layers by name."""
        splits = self.linears[self.group.rank]
        return {name: split for name, split in splits.items() if len(self.whole[name]) == 2}

    def prepare(self, model: Any) -> list[RemovableHandle]:
        """Make a loaded model this rank's: its head where that is the embeddings', its biases; and join."""
        head = model.get_output_embeddings()
        if isinstance(head, nn.Linear) and len(head.weight) == self.whole[HEAD][1]:
            for name, parameter in list(head.named_parameters()):
                part = self.plan.part(f"{HEAD}.{name}", parameter.shape)
                if part is not None:
                    setattr(head, name, nn.Parameter(part.of(parameter), requires_grad=False))
            head.out_features = len(head.weight)
        for name, split in self.own.items():
            # Else each rank would add it.
            if split.sums and self.group.rank:
                model.get_submodule(name).bias = None
        return self.join(model)

    def join(self, model: nn.Module) -> list[RemovableHandle]:
        """Let a model's layers join the ranks' outputs; returns what undoes it."""
        group, handles = self.group, list[RemovableHandle]()
        for name, split in self.own.items():
            module = model.get_submodule(name)
            if split.cuts:
                assert split.inputs is not None, "it has some of the inputs"
                handles.append(module.register_forward_pre_hook(_cut(*split.inputs)))
            if split.sums:
                handles += _add(module, group)
            if split.gathers:
                handles.append(module.register_forward_hook(_gather(group, split.gathers)))
        for name in self.plan.sums(model):
            handles += _add(model.get_submodule(name), group)
        return handles


def _add(module: Any, group: RankGroup) -> list[RemovableHandle]:
    if hasattr(module, "sum_by"):  # kernels compute its product without calling the layer
        module.sum_by(group.sum)
        return []
    handle: RemovableHandle = module.register_forward_hook(lambda module, inputs, output: group.sum(output))
    return [handle]


def _gather(group: RankGroup, count: int) -> Callable[..., Tensor]:
    return lambda module, inputs, output: group.side_by_side(output, count)


def _cut(first: int, stop: int) -> Callable[..., Any]:
    return lambda module, inputs: (inputs[0][..., first:stop].contiguous(),)


def rank_device(name: str, rank: int) -> str:
    """Return the name of a rank's device: on CUDA the devices from rank 0's on."""
    kind, _, number = name.partition(":")
    return name if kind != "cuda" or not rank else f"cuda:{int(number or 0) + rank}"
