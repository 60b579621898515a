"""Batches of bytes from the text that ships with the demo."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CORPUS", "read_corpus", "sample_batch"]

CORPUS = Path(__file__).resolve().parents[1] / "corpus.txt"


def read_corpus(path: Path = CORPUS) -> Tensor:
    """The bytes of a text as int64 tokens below 256."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()


def sample_batch(corpus: Tensor, *, step: int, rank: int, batch: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of (batch, num_tokens): random crops that depend on step and rank only."""
    generator = torch.Generator().manual_seed(step * 100_003 + rank)
    starts = torch.randint(len(corpus) - num_tokens, (batch, 1), generator=generator)
    window = corpus[starts + torch.arange(num_tokens + 1)]
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
