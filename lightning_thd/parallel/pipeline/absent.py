"""Stand-ins without weights for the embedding, last norm and head that other stages hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_thd.parallel.pipeline.where import user_line

if TYPE_CHECKING:
    from lightning_thd.parallel.pipeline.stage import Stage


class NoEmbedding(nn.Module):
    """Replaces the embedding on stages without it; returns NaN of the right shape."""

    def __init__(self, embedding: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.embedding_dim: int = getattr(embedding, "embedding_dim", 0)
        self._stage = stage

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor on the device of this stage's layers: Llama 4 moves ids there."""
        held = next(p for layer in self._stage.held.values() for p in layer.parameters())
        return torch.empty(0, self.embedding_dim, device=held.device, dtype=held.dtype)

    def forward(self, ids: Tensor | torch.Size, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN ``[..., T, H]`` in the dtype of hidden states, for ids or for their shape."""
        shape, device = (ids.shape, ids.device) if isinstance(ids, Tensor) else (ids, self.weight.device)
        dtype = self._stage.channel.dtype(device)
        return torch.full((*shape, self.embedding_dim), torch.nan, dtype=dtype, device=device)


class PassThrough(nn.Module):
    """Replaces modules behind the layers, such as the last norm, on stages without them."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden


class NoHead(nn.Module):
    """Replaces the head on stages without it; losses of ``lightning_thd.loss`` recognise it.

    Args:
        vocabulary: entries of the whole head.
        stage: receives logits from the last stage where no gradients are wanted.
        dtype: of the head's weight, which some models ask for.
    """

    def __init__(self, vocabulary: int, stage: Stage, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.out_features, self._stage, self._dtype = vocabulary, stage, dtype

    @property
    def weight(self) -> Tensor:
        """Return an empty tensor of the head's dtype: Mamba casts hidden states to it before the head."""
        return torch.empty(self.out_features, 0, dtype=self._dtype, device=self._stage.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the last stage's logits in prediction and evaluation; refuse to train on logits.

        Raises:
            ValueError: where gradients are wanted.
        """
        if not torch.is_grad_enabled():
            return self._stage.broadcast(hidden.new_empty(*hidden.shape[:-1], self.out_features))
        raise ValueError(
            "Only the last pipeline stage has logits. Compute the loss with causal_lm_loss(model, batch) or "
            f"causal_lm_logprobs(model, batch), which give every stage what it needs.\n  {user_line()}"
        )
