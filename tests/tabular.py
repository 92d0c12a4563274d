"""A language model whose distribution is known exactly: an order-2 Markov chain given by a table.

It is an ordinary module with a Hugging Face cache: its "keys" are the tokens themselves, and the
two that condition the next token are found through the attention mask. So a wrong rollback,
column, position or mask changes its distribution, and the tests can see it.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


class TabularMarkov(nn.Module):
    """Next-token logits from the last two visible tokens: table [V, V, V], indexed [before, last]."""

    _is_stateful = False

    def __init__(self, table: Tensor, context: int = 64):
        super().__init__()
        self.output = PairTable(table)
        self.config = TabularConfig(table.shape[-1], context)
        self.dtype = table.dtype

    def get_input_embeddings(self) -> nn.Module:
        return TokenNumbers()

    def get_decoder(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(
        self, attention_mask: Tensor | None = None, past_key_values=None, input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, logits_to_keep: int = 0, **unused,
    ) -> SimpleNamespace:  # fmt: skip
        """input_ids [B, N] or inputs_embeds [B, N, 1], attention_mask [B, 1, N, columns] -> .logits
        [B, N or kept, V]. Without a mask, as transformers calls it: the text as it stands."""
        if attention_mask is None:
            before = nn.functional.pad(input_ids, (1, 0))[:, :-1]
            pairs = (before * self.config.vocab_size + input_ids)[..., None].to(self.output.weight.dtype)
            return SimpleNamespace(logits=self.output(pairs[:, -logits_to_keep:]))
        numbers = input_ids[..., None] if inputs_embeds is None else inputs_embeds
        new = numbers[:, None].to(self.output.weight.dtype)
        keys, _ = past_key_values.update(new, new, 0)
        tokens = keys[:, 0, :, 0].long()  # [B, columns]
        numbers = torch.arange(1, tokens.shape[1] + 1, dtype=torch.int32, device=tokens.device)
        visible = attention_mask[:, 0] * numbers  # [B, N, columns]: the column's number from 1 on, or 0 if it is hidden
        last = visible.amax(-1)  # [B, N]
        before = (visible * (visible < last[..., None])).amax(-1)
        first, second = (tokens.gather(1, (c - 1).clamp(min=0).long()) for c in (before, last))
        hidden = (first * self.config.vocab_size + second)[..., None].to(new.dtype)
        return SimpleNamespace(logits=self.output(hidden[:, -logits_to_keep:]))


@dataclass
class TabularConfig:
    """The part of a Hugging Face configuration that the adapter reads."""

    vocab_size: int
    max_position_embeddings: int
    _attn_implementation: str = "sdpa"
    is_encoder_decoder: bool = False
    model_type: str = "tabular"

    def get_text_config(self) -> "TabularConfig":
        return self


class PairTable(nn.Module):
    """The output matrix: logits [..., V] of a hidden state [..., 1], which is the number of a pair."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.weight = nn.Parameter(table.flatten(0, 1).clone(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight[hidden[..., 0].long()]


class TokenNumbers(nn.Module):
    """The input embedding [..., 1] of a token is its number."""

    weight = torch.ones(1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[..., None].float()


def random_table(vocab_size: int, seed: int, spread: float = 1.5) -> Tensor:
    """Logits of a random order-2 chain, [V, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * spread


def by_class(table: Tensor, classes: int = 3) -> Tensor:
    """The table in which only the classes of both tokens, their remainders, say what follows: [V, V, V]."""
    of = torch.arange(len(table)) % classes
    return table[of][:, of]


class RecurrentMarkov(TabularMarkov):
    """The same chain with a state in transformers' layer for one: it cannot be cut, and no mask hides a token."""

    def __init__(self, table: Tensor, context: int = 64):
        super().__init__(table, context)
        self.config = PreTrainedConfig(
            vocab_size=table.shape[-1],
            num_hidden_layers=1,
            max_position_embeddings=context,
            layer_types=["linear_attention"],
        )

    def forward(
        self, input_ids: Tensor, past_key_values=None, use_cache: bool = True, logits_to_keep: int = 0
    ) -> SimpleNamespace:
        """input_ids [B, N] -> .logits [B, N or kept, V]."""
        new = input_ids[:, None].to(self.output.weight.dtype)
        read = new  # [B, 1, N or more]
        if past_key_values is not None:
            read = past_key_values.update_conv_state(new, 0, conv_kernel_size=2)
        before = nn.functional.pad(read, (1, 0))[:, 0, -input_ids.shape[1] - 1 : -1]
        pairs = (before.long() * self.config.vocab_size + input_ids)[..., None].to(new.dtype)
        return SimpleNamespace(logits=self.output(pairs[:, -logits_to_keep:]))
