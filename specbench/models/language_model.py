"""The adapter between the decoder and any causal language model or encoder-decoder of transformers: it reads texts and
scores drafts (section 2.2). B rows, b of them in a forward, N new tokens, D levels, T columns, V vocabulary, H hidden.
"""

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from specbench.decoding.draft import Draft, Scores, Verdict
from specbench.decoding.rows import Rows, all_rows, seen_tokens
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.decoding.token_tree import Levels, Tree, static_tree, tree_of
from specbench.decoding.transfers import constant
from specbench.models.cached_model import CachedModel
from specbench.models.sizes import READ_CHUNK


class LanguageModel(CachedModel):
    """A `CachedModel` that reads texts and, as the target, scores drafts."""

    # -- Reading texts --------------------------------------------------------------------------

    def prefill(self, state: State, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """Reads the committed tokens of all rows from `start` on, without the last ones, in chunks. Rows are padded on
        the right: what a shorter row writes beyond its length is overwritten before any of its tokens can see it."""
        if self.recurrence is not None:  # a state cannot forget padding
            for row, length in enumerate(state.lengths):
                self.recurrence.read(self, state, row, start, length - 1, chunk)
            return
        end = max(state.lengths) - 1
        for begin in range(start, end, chunk):
            tokens = state.tokens[:, begin : min(begin + chunk, end)]
            visible = self.rollback_to([begin] * len(self.cached), tokens.shape[1])
            with self._given_hidden(None, begin) as keep_logits:
                self.forward(tokens, torch.full_like(state.length, begin), visible, keep_logits=keep_logits)
        self.cached = [length - 1 for length in state.lengths]

    def read(self, state: State, row: int, begin: int, end: int) -> None:
        """Reads the committed tokens begin .. end - 1 of one row into the cache; other rows are not touched."""
        with self._given_hidden(row, begin) as keep_logits:
            self.read_row(state.tokens[row : row + 1], row, begin, end, keep_logits=keep_logits)

    @contextmanager
    def noting(
        self, layers: abc.Sequence[int], select: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[list[Tensor]]:
        """`hidden_states` of the module, also where its kernels run, which then multiply all of them."""
        from specbench.models.layers import hidden_states

        with hidden_states(self.module, layers, select) as found:
            if self.fused is None:
                yield found
                return
            with self.fused.noting(layers, found):
                yield found

    @contextmanager
    def _given_hidden(self, row: int | None, begin: int) -> Iterator[int]:
        """Inside this context one forward reads prompt tokens, the first at position `begin`, of a row or of all
        (None), whose hidden states the reader is given. Yields the number of logits that the forward should keep."""
        if self.hidden_reader is None:
            yield 1
            return
        with self.noting(self.feature_layers, lambda hidden: hidden[:, -1:]) as found:
            yield 0
        self.hidden_reader.take_hidden(row, begin, found[0])

    def read_row(self, text: Tensor, row: int, begin: int, end: int, keep_logits: int = 0) -> Tensor:
        """Reads the tokens begin .. end - 1 of a text [1, T] into one row of the cache. Returns logits
        [1, end - begin, V], or only the last `keep_logits` of them."""
        visible = self.rollback_row(row, begin, end)
        first = torch.full((1,), begin, device=self.device)
        logits = self.forward(text[:, begin:end], first, visible, row=row, keep_logits=keep_logits)
        self.cached[row] = end
        return logits

    def catch_up(self, state: State, width: int) -> None:
        """Reads committed tokens of active rows until at most `width` of each are missing in the cache."""
        if self.recurrence is not None:
            self.recurrence.recover(self, state, width)
            return
        rows = zip(state.lengths, self.cached, state.active, strict=True)
        behind = [row for row, (length, cached, on) in enumerate(rows) if on and length - cached > width]
        if len(behind) == state.batch_size:
            self.prefill(state, start=min(self.cached))
        else:
            for row in behind:
                self.read(state, row, self.cached[row], state.lengths[row] - 1)

    def open_text(self, text: Tensor, begin: int, end: int, encoder_input: abc.Sequence[int] | None = None) -> None:
        """Empties the cache and reads an encoder's input, if there is one, and the first begin - 1 tokens of a text
        [1, T] into row 0; it will be read on to position `end`."""
        self.allocate(self.cache.rows, self.cache.capacity)
        sequence = Sequence(text[0, :begin].tolist(), end, 0, encoder_input)
        self.admit(0, sequence, min(end, self.cache.capacity))
        self.encode(0, sequence)
        for first in range(self.cached[0], begin - 1, READ_CHUNK):
            self.read_row(text, 0, first, min(first + READ_CHUNK, begin - 1), keep_logits=1)

    # -- Scoring drafts -------------------------------------------------------------------------

    def score(self, state: State, draft: Draft, keep_hidden: bool = False) -> Scores:
        """See `Target.score`. Guesses that spell the same text are read once, unless shapes are fixed."""
        if self.recurrence is not None:  # its cache cannot forget single tokens
            self.recurrence.recover(self, state, 1)
        lengths, layers = [n - 1 for n in state.lengths], self.feature_layers if keep_hidden else None
        if draft.most is not None or (draft.repeats and not self.executor.fixed_shapes):
            from specbench.decoding.packing import pack

            packed = pack(draft.tokens, draft.levels, draft.parents, draft.exists(), draft.most)
            width = packed.tokens.shape[1] + 1
            visible = self.rollback_to(lengths, width, state.active)
            score = self.executor.compiled(self.scored, self)
            p, hidden, logits = score(state.rows, packed.tokens, visible, (), None, layers, packed.tree)
            at = torch.arange(len(p), device=p.device)[:, None], packed.place
            return Scores(p[at], width, hidden, packed.place, None if logits is None else logits[at])
        width = draft.tokens.shape[1] + 1
        visible = self.rollback_to(lengths, width, state.active)
        score, used, B = self.executor.compiled(self.scored, self), self.rows_of(state), state.batch_size
        b, parent = len(used.length), draft.parent
        parent = parent if parent is None or len(parent) == 1 else parent[:b]
        p, *others = score(used, draft.tokens[:b], visible, draft.levels, parent, layers)
        hidden, logits = (None if values is None else all_rows(values, B) for values in others)
        return Scores(all_rows(p, B), width, hidden, logits=logits)

    def rows_of(self, state: State) -> Rows:
        """The rows that a call reads: those up to the last active one or, with fixed shapes, all."""
        return state.rows if self.executor.fixed_shapes else state.rows.first(state.busy)

    def scored(
        self, rows: Rows, guesses: Tensor, visible: int, levels: Levels, parent: Tensor | None,
        layers: tuple[int, ...] | None, tree: Tree | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """p [B, N + 1, V] after the last committed token and each guess [B, N], `hidden_states` of these layers there,
        [B, N + 1, A * H] (None: none are kept), and at temperature 0 the logits [B, N + 1, V]. The guesses are a
        `tree`, or one by their levels and parent [1 or B, N], or a chain."""
        text, length = rows.tokens, rows.length
        tree = tree if parent is None else tree_of(levels, parent)
        last = text.gather(1, length[:, None] - 1)
        x = torch.cat([last, guesses], 1)
        hidden = None
        if layers is not None:
            with self.noting(layers) as found:
                logits = self.forward(x, length - 1, visible, tree=tree)
            hidden = torch.cat(found, 1)  # of tokens that were read one by one
        else:
            logits = self.forward(x, length - 1, visible, tree=tree)
        penalised = self.sampling.repetition_penalty != 1
        seen = self._seen(text, length, guesses, tree) if penalised else None
        logits = self.sampling.penalize(logits.float(), seen)
        return self.sampling.probabilities(logits), hidden, logits if self.sampling.greedy else None

    def rollback(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, root: Tensor) -> None:
        """Moves keys and values of a tree's accepted path to the columns of a chain."""
        if verdict.path is not None and not draft.is_chain:
            # Nodes that a row has not got are not read: the path of accepted guesses ends before them.
            self.commit_path(verdict.path[:, : scores.width], root, scores.place)

    def commit_path(self, path: Tensor, root: Tensor, place: Tensor | None = None) -> None:
        """Moves the keys and values of the nodes path [B, D] to consecutive columns from root [B] on, the column of
        node 0. place [B, N + 1] says where each node was read, if guesses shared places."""
        read = path if place is None else place.gather(1, path)
        self.executor.compiled(self._commit, self)(read, root)

    def _commit(self, read: Tensor, root: Tensor) -> None:
        """Moves the packed nodes read [B, D] to consecutive columns from root [B] on."""
        self.cache.commit(read, root)

    def _seen(self, text: Tensor, length: Tensor, guesses: Tensor, tree: Tree | None) -> Tensor:
        """[B, N + 1, V] bool: what the penalty applies to behind each guess [B, N]. text [B, T], length [B]."""
        committed = seen_tokens(text, length, self.vocab_size)[:, None, :]
        if not guesses.shape[1]:
            return committed
        if tree is None:
            tree = constant(static_tree)(tuple(range(guesses.shape[1])), text.device)
        hot = F.one_hot(guesses, self.vocab_size).float()  # [B, N, V]
        return committed | (tree.sees[..., 1:].float() @ hot > 0)


class BorrowedCache(LanguageModel):
    """A model on its owner's layers and cache, which reads no prompt: an early exit, or look-ahead embeddings."""

    owner: LanguageModel

    def __init__(self, module: PreTrainedModel, owner: LanguageModel, name: str, sampling: Sampling):
        super().__init__(
            module, owner.tokenizer, name=name, sampling=sampling, new_cache=owner.new_cache, executor=owner.executor,
            attention=owner.attention if owner.fused is not None else "sdpa",
        )  # fmt: skip
        self.fused = None if owner.fused is None else self.fused  # which was checked
        self.owner = owner

    def allocate(self, rows: int, columns: int) -> None:
        self.borrow()

    def catch_up(self, state: State, width: int) -> None:
        """Takes the owner's cache, in which only the last committed token is missing."""
        self.borrow()

    def borrow(self) -> None:
        """Takes the owner's cache in its present state."""
        self.cache, self.cached = self.owner.cache, list(self.owner.cached)
