"""The adapter between the decoder and any Hugging Face causal language model or encoder-decoder.

It adds what `generate` does not offer: ragged rows (each with its own length), exact rollback, and token trees, through
explicit positions, cache columns and a 4-D attention mask. The modelling code of transformers runs unmodified. B rows
(b of them in a forward), N new tokens, D levels, T columns, V vocabulary, H hidden.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from specbench.cache.slots import SlotCache
from specbench.config.memory import context_of
from specbench.contrib.recurrent.recurrence import Recurrence, read_rows, recover, refuse_unknown_kinds
from specbench.contrib.whisper.audio_encoder import Hearing
from specbench.data.sound import EncoderInput, Speech
from specbench.decoding.draft import Draft, Verdict
from specbench.decoding.executor import Executor
from specbench.decoding.model import READ_CHUNK, Scores, Target
from specbench.decoding.rows import Rows, all_rows, seen_tokens
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import Job, State
from specbench.decoding.token_tree import Levels, Tree, pack, static_tree, tree_of
from specbench.decoding.transfers import constant, upload
from specbench.models import kernel_attention
from specbench.models.attention_mask import AttentionMask
from specbench.models.encoder_decoder import Encoder, not_applied
from specbench.models.experts import chosen_by_token, expert_layers
from specbench.models.flops import per_token
from specbench.models.forward_args import Decoder
from specbench.models.head_input import Listener, head_inputs
from specbench.models.vocabulary import VocabMap


class LanguageModel(Target):
    """A model, its tokenizer, its cache and the standardization of its logits (section 2.2)."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: Any,
        *,
        name: str,
        sampling: Sampling,
        new_cache: Callable[[int, int], SlotCache],
        executor: Executor,
        chat_template: bool = False,
        vocab_size: int | None = None,
        exact: bool = True,
        attention: str = "auto",
        hearing: Hearing | None = None,
    ):
        """`vocab_size` is V if it is not the module's: the target's, for a drafter's model. `exact` is for the
        executor, see `Executor.load`; `attention` is one of `kernel_attention.CHOICES`; `hearing` is there if the
        encoder reads sounds."""
        self.tokenizer, self.name = tokenizer, name
        self.sampling, self.new_cache, self.chat_template = sampling, new_cache, chat_template
        self.config: PretrainedConfig = module.config.get_text_config()
        self.own_vocab_size = int(self.config.vocab_size)  # rows of the module's embedding
        self.vocabulary = VocabMap(self.own_vocab_size, vocab_size or self.own_vocab_size)
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        refuse_unknown_kinds(module.config, name)
        self.mask = AttentionMask(self.config, self.dtype)
        self.executor, self._stock, self.module = executor, module, executor.load(module, exact)
        self.attention = attention
        self.encoder = Encoder(self.module, name, hearing) if module.config.is_encoder_decoder else None
        self.recurrence = Recurrence.of(self.module, self.mask, name)
        self.state_bytes = 0 if self.recurrence is None else self.recurrence.state_bytes
        self.one_by_one = self.recurrence is not None and self.recurrence.one_by_one
        self.decoder = Decoder(module, self.module, self.recurrence is None)
        self.kernel_errors: list[Tensor] | None = None  # what each layer adds to when the kernel is checked
        self.kernel = kernel_attention.choose(attention, self.module, self.device, name)  # else SDPA
        self.weight_bytes = executor.stored(self.module).held
        self.weight_count = sum(1 for each in (self.module.parameters(), self.module.buffers()) for _ in each)
        self.operations_per_token, self.step_bytes = per_token(self.module, executor)
        self._cache: SlotCache | None = None
        self.cached: list[int] = []
        self.listener: Listener | None = None

    @property
    def cache(self) -> SlotCache:
        """The cache that `allocate` made."""
        assert self._cache is not None, "allocate comes first"
        return self._cache

    @cache.setter
    def cache(self, cache: SlotCache | None) -> None:
        self._cache = cache

    @property
    def description(self) -> tuple[Any, ...]:
        """See `HasCache.description`."""
        begin = 0 if self.encoder is None else self.encoder.suppressed.begin  # it follows from the data's language
        return self.name, self.sampling, self.vocabulary.description, str(self.dtype), self.kernel, begin

    def cache_tensors(self) -> list[Tensor]:
        """See `HasCache.cache_tensors`; shapes of `SlotCache.tensors` and `EncoderInputs.tensors`."""
        own = self.cache.tensors()
        return own if self.encoder is None or not own else own + self.encoder.inputs.tensors()

    @contextmanager
    def on_cache(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """See `HasCache.on_cache`; shapes of `cache_tensors`."""
        own = len(self.cache.tensors())
        with self.cache.bound(tensors[:own]), ExitStack() as stack:
            if self.encoder is not None:
                stack.enter_context(self.encoder.inputs.bound(tensors[own:]))
            yield

    def shared(self, sampling: Sampling, new_cache: Callable[[int, int], SlotCache], executor: Executor) -> Self:
        """A model of the same weights with its own sampling and cache. `executor` must be of the same kind and settings
        as the one that loaded them, and know of it (`Executor.share`)."""
        model = copy.copy(self)
        model.sampling, model.new_cache, model.executor = sampling, new_cache, executor
        model._cache, model.cached, model.listener = None, [], None
        model.encoder = None if self.encoder is None else self.encoder.shared()
        return model

    def stock_module(self) -> PreTrainedModel:
        """The module as transformers made it."""
        return self._stock

    def own_module(self) -> PreTrainedModel:
        """Another module with the same weights, which the caller may change."""
        return copy.deepcopy(self.stock_module())

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.wanted

    @property
    def shared_tokens(self) -> int | None:
        return self.vocabulary.shared

    @property
    def context(self) -> int:
        own = context_of(self.config, "decoder") - self.decoder.first
        return own if self.encoder is None else min(own, self.encoder.positions.most)

    @property
    def start_tokens(self) -> list[int] | None:
        return None if self.encoder is None else self.encoder.start_tokens

    @property
    def forced_tokens(self) -> int:
        """How many tokens generate() forces behind the start, which count for the length of a hypothesis."""
        return 0 if self.encoder is None else self.encoder.forced

    @property
    def hearing(self) -> Hearing | None:
        """How its encoder hears; None if it reads tokens, or there is none."""
        return None if self.encoder is None else self.encoder.hearing

    def speak(self, speech: Speech) -> None:
        if self.encoder is not None and self.encoder.hearing is not None:
            self.encoder.speak(speech)

    def begin_with(self, start: Sequence[int]) -> None:
        if self.encoder is not None and self.encoder.hearing is not None:
            self.encoder.begin_with(start)

    def suppress(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits or log p [..., N, V] after tokens at positions [..., N], without what generate() never draws there."""
        return logits if self.encoder is None else self.encoder.suppressed(logits, positions)

    @property
    def unlike_generate(self) -> list[str]:
        return not_applied(self.module)

    @property
    def input_context(self) -> int:
        return 0 if self.encoder is None else self.encoder.context

    @property
    def expert_layers(self) -> Sequence[nn.Module]:
        return expert_layers(self.module)

    @property
    def experts_by_token(self) -> int | None:
        return chosen_by_token(self.config)

    @cached_property
    def stop_tokens(self) -> list[int]:
        """End-of-sequence ids of the generation config, the config and the tokenizer."""
        ids: set[int] = set()
        for source in (getattr(self.module, "generation_config", None), self.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            ids.update(found if isinstance(found, list) else [] if found is None else [found])
        return sorted(ids)

    def cache_bytes(self) -> int:
        return self.cache.bytes() + (0 if self.encoder is None else self.encoder.inputs.bytes())

    def column_bytes(self) -> float:
        return self.cache.column_bytes()

    def allocate(self, rows: int, columns: int) -> None:
        """Makes an empty cache of at least `columns` positions for each of `rows` rows. A present one that fits is
        emptied and used again, at the same addresses."""
        self._open(rows, columns, again=False)

    def reopen(self, rows: int, columns: int) -> None:
        self._open(rows, columns, again=True)

    def _open(self, rows: int, columns: int, again: bool) -> None:
        cache = self._cache
        if cache is None or cache.rows != rows or cache.capacity < columns or not cache.fixed_shapes:
            self._cache = None  # frees its memory before the next one is made
            made = self.new_cache(rows, self.executor.columns(columns))
            made.contiguous = self.decoder.contiguous
            self._cache = made if self.recurrence is None else self.recurrence.cache(made)
        elif again:
            cache.reopen()
        else:
            cache.clear()
        self.cached = [0] * rows
        if self.listener is not None:
            self.listener.forget()
        if self.encoder is not None:
            self.encoder.allocate(rows, self.executor.columns, self.executor.fixed_shapes)

    def may_admit(self, job: Job, columns: int) -> bool:
        return self.cache.may_admit(self._sharable(job.tokens), columns)

    def admit(self, row: int, job: Job, columns: int) -> None:
        self.cached[row] = self.cache.admit(row, self._sharable(job.tokens), columns)

    def _sharable(self, prompt: Sequence[int]) -> Sequence[int]:
        """The tokens of a prompt whose keys and values a row with the same beginning may use too. Those of a decoder
        depend on the encoder's input; and a listener has to hear of every token."""
        return prompt if self.encoder is None and self.listener is None else prompt[:1]

    def encode(self, row: int, job: Job) -> bool:
        if self.encoder is None:
            return False
        assert job.encoder_input, "an encoder-decoder needs an input"
        self.encoder.read(row, job.encoder_input)
        return True

    def prompt_read(self, row: int, job: Job) -> None:
        self.cache.written(row, self._sharable(job.tokens))

    def release(self, row: int) -> None:
        self.cache.release(row)
        self.cached[row] = 0
        if self.encoder is not None:
            self.encoder.inputs.release(row)

    def prefill(self, state: State, upto: int | None = None, start: int = 0, chunk: int = READ_CHUNK) -> None:
        """See `Model.prefill`. Rows are padded on the right: what a shorter row writes beyond its length is overwritten
        before any of its tokens can see it."""
        end = state.longest - 1 if upto is None else upto
        if self.recurrence is not None:  # a state cannot forget padding
            read_rows(
                self, state, [start] * len(self.cached), [min(end, length - 1) for length in state.lengths], chunk
            )
            return
        for begin in range(start, end, chunk):
            tokens = state.tokens[:, begin : min(begin + chunk, end)]
            visible = self.make_room([begin] * len(self.cached), tokens.shape[1])
            with self._heard(None, begin) as keep_logits:
                self.forward(tokens, torch.full_like(state.length, begin), visible, keep_logits=keep_logits)
        self.cached = [min(end, length - 1) for length in state.lengths]

    def read_again(self, state: State) -> int:
        return 0 if self.recurrence is None else recover(self, state, 1)

    def catch_up(self, state: State, width: int) -> None:
        """Reads committed tokens of active rows until at most `width` of each are missing in the cache."""
        if self.recurrence is not None:
            recover(self, state, width)
            return
        rows = zip(state.reach, self.cached, state.active, strict=True)
        behind = [row for row, (length, cached, on) in enumerate(rows) if on and length - cached > width]
        if behind:
            self.executor.launching()
        if len(behind) == state.batch_size:
            self.prefill(state, start=min(self.cached))
        else:
            for row in behind:
                self.read(state, row, self.cached[row], state.lengths[row] - 1)

    def read(self, state: State, row: int, begin: int, end: int) -> None:
        with self._heard(row, begin) as keep_logits:
            self.read_row(state.tokens[row : row + 1], row, begin, end, keep_logits=keep_logits)

    @contextmanager
    def _heard(self, row: int | None, begin: int) -> Iterator[int]:
        """Inside this context one forward reads prompt tokens, the first at position `begin`, of a row or of all
        (None); the listener hears of their hidden states. Yields the number of logits that the forward should keep."""
        if self.listener is None:
            yield 1
            return
        with head_inputs(self.module, lambda hidden: hidden[:, -1:]) as found:
            yield 0
        self.listener.hear(row, begin, found[0])

    def read_row(self, text: Tensor, row: int, begin: int, end: int, keep_logits: int = 0) -> Tensor:
        """Reads the tokens begin .. end - 1 of a text [1, T] into one row of the cache. Returns logits
        [1, end - begin, V], or only the last `keep_logits` of them."""
        self.cached[row] = begin
        self.cache.truncate(self.cached)
        wanted = [0] * self.cache.rows
        wanted[row] = end
        self.cache.reserve(wanted)
        visible = self.columns_seen(end)
        first = torch.full((1,), begin, device=self.device)
        logits = self.forward(text[:, begin:end], first, visible, row=row, keep_logits=keep_logits)
        self.cached[row] = end
        return logits

    def open_text(self, text: Tensor, begin: int, end: int, encoder_input: EncoderInput | None = None) -> None:
        self.allocate(self.cache.rows, self.cache.capacity)
        job = Job(text[0, :begin].tolist(), end, 0, encoder_input)
        self.admit(0, job, min(end, self.cache.capacity))
        self.encode(0, job)
        start = self.cached[0]
        for first in range(start, begin - 1, READ_CHUNK):
            self.read_row(text, 0, first, min(first + READ_CHUNK, begin - 1), keep_logits=1)
        self.cache.keep(every=False)  # several texts may follow

    def read_text(self, text: Tensor, begin: int, end: int) -> Tensor:
        return self.read_row(text, 0, begin - 1, end - 1)

    def logits(self, tokens: Tensor, starts: Sequence[int], draft: Draft | None = None) -> Tensor:
        """Logits [B, N, V] of tokens [B, N], of which the first is at position starts[b] in row b.

        Everything in the cache at and beyond `starts` is forgotten first: this is the rollback.
        """
        visible = self.make_room(starts, tokens.shape[1])
        tree = None if draft is None or draft.parent is None else tree_of(draft.levels, draft.parent)
        return self.forward(tokens, upload(list(starts), self.device), visible, tree=tree)

    def score(self, state: State, draft: Draft, keep_hidden: bool = False) -> Scores:
        """See `Target.score`. Guesses that spell the same text are read once, unless shapes are fixed."""
        lengths = [n - 1 for n in state.reach]
        if draft.repeats and not self.executor.fixed_shapes:
            packed = pack(draft.tokens, draft.levels, draft.parents, draft.exists())
            width = packed.tokens.shape[1] + 1
            visible = self.make_room(lengths, width, state.active)
            p, hidden = self._score(state.rows, packed.tokens, visible, packed.tree, keep_hidden)
            rows = torch.arange(len(p), device=p.device)[:, None]
            return Scores(p[rows, packed.place], width, hidden, packed.place)
        width = draft.tokens.shape[1] + 1
        visible = self.make_room(lengths, width, state.active)
        leaf, used, B = self.executor.leaf(self._score_draft, self), self.rows_of(state), state.batch_size
        b, parent = len(used.length), draft.parent
        parent = parent if parent is None or len(parent) == 1 else parent[:b]
        p, hidden = leaf(used, draft.tokens[:b], visible, draft.levels, parent, keep_hidden)
        return Scores(all_rows(p, B), width, None if hidden is None else all_rows(hidden, B))

    def rows_of(self, state: State) -> Rows:
        """The rows that a call reads: those up to the last active one or, with fixed shapes, all."""
        return state.rows if self.executor.fixed_shapes else state.rows.first(state.busy)

    def _score_draft(
        self, rows: Rows, guesses: Tensor, visible: int, levels: Levels, parent: Tensor | None, keep_hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_score` of the guesses [B, N] of a draft, by its levels and parent [1 or B, N] (None: a chain): p
        [B, N + 1, V] and hidden states [B, N + 1, H] or None."""
        tree = None if parent is None else tree_of(levels, parent)
        return self._score(rows, guesses, visible, tree, keep_hidden)

    def _score(
        self, rows: Rows, guesses: Tensor, visible: int, tree: Tree | None, keep_hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """p [B, N + 1, V] after the last committed token and each of the guesses [B, N], and the last hidden states
        [B, N + 1, H] if `keep_hidden`, else None."""
        text, length = rows.tokens, rows.length
        last = text.gather(1, length[:, None] - 1)
        x = torch.cat([last, guesses], 1)
        hidden = None
        if keep_hidden:
            with head_inputs(self.module) as found:
                logits = self.forward(x, length - 1, visible, tree=tree)
            hidden = torch.cat(found, 1 if len(found[0]) == len(x) else 0)  # of tokens, or rows, read one by one
        else:
            logits = self.forward(x, length - 1, visible, tree=tree)
        penalised = self.sampling.repetition_penalty != 1
        seen = self._seen(text, length, guesses, tree) if penalised else None
        return self.sampling.probabilities(logits, seen), hidden

    def settle(self, state: State, draft: Draft, verdict: Verdict, scores: Scores, base: Tensor) -> None:
        """Moves the keys and values of a tree's accepted path to the columns of a chain. base [B] is the column of node
        0."""
        if verdict.path is not None and not draft.is_chain:
            # Nodes that a row has not got are not read: the path of accepted guesses ends before them.
            self.keep_path(verdict.path[:, : scores.width - 1], base, scores.place)

    def keep_path(self, path: Tensor, base: Tensor, place: Tensor | None = None) -> None:
        """Moves the keys and values of the nodes path [B, D] to consecutive columns from base [B] on, the column of
        node 0. place [B, N + 1] says where each entry was read, if guesses shared places."""
        entries = path if place is None else place.gather(1, path + 1) - 1
        self.executor.leaf(self._keep_path, self)(entries, base)

    def _keep_path(self, entries: Tensor, base: Tensor) -> None:
        """Moves the packed nodes entries [B, D] to consecutive columns from base [B] on."""
        self.cache.commit(entries, base)

    def make_room(self, starts: Sequence[int], width: int, active: Sequence[bool] | None = None) -> int:
        """Rolls the cache back to `starts`, so that `width` tokens can follow in the active rows. Returns the number of
        columns that attention sees."""
        on = active or [True] * len(starts)
        self.cached = [max(0, s) if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        self.cache.truncate(self.cached)
        self.cache.reserve([s + width if a else 0 for s, a in zip(starts, on, strict=True)])
        self.cache.keep(every=True)
        self.cached = [s + width if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        return self.columns_seen(max(starts) + width)

    def columns_seen(self, needed: int) -> int:
        """The number of leading columns that a forward is told of, if `needed` are filled. The kernel reads on the
        device how many there are, so it is told of all: one shape serves every length."""
        if self.kernel and self.cache.fixed_shapes:
            return self.cache.capacity
        return self.executor.columns(needed, self.cache.capacity)

    def forward(
        self,
        tokens: Tensor,
        first: Tensor,
        visible: int,
        row: int | None = None,
        tree: Tree | None = None,
        keep_logits: int = 0,
        suppressing: bool = True,
    ) -> Tensor:
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of tokens [b, N], or of their embeddings [b, N, H],
        at positions first[b], first[b] + 1, ... or, in a tree, by depth; first [b]. Tokens at negative positions must
        be the one at position 0, which is then read several times. Unless `suppressing`, they are the module's own,
        also of tokens that generate() never draws.

        Only tensor operations: an executor may compile it, or capture it in a CUDA graph.
        """
        slots = (first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)).clamp(min=0)
        self.cache.place(slots, visible, row, in_blocks=self.kernel)
        root = first if tree is None else first - (tree.sees.shape[2] - tokens.shape[1])  # column of entry 0
        positions = slots if tree is None else root[:, None] + tree.depth
        if torch.compiler.is_compiling() or visible > self.context:  # guesses of idle rows, whose logits are not used
            positions = positions.clamp(max=self.context - 1)
        words = {"inputs_embeds": tokens} if tokens.is_floating_point() else {"input_ids": self.vocabulary.read(tokens)}
        if self.recurrence is not None:
            assert tree is None, "a recurrent model reads chains"
            return self.vocabulary.fit(self.recurrence.logits(self, words, slots, positions, visible, row, keep_logits))
        if self.encoder is not None:
            call = (positions, root, visible, tree, row, self.cache, self.mask, slots)
            logits = self.encoder.logits(self.module, words, *call)
            return self.vocabulary.fit(self.suppress(logits, positions) if suppressing else logits)
        if self.kernel:
            seen = kernel_attention.arguments(self, tokens, first, tree)
        else:
            seen = {"attention_mask": self.mask(slots, root, visible, tree)}
        seen |= {"past_key_values": self.cache}
        logits = self.decoder.logits(self.module, words, positions, root, visible, tree, keep_logits, seen)
        return self.vocabulary.fit(logits)

    def _seen(self, text: Tensor, length: Tensor, guesses: Tensor, tree: Tree | None) -> Tensor:
        """[B, N + 1, V] bool: the tokens that the repetition penalty applies to, which grow with each of the guesses
        [B, N] on the path. text [B, T], length [B]."""
        committed = seen_tokens(text, length, self.vocab_size)[:, None, :]
        if not guesses.shape[1]:
            return committed
        if tree is None:
            tree = constant(static_tree)(tuple(range(-1, guesses.shape[1] - 1)), text.device)
        hot = F.one_hot(guesses, self.vocab_size).float()  # [B, N, V]
        return committed | (tree.sees[..., 1:].float() @ hot > 0)
