"""Drafters whose model reads the target's hidden states, with a cache of its own: multi-token prediction (DeepSeek-V3,
2412.19437, section 2.2) and EAGLE-3 (2503.01840).

Such a model reads pairs: pair i is the hidden state of token i and the embedding of token i + 1, joined to the input
of its layers, and predicts token i + 2 through an output matrix. Behind the text it reads its own hidden states in
place of the target's. b rows (B in all), N pairs of a forward, T columns, H hidden, V vocabulary.
"""

from collections import abc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.rows import Rows
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.token_tree import Tree
from specbench.decoding.transfers import upload
from specbench.drafters.model import Inputs, Memory
from specbench.drafters.tree import TreeDrafter
from specbench.drafters.tree_shapes import Shape
from specbench.models.language_model import LanguageModel
from specbench.models.layers import hidden_states
from specbench.models.sizes import READ_CHUNK


class PairInput(nn.Module):
    """From a pair to the input of the decoder layer: the embedding comes first, as in checkpoints' `eh_proj`."""

    def __init__(self, embedding_norm: nn.Module, hidden_norm: nn.Module, projection: nn.Module):
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.projection = embedding_norm, hidden_norm, projection

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[b, N, H] of embeddings [b, N, H] and hidden states [b, N, H]."""
        joined: Tensor = self.projection(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1))
        return joined


class PairModel(LanguageModel):
    """`module` is a causal model with a `pair_input`. The first cached[b] pairs of row b are in the cache. Those behind
    them, whose hidden states the target's last call gave, are pending: the next draft begins with them."""

    layers: tuple[int, ...] = ()  # of the target, in front of which it reads hidden states; () for its last ones
    own_states: tuple[int, ...] = ()  # which `hidden_states` of the module stand for the target's behind the text

    def __init__(self, module: PreTrainedModel, target: LanguageModel, name: str, sampling: Sampling, gamma: int):
        """`gamma` is the largest of any round. The target passes on what it reads of prompts from now on."""
        super().__init__(
            module, target.tokenizer, name=name, sampling=sampling, new_cache=target.new_cache,
            executor=target.executor, vocab_size=target.vocab_size,
            attention="sdpa",
        )  # fmt: skip
        self.pair_input: Any = self.module.pair_input
        parts = zip(_ends(self.module), _ends(module), _ends(target.stock), strict=True)
        shared = [weight for part, before, theirs in parts if before is theirs for weight in part.parameters()]
        self.weight_bytes -= sum({id(weight): weight.nbytes for weight in shared}.values())
        self.width = gamma + 1  # pending pairs of a row, at most
        embedding: Any = target.module.get_input_embeddings()
        self.target_size = int(embedding.weight.shape[1])  # H of one of the target's layers
        self.unread: dict[int | None, list[Tensor]] = {}  # hidden states [b, n, H] of a row's prompt, or of all rows'
        self.pending, self.behind = torch.empty(0), torch.empty(0)
        target.hidden_reader = self

    def _sharable(self, prompt: abc.Sequence[int]) -> abc.Sequence[int]:
        return prompt[:1]  # as the target's

    def allocate(self, rows: int, columns: int) -> None:
        super().allocate(rows, columns)
        shape = (rows, self.width, self.target_size * max(1, len(self.layers)))
        self.pending = torch.zeros(shape, dtype=self.dtype, device=self.device)  # hidden states, in order
        self.behind = torch.zeros(rows, dtype=torch.long, device=self.device)  # pending pairs of each row, less one

    def project(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [b, N, H] as those of pairs."""
        return hidden

    def admit(self, row: int, sequence: Sequence, columns: int) -> None:
        super().admit(row, sequence, columns)
        self.behind[row] = 0  # what a draft reads of a row that waits stands behind its prompt

    def take_hidden(self, row: int | None, begin: int, hidden: Tensor) -> None:
        """Keeps the hidden states [b, n, H] of prompt tokens from position `begin` on until the pairs are read."""
        self.unread.setdefault(row, []).append(hidden)

    def clear_hidden(self) -> None:
        self.unread = {}

    def prefill(self, state: State, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """Reads the pairs of all rows' prompts but the last of each, of which it needs the prediction."""
        known = [max(0, length - 2) for length in state.lengths]
        self.cached = known
        self.behind.zero_()
        if None not in self.unread:  # every prompt is one token
            return
        hidden = torch.cat(self.unread.pop(None), 1)  # [B, T - 1, H]
        for begin in range(0, hidden.shape[1] - 1, chunk):
            self._read_pairs(state.tokens, None, begin, hidden[:, begin : min(begin + chunk, hidden.shape[1] - 1)])
        last = (state.length - 2).clamp(min=0)
        self.pending[:, 0] = hidden[torch.arange(len(hidden), device=last.device), last]
        self.cached = known

    def read(self, state: State, row: int, begin: int, end: int) -> None:
        """Reads the pairs begin .. end - 1 of one row's prompt, but for its last one."""
        hidden = torch.cat(self.unread.pop(row), 1)  # [1, end - begin, H]
        whole = end >= state.lengths[row] - 1
        count = max(0, end - begin - whole)
        if count:
            self._read_pairs(state.tokens[row : row + 1], row, begin, hidden[:, :count])
        self.cached[row] = begin + count
        if whole:
            self.pending[row, 0] = hidden[0, -1]

    def _read_pairs(self, text: Tensor, row: int | None, begin: int, hidden: Tensor) -> None:
        """Reads the pairs of hidden states [b, n, H] of the tokens of text [b, T] from position `begin` on."""
        width, end = hidden.shape[1], begin + hidden.shape[1]
        starts = [begin] * len(self.cached)
        visible = self.rollback_to(starts, width) if row is None else self.rollback_row(row, begin, end)
        first = torch.full((len(hidden),), begin, device=self.device)
        x = self.join(text[:, begin + 1 : end + 1], self.project(hidden))
        self.forward(x, first, visible, row=row, keep_logits=1)

    def make_room_for(self, state: State, steps: int) -> int:
        """Rolls back to the first pending pairs, makes room for them and `steps` guesses; returns the columns seen."""
        rows = list(zip(self.cached, state.lengths, state.active, strict=True))
        ends = [max((c if on else n - 2) + self.width, n - 2 + steps) for c, n, on in rows]
        self.cache.truncate(self.cached)
        self.cache.reserve([end if on else 0 for end, on in zip(ends, state.active, strict=True)])
        self.cached = [n - 1 if on else c for c, n, on in rows]
        return self.visible_columns(max(ends), len(ends) * self.width)

    def first_pairs(self, rows: Rows, behind: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The tokens [b, width] of the pending pairs, of which each row has behind[b] + 1, and the position [b] of the
        first token. The others are read too, and nobody sees them."""
        first = rows.length - 1 - behind
        places = first[:, None] + torch.arange(width, device=first.device)
        return rows.tokens.gather(1, places.clamp(0, rows.tokens.shape[1] - 1)), first

    def predict(
        self, tokens: Tensor, hidden: Tensor, first: Tensor, last: Tensor | None, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reads the pairs of tokens [b, N] and hidden states [b, N, H], the first of them at position first [b].
        Returns logits [b, 1, V] and hidden states [b, 1, H] behind pair last [b] of each row or, where it is None,
        [b, N, V] and [b, N, H] behind all, whose hidden states are then the module's own, not the target's."""

        def chosen(values: Tensor) -> Tensor:
            return values if last is None else values[torch.arange(len(values), device=last.device), last, None]

        hidden = hidden if last is None else self.project(hidden)
        with hidden_states(self.module, self.own_states, chosen) as found:
            logits = self.forward(self.join(tokens, hidden), first, visible, tree=tree)
        return logits if logits.shape[1] == 1 else chosen(logits), chosen(found[0])

    def join(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The input [b, N, H] of the layer for pairs of hidden states [b, N, H] and tokens [b, N]."""
        embed: Any = self.module.get_input_embeddings()
        joined: Tensor = self.pair_input(embed(self.vocabulary.read(tokens)), hidden)
        return joined

    def take(self, hidden: Tensor, accepted: Tensor, active: Tensor) -> None:
        """Makes the pairs pending whose hidden states [B, n, H] the target's call gave: in the rows active [B] bool,
        that of the last committed token before it, and those of accepted [B] guesses."""
        if hidden.shape[1] > self.width:
            self.pending = F.pad(self.pending, (0, 0, 0, hidden.shape[1] - self.width))
            self.width = hidden.shape[1]
        new = F.pad(hidden, (0, 0, 0, self.width - hidden.shape[1])).to(self.pending.dtype)
        self.pending = torch.where(active[:, None, None], new, self.pending)
        self.behind = torch.where(active, accepted, self.behind)


class PairDrafter(TreeDrafter):
    """Drafts with a `PairModel`. The first guess of a round follows from the target's hidden states, the others from
    the model's own: it is applied again for each guess, in a tree to the states of the guess's parent. What it stored
    for guesses is overwritten by pairs with the target's states.

    The memory of a step is hidden states and where they end. In the first step they are those of the pending pairs
    [b, n, H], and behind[b] is the number of a row's last pair; later they are the model's own [b, m, H], and None."""

    needs_hidden = True
    needs_prompt_hidden = True
    reads_text = False  # q depends on where the round began
    with_encoders = False
    with_states = False  # a recurrent target reads its prompt in pieces whose hidden states are not passed on
    trees = False
    ends_early = True

    def __init__(self, model: PairModel, vocab_size: int, gamma: int, shape: Shape | None = None):
        super().__init__(model, vocab_size, gamma, shape)
        self.pairs = model

    def ready(self, state: State, gamma: list[int]) -> list[int]:
        if None in self.pairs.unread:
            self.pairs.prefill(state)
        return [g if n > 1 else 0 for g, n in zip(gamma, state.lengths, strict=True)]

    def skip_round(self, state: State) -> None:
        """Reads the pending pairs all the same, so that they do not pile up."""
        self.pairs.executor.compiled(self.read, self.pairs)(*self.prepare(state, 0))

    def prepare(self, state: State, steps: int) -> Inputs:
        own, rows = self.pairs, self.pairs.rows_of(state)
        missing = zip(own.cached, state.lengths, state.active, strict=True)
        most = max((length - 1 - cached for cached, length, on in missing if on), default=1)
        n = own.width if own.executor.fixed_shapes else max(1, most)  # pairs that are read, of each row
        visible, B = own.make_room_for(state, steps), len(rows.length)
        pending, behind = own.pending[:B, :n], own.behind[:B].clamp(max=n - 1)
        tokens, first = own.first_pairs(rows, behind, n)
        return Inputs(tokens, first, (pending, behind), visible)

    def read(
        self, x: Tensor, first: Tensor, memory: Memory, visible: int, tree: Tree | None = None
    ) -> tuple[Tensor, Memory]:
        hidden, behind = memory
        assert hidden is not None
        logits, after = self.pairs.predict(x, hidden, first - 1, behind, visible, tree)  # where the hidden state stands
        return logits, (after, None)

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        hidden = scores.hidden_along(verdict)
        self.pairs.take(hidden, verdict.accepted, upload(state.active, hidden.device))


def _ends(module: Any) -> tuple[nn.Module, nn.Module]:
    """The embedding and the output matrix of a module."""
    return module.get_input_embeddings(), module.get_output_embeddings()
