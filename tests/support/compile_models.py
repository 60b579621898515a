"""The models of the torch.compile tests, each tiny, each sharded as its name says; built alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from bucketplan_client.scopes import ModuleScope, build_module_bucket_plans
from tests.support.simple_fsdp import shard

__all__ = ["Block", "Built", "build", "tokens"]

VOCABULARY = 32
DIM = 16
LENGTH = 8


@dataclass(frozen=True)
class Built:
    """A sharded model that returns its loss, this rank's batch, and the roles of this rank's groups."""

    model: nn.Module
    batch: tuple[Any, ...]
    roles: dict[str, str] = field(default_factory=dict)

    def scopes(self, specs: tuple[str, ...]) -> tuple[ModuleScope, ...]:
        return build_module_bucket_plans(self.model, specs) if specs else ()


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, head, and the loss of predicting the next token."""

    def __init__(
        self, block: Callable[[], nn.Module], *, num_layers: int, dim: int = DIM, vocabulary: int = VOCABULARY
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(block() for _ in range(num_layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Experts(nn.Module):
    """Experts spread over the ranks of `mesh`: tokens go to the rank of their expert and come back, in equal parts."""

    def __init__(self, dim: int, hidden: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.w1 = nn.Parameter(torch.randn(1, dim, hidden) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(1, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        arrived = funcol.all_to_all_single_autograd(x, None, None, self.group)
        done = torch.bmm(torch.relu(torch.bmm(arrived.unsqueeze(0), self.w1)), self.w2).squeeze(0)
        return funcol.all_to_all_single_autograd(done, None, None, self.group)


class ExpertBlock(nn.Module):
    def __init__(self, dim: int, hidden: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, 1)
        self.experts = Experts(dim, hidden, mesh)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        # Every other token goes to the other rank's expert: a fixed routing keeps the splits equal.
        order = torch.cat([torch.arange(0, flat.shape[0], 2), torch.arange(1, flat.shape[0], 2)])
        back = torch.argsort(order)
        mixed = self.experts(flat[order])[back] * torch.sigmoid(self.router(flat))
        return x + mixed.unflatten(0, x.shape[:2])


def build(case: str) -> Built:
    """The model called `case`, with the same weights on every rank and a batch of this rank's own."""
    torch.manual_seed(0)
    return _CASES[case]()


def tokens(vocabulary: int = VOCABULARY, length: int = LENGTH, seed: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if seed is None else seed))
    return torch.randint(0, vocabulary, (2, length), generator=generator)


def _mesh(*dims: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))


def _roles(mesh: DeviceMesh) -> dict[str, str]:
    names = mesh.mesh_dim_names or ()
    return {mesh.get_group(name).group_name: name for name in names}


def _dense() -> Built:
    mesh = _mesh(("fsdp", dist.get_world_size()))
    model = shard(LanguageModel(lambda: Block(DIM, 2 * DIM), num_layers=2), mesh)
    return Built(model, (tokens(),), _roles(mesh))


def _smallest() -> Built:
    mesh = _mesh(("fsdp", dist.get_world_size()))
    return Built(shard(LanguageModel(lambda: Block(4, 4), num_layers=0, dim=4), mesh), (tokens(),), _roles(mesh))


def _mixed_precision() -> Built:
    mesh = _mesh(("fsdp", dist.get_world_size()))
    model = LanguageModel(lambda: Block(DIM, 2 * DIM), num_layers=1)
    shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return Built(model, (tokens(),), _roles(mesh))


def _tensor_parallel() -> Built:
    mesh = _mesh(("fsdp", 2), ("tp", 2))
    model = LanguageModel(lambda: Block(DIM, 2 * DIM), num_layers=1)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["fsdp"])
    # Ranks of one tensor-parallel group see one batch.
    return Built(model, (tokens(seed=dist.get_rank() // 2),), _roles(mesh))


def _hybrid() -> Built:
    mesh = _mesh(("replicas", 2), ("fsdp", 2))
    model = shard(LanguageModel(lambda: Block(DIM, 2 * DIM), num_layers=1), mesh)
    return Built(model, (tokens(),), _roles(mesh))


def _experts() -> Built:
    dense = _mesh(("fsdp", 4))
    mesh = _mesh(("fsdp_expert", 2), ("ep", 2))
    model = LanguageModel(lambda: ExpertBlock(DIM, 2 * DIM, mesh["ep"]), num_layers=1)
    for block in model.blocks:
        # An expert of its own on each rank of the expert group, the same on its replicas.
        for parameter in block.experts.parameters():
            parameter.data += 0.1 * mesh.get_local_rank("ep")
        shard(block.experts, mesh["fsdp_expert"], dim=1)
    shard(model, dense)
    return Built(model, (tokens(),), _roles(dense) | _roles(mesh))


def _uneven() -> Built:
    """No dimension is divisible by the ranks, and the last of four ranks holds nothing of some parameters."""
    mesh = _mesh(("fsdp", dist.get_world_size()))
    model = LanguageModel(lambda: Block(6, 9), num_layers=1, dim=6, vocabulary=33)
    return Built(shard(model, mesh), (tokens(33),), _roles(mesh))


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
        use_cache=False,
    )
    mesh = _mesh(("fsdp", dist.get_world_size()))
    return Built(shard(_CausalLoss(LlamaForCausalLM(config)), mesh), (tokens(),), _roles(mesh))


class _CausalLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


_CASES: dict[str, Callable[[], Built]] = {
    "dense": _dense,
    "experts": _experts,
    "hybrid": _hybrid,
    "llama": _llama,
    "mixed_precision": _mixed_precision,
    "smallest": _smallest,
    "tensor_parallel": _tensor_parallel,
    "uneven": _uneven,
}
