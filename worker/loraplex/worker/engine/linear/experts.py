"""Mixtures of experts on the CPU: the experts that transformers keeps as one tensor, as linear layers over panels.

    pairs of a token and one of its experts, sorted by expert   │ expert 0 │ expert 2 │ expert 5 │ ...
    up, gate, down of each expert, over its own rows              panels     panels     panels

torch's products of an expert's rows have other bits for other numbers of rows, so that an answer would depend on what
else is in the batch; panels' have not. Routers' products are computed by panels too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from loraplex.contracts.artifacts.base_modules import ROUTERS
from loraplex.contracts.artifacts.experts import ExpertSizes
from loraplex.worker.engine.linear.layouts import panels, panels_work
from loraplex.worker.engine.quantized.layers import linear_of

if TYPE_CHECKING:  # numba is there only where the CPU computes
    from loraplex.worker.engine.lora.cpu import CpuExperts


def expert_tensors(model: nn.Module) -> dict[str, ExpertSizes]:
    """Return the tensors of a model's experts by name."""
    sizes = {}
    for name, module in model.named_modules():
        for tensor in _tensors(module) if _is_experts(module) else ():
            count, first, second = getattr(module, tensor).shape
            features = (first, second) if module.is_transposed else (second, first)
            sizes[f"{name}.{tensor}"] = ExpertSizes(*features, count)
    return sizes


def lay_out_experts(model: nn.Module, compute: torch.dtype) -> None:
    """Replace the experts of a CPU model, and its routers where panels compute their weights."""
    for name, module in list(model.named_modules()):
        if _is_experts(module):
            module.forward = PanelExperts(module, compute)
        elif name.endswith(ROUTERS) and isinstance(weight := getattr(module, "weight", None), Tensor):
            dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if panels_work(weight.dtype, dtype)]
            if dtypes and weight.ndim == 2 and not isinstance(module, nn.Linear):
                module.forward = _routed_by_panels(module, dtypes)


def _is_experts(module: nn.Module) -> bool:
    """Tell whether a module has the experts of a layer, in the form that transformers gives them."""
    tensors = [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    return len(tensors) == 2 and "down_proj" in tensors and hasattr(module, "is_transposed")


def _tensors(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


class PanelExperts:
    """The experts of a layer; called as transformers' module is. `adapters` are those on them, where there are any."""

    adapters: CpuExperts | None = None

    def __init__(self, module: Any, compute: torch.dtype) -> None:
        """Take the weights out of a module, one expert after the other."""
        # A reference to the module, which refers to this, would keep it from being freed by its last one.
        self._module = ref(module)
        self._up, self._down = (_laid_out(module, name, compute) for name in _tensors(module))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's sum over its experts: [tokens, features]; index and weights are [tokens, experts]."""
        module, (tokens, count) = self._module(), top_k_index.shape
        assert module is not None, "the module is calling"
        adapters = self.adapters if self.adapters is not None and self.adapters.adapts else None
        experts, order = adapters.sort(top_k_index) if adapters else top_k_index.reshape(-1).sort(stable=True)
        counts = torch.bincount(experts, minlength=len(self._up)).tolist()
        x = hidden_states.index_select(0, order // count)
        inner = _multiply(self._up, counts, x)
        if adapters:
            adapters.add(0, x, inner)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outputs = _multiply(self._down, counts, inner)
        if adapters:
            adapters.add(1, inner, outputs)
        if getattr(module, "has_post_expert_norm", False):
            outputs = module.post_expert_norm(outputs)
        products = outputs * top_k_weights.reshape(-1)[order, None]
        weighted = torch.empty_like(products)
        weighted[order] = products
        return weighted.view(tokens, count, -1).sum(1, dtype=torch.float32).to(hidden_states.dtype)


def _laid_out(module: Any, name: str, compute: torch.dtype) -> list[nn.Module]:
    """Return each expert's layer, of panels where these compute the weight, and free the module's own tensor."""
    weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    layers = []
    for index in range(len(weights)):
        weight = weights[index].t() if module.is_transposed else weights[index]
        layer = linear_of(weight.contiguous(), None if biases is None else biases[index])
        layers.append(panels(layer, compute) if panels_work(weight.dtype, compute) else layer)
    delattr(module, name)
    return layers


def _multiply(layers: list[nn.Module], counts: list[int], x: Tensor) -> Tensor:
    return torch.cat([layer(rows) for layer, rows in zip(layers, torch.split(x, counts), strict=True) if len(rows)])


class _RouterProducts(TorchFunctionMode):
    """Computes linear products with a router's weight, in whatever dtype it casts that to, by panels."""

    def __init__(self, shape: torch.Size, layers: Mapping[torch.dtype, nn.Module]) -> None:
        super().__init__()
        self._shape = shape
        self._layers = layers

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func is linear and args[1].shape == self._shape and args[0].dtype in self._layers:
            return self._layers[args[0].dtype](args[0])
        return func(*args, **(kwargs or {}))


def _routed_by_panels(router: Any, dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """Return the forward of a router whose products of inputs in these dtypes are of panels."""
    layer = linear_of(router.weight.contiguous(), getattr(router, "bias", None))
    method = WeakMethod(router.forward)
    layers = {dtype: panels(layer, dtype) for dtype in dtypes}

    def routed(*arguments: Any, **named: Any) -> Any:
        forward = method()
        assert forward is not None, "the router is calling"
        with _RouterProducts(layer.weight.shape, layers):
            return forward(*arguments, **named)

    return routed
