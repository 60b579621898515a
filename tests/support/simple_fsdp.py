"""Models sharded the SimpleFSDP way: every parameter a DTensor shard that a property gathers when it is read.

    sharded = shard(model, mesh)          # weights: Shard(0) over the mesh's last dimension, replicated over the others
    torch.compile(sharded)(tokens)        # one all-gather a parameter and one reduce-scatter a gradient in the graphs

Under torch.compile the gathers and reductions are functional collectives inside the graph, which is what FSDP2 does
not give.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

__all__ = ["full_gradients", "shard"]

_classes: dict[tuple[type, tuple[str, ...]], type] = {}


class _Gather:
    """What the property of one parameter does: gather the shard, hand out plain tensors or tensor-parallel ones."""

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        inner: tuple[DeviceMesh, tuple[Placement, ...]] | None,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.inner = inner
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype

    def __call__(self, stored: DTensor) -> Tensor:
        whole = stored.redistribute(
            placements=[Replicate()] * self.mesh.ndim,
            forward_dtype=self.param_dtype,
            backward_dtype=self.reduce_dtype,
        )
        local = whole.to_local(grad_placements=[Partial("avg")] * self.mesh.ndim)
        if self.inner is None:
            return local
        inner_mesh, inner_placements = self.inner
        return DTensor.from_local(local, inner_mesh, inner_placements, run_check=False)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dim: int = 0,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    skip: Iterable[nn.Module] = (),
) -> nn.Module:
    """Shard every parameter of `model` in place over `mesh`, but those of modules in `skip` and those sharded before.

    A two-dimensional mesh replicates over its first dimension and shards over its second. A parameter that is a
    DTensor already (tensor parallelism) is sharded within its local part and comes back as a DTensor of that mesh.
    Gradients are averaged over the mesh.
    """
    placements: tuple[Placement, ...] = (*[Replicate()] * (mesh.ndim - 1), Shard(dim))
    left_out = {inner for module in skip for inner in module.modules()}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or module in left_out or hasattr(module, "_bucketplan_gathers"):
            continue
        gathers: dict[str, _Gather] = {}
        for name, parameter in own.items():
            data, inner = parameter.data, None
            if isinstance(data, DTensor):
                inner = (data.device_mesh, tuple(data.placements))
                data = data.to_local()
            stored = distribute_tensor(data, mesh, placements)
            module.register_parameter(name, nn.Parameter(stored))
            gathers[name] = _Gather(mesh, placements, inner, param_dtype, reduce_dtype)
        module.__dict__["_bucketplan_gathers"] = gathers
        module.__class__ = _with_properties(module.__class__, tuple(own))
    return model


def _with_properties(cls: type, names: tuple[str, ...]) -> type:
    """A subclass of `cls` that gathers `names` when they are read; one class a kind of module, as Dynamo likes it."""
    key = (cls, names)
    if key not in _classes:

        def reader(name: str) -> property:
            return property(lambda self: self._bucketplan_gathers[name](self._parameters[name]))

        _classes[key] = type(f"Sharded{cls.__name__}", (cls,), {name: reader(name) for name in names})
    return _classes[key]


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, gathered whole, by parameter name (within the tensor-parallel part where there is one)."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: gradient.detach().clone() for name, gradient in found.items()}
