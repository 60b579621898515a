"""A decoder-only transformer in plain torch.nn, with one mixture-of-experts block.

Every shape is static: experts take a fixed number of tokens each (Switch Transformers, arXiv:2101.03961, section 2.2),
so the whole step traces into one graph without data-dependent sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MixtureOfExperts", "Transformer", "TransformerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Sizes of the model. `moe_layer` is the block whose MLP is a mixture of experts, None for a dense model."""

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 6
    num_heads: int = 4
    hidden_dim: int = 352
    max_tokens: int = 64
    tied_head: bool = True
    moe_layer: int | None = 3
    num_experts: int = 4
    experts_per_token: int = 2
    capacity_factor: float = 1.5
    balance_weight: float = 0.01


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv:2104.09864); (batch, tokens, dim) to the same."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        query, key, value = (
            project(x).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, cosine, sine), _rotate(key, cosine, sine), value, is_causal=True
        )
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return out


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """The gated MLP w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """The gated MLPs of all experts as three stacked weights; (experts, capacity, dim) to the same."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w3 = nn.Parameter(torch.empty(experts, dim, hidden))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(functional.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MixtureOfExperts(nn.Module):
    """Routes every token to its best experts, each taking at most its capacity; what overflows keeps its residual only.

    Returns the mixed output and the balance loss, whose least value is 1 (arXiv:2101.03961, equation 4).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.capacity_factor = config.capacity_factor
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        num_tokens = flat.shape[0]
        capacity = math.ceil(self.capacity_factor * self.experts_per_token * num_tokens / self.num_experts)
        shares = functional.softmax(self.router(flat), dim=-1)
        gates, chosen = shares.topk(self.experts_per_token, dim=-1)
        assigned = (chosen.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)).to(x.dtype)
        # First choices claim places before second choices do.
        by_choice = assigned.transpose(0, 1).reshape(-1, self.num_experts)
        place = ((by_choice.cumsum(0) - 1) * by_choice).sum(-1).view(self.experts_per_token, num_tokens).t()
        at_place = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)).to(x.dtype)
        dispatch = torch.einsum("nke,nkc->nec", assigned, at_place)
        combine = torch.einsum("nk,nke,nkc->nec", gates, assigned, at_place)
        taken = torch.einsum("nec,nd->ecd", dispatch, flat)
        mixed = torch.einsum("nec,ecd->nd", combine, self.experts(taken))
        first_choice = assigned[:, 0].mean(0)
        balance = self.num_experts * (first_choice * shares.mean(0)).sum()
        return mixed.view_as(x), balance


class Block(nn.Module):
    """Attention and MLP (or mixture of experts), each behind an RMSNorm and around a residual."""

    def __init__(self, config: TransformerConfig, *, is_moe: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp: FeedForward | MixtureOfExperts = MixtureOfExperts(config) if is_moe else FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        normed = self.mlp_norm(x)
        if isinstance(self.mlp, MixtureOfExperts):
            mixed, balance = self.mlp(normed)
            return x + mixed, balance
        return x + self.mlp(normed), None


class Transformer(nn.Module):
    """The model with its loss: int64 tokens and targets of (batch, tokens) to a float32 scalar.

    With `tied_head` the embedding and the head are one parameter, `embedding.weight`.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config, is_moe=index == config.moe_layer) for index in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        frequency = 10_000.0 ** (-torch.arange(0, config.dim // config.num_heads, 2) / (config.dim // config.num_heads))
        angle = torch.arange(config.max_tokens)[:, None] * frequency
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        num_tokens = tokens.shape[1]
        cosine, sine = self.cosine[:num_tokens], self.sine[:num_tokens]
        x = self.embedding(tokens)
        balance: Tensor | None = None
        for block in self.blocks:
            x, balance_of_block = block(x, cosine, sine)
            balance = balance_of_block if balance is None else balance
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss if balance is None else loss + self.config.balance_weight * balance
