"""A language model whose law is known exactly: an order-2 Markov chain given by a table.

It is an ordinary module with a Hugging Face cache: its "keys" are the tokens themselves, and the
two that condition the next token are found through the attention mask. So a wrong rollback,
column, position or mask changes its law, and the tests can see it.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


class TabularMarkov(nn.Module):
    """Next-token logits from the last two visible tokens: table [V, V, V], indexed [before, last]."""

    def __init__(self, table: Tensor, context: int = 64):
        super().__init__()
        self.table = nn.Parameter(table.clone(), requires_grad=False)
        self.config = SimpleNamespace(vocab_size=table.shape[-1], max_position_embeddings=context)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values, logits_to_keep: int = 0, **unused
    ) -> SimpleNamespace:
        """input_ids [B, N], attention_mask [B, 1, N, columns] -> .logits [B, N or kept, V]."""
        new = input_ids[:, None, :, None].to(self.table.dtype)
        keys, _ = past_key_values.update(new, new, 0)
        tokens = keys[:, 0, :, 0].long()  # [B, columns]
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        visible = attention_mask[:, 0]  # [B, N, columns]
        last = torch.where(visible, columns, -1).amax(-1)  # [B, N]
        before = torch.where(visible & (columns < last[..., None]), columns, -1).amax(-1)
        context = [tokens.gather(1, c.clamp(min=0)) for c in (before, last)]
        logits = self.table[context[0], context[1]]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def random_table(vocab_size: int, seed: int, spread: float = 1.5) -> Tensor:
    """Logits of a random order-2 chain, [V, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * spread
