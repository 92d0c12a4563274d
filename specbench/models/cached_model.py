"""A model of transformers whose rows each have their own length: its cache, and one forward.

Ragged rows, exact rollback and token trees come from explicit positions, cache columns and a 4-D attention mask. The
modelling code of transformers runs unmodified. B rows (b of them in a forward), N new tokens, T columns, V vocabulary,
H hidden.
"""

import copy
import logging
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specbench.cache.slots import SlotCache
from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.token_tree import Tree
from specbench.errors import ConfigError, first_line
from specbench.executors.base import Executor
from specbench.models.attention_mask import AttentionMask, carries_state, places_of, refuse_unknown_kinds
from specbench.models.causal_call import CausalCall
from specbench.models.cpu_step import CpuStep
from specbench.models.generation import forbidden_tokens
from specbench.models.sizes import context_of, per_token, rotary_switch, stops_of, stored
from specbench.models.vocabulary import VocabMap
from specbench.settings import UNLIMITED_CONTEXT, Component

if TYPE_CHECKING:
    from specbench.models.encoder_decoder import Encoder
    from specbench.models.recurrent import Recurrence, RowStates

log = logging.getLogger(__name__)


class CachedModel(Component):
    """A model of transformers, its tokenizer, its sampling, and a cache with rows that requests enter and leave. The
    first cached[b] tokens of row b are in the cache. A forward that begins at position s forgets everything at and
    beyond s: this is the rollback."""

    cache: SlotCache  # from `allocate` on
    trees: bool = True  # whether it can read token trees
    random_weights: bool = False
    weight_bytes: int  # bytes of all weights
    step_bytes: float  # bytes of weights that a one-token step reads
    operations_per_token: float  # multiply-adds with weights: what c_hat compares (Definition 3.10)
    state_bytes: float  # bytes of one row's recurrent state, if it has one
    executor: Executor
    stock: PreTrainedModel  # the module as transformers made it
    owner: "CachedModel | None" = None  # the model whose layers and cache it uses, if they are not its own
    encoder: "Encoder | None" = None
    hidden_reader: Any = None  # a drafter whose `take_hidden` is given the hidden states of prompts
    recurrence: "Recurrence | None" = None
    states: "RowStates | None" = None  # of a recurrent model, from `allocate` on
    fused: Any = None  # the `FusedStep` that reads few tokens in place of the module, if there is one

    def __init__(
        self, module: PreTrainedModel, tokenizer: Any, *, name: str, sampling: Sampling,
        new_cache: Callable[[int, int], SlotCache], executor: Executor, chat_template: bool = False,
        vocab_size: int | None = None, attention: str = "auto",
    ):  # fmt: skip
        """`vocab_size` is V, if not the module's: of a drafter the target's. `attention`: "auto", "sdpa", "triton"."""
        self.tokenizer, self.name = tokenizer, name
        self.sampling, self.new_cache, self.chat_template = sampling, new_cache, chat_template
        self.config: PretrainedConfig = module.config.get_text_config()
        self.own_vocab_size = int(self.config.vocab_size)  # rows of the module's embedding
        self.vocabulary = VocabMap(self.own_vocab_size, vocab_size or self.own_vocab_size)
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        refuse_unknown_kinds(module.config, name)
        self.mask = AttentionMask(self.config, self.dtype)
        self.executor, self.stock, self.module = executor, module, executor.load(module)
        if self.device.type == "cuda":
            from specbench.models.float_logits import with_float_logits

            self.module = with_float_logits(self.module)
        if module.config.is_encoder_decoder:
            from specbench.models.encoder_decoder import Encoder

            self.encoder = Encoder(self.module, name)
        self.forbidden = forbidden_tokens(module)
        if carries_state(self.module):
            from specbench.models.recurrent import recurrence_of

            self.recurrence = recurrence_of(self.module, self.mask, name)
        self.state_bytes = 0.0 if self.recurrence is None else self.recurrence.state_bytes
        self.decoder = self.recurrence or self.encoder or CausalCall(module, self.module)
        positions = self.decoder.positions
        if not executor.runs_encoders and positions is not None and positions.known:
            executor.run_eagerly(f"{name} makes its positions itself")
        self.attention = attention
        written = executor.traces or (self.device.type == "cpu" and executor.fixed_shapes)
        if attention == "triton" or (attention == "auto" and not written):
            self._use_fused_step()
        _, self.weight_bytes = stored(self.module)
        self.operations_per_token, self.step_bytes = per_token(self.module)
        self.cached: list[int] = []
        self.feature_layers: tuple[int, ...] = ()  # whose hidden states a drafter reads; see `hidden_states`

    def _use_fused_step(self) -> None:
        """Has few operations or kernels read tokens, if this module consists of Llama-like layers."""
        on_cpu = self.attention == "auto" and self.device.type == "cpu"
        if not on_cpu and find_spec("triton") is None:
            self.without_kernels("the package triton is not installed")
            return
        try:
            if on_cpu:
                self.fused = CpuStep(self.module, self.mask)
            else:
                from specbench.models.triton_step import TritonStep

                self.fused = TritonStep(self.module, self.mask)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # it lacks a part, or has another
            self.without_kernels(first_line(error))

    def without_kernels(self, reason: str) -> None:
        """From now on the module runs as it is written. Raises ConfigError if it must not."""
        if self.attention == "triton":
            raise ConfigError(f"attention=triton is not possible for {self.name}: {reason}, use attention=auto")
        level = logging.INFO if self.device.type == "cpu" else logging.WARNING
        log.log(level, "%s runs as it is written, and not layer by layer in few operations: %s", self.name, reason)
        self.fused = None

    def batch_invariant(self, rows: int, width: int, drafter: Any) -> bool:
        """Whether p of a token has the same bits in plain decoding and among `width` tokens: all forwards of the drafts
        run as kernels, no token moves in the cache, and prompts are read alone."""
        return self.reads_alone(rows) and rows * width <= self.fused.most_rows and not drafter.trees

    def reads_alone(self, rows: int) -> bool:
        """Whether each prompt is read by itself, from its beginning, so that p has the same bits beside any others: if
        kernels serve a draft of one guess in all rows. Methods that share plain decoding agree in it."""
        own = self.fused is not None and self.fused.counts and 2 * rows <= self.fused.most_rows
        return own and not self.cache.shares

    # -- What the model is ----------------------------------------------------------------------

    def shared(self, sampling: Sampling, new_cache: Callable[[int, int], SlotCache], executor: Executor) -> Self:
        """A model of the same weights with its own sampling and cache, run by an `executor` that shares them."""
        model = copy.copy(self)
        model.sampling, model.new_cache, model.executor = sampling, new_cache, executor
        model.free()
        model.hidden_reader, model.feature_layers = None, ()
        if self.encoder is not None:
            model.encoder = model.decoder = self.encoder.shared()
        return model

    @property
    def vocab_size(self) -> int:
        """V, the number of rows of the output matrix."""
        return self.vocabulary.wanted

    @property
    def context(self) -> int:
        """The longest text that the model supports, in tokens."""
        own = context_of(self.config, "decoder") - self.decoder.first
        return own if self.encoder is None else min(own, self.encoder.positions.most)

    @property
    def limits(self) -> list[str]:
        """Why its context is shorter than its configuration says."""
        switch = rotary_switch(self.config)
        return [f"its longrope turns all keys otherwise beyond {switch:,} tokens"] if switch < UNLIMITED_CONTEXT else []

    @property
    def start_tokens(self) -> list[int] | None:
        """What the decoder's text begins with, if a prompt is the input of an encoder; else None."""
        return None if self.encoder is None else self.encoder.start_tokens

    @property
    def forced_tokens(self) -> int:
        """How many tokens generate() forces behind the start, which count for the length of a hypothesis."""
        return len((self.start_tokens or [0])[1:])

    @cached_property
    def stop_tokens(self) -> list[int]:
        """End-of-sequence ids of the generation config, the config and the tokenizer."""
        sources = (self.module.generation_config, self.config, self.tokenizer)
        return sorted({token for source in sources for token in stops_of(source)})

    # -- Rows of the cache ----------------------------------------------------------------------

    def allocate(self, rows: int, columns: int) -> None:
        """Makes an empty cache of `rows` rows and at least `columns` columns; one that fits is emptied, and stays."""
        cache = vars(self).get("cache")
        if cache is None or cache.rows != rows or cache.capacity < columns or not cache.fixed_shapes:
            cache = None
            self.free()  # its memory, before the next one is made
            made = self.new_cache(rows, self.executor.columns(columns))
            made.contiguous = self.decoder.contiguous
            self.cache = made
        else:
            cache.clear()
        if self.recurrence is not None:
            from specbench.models.recurrent import RowStates

            self.states = RowStates(rows)
        self.cached = [0] * rows
        if self.hidden_reader is not None:
            self.hidden_reader.clear_hidden()
        if self.encoder is not None:
            self.encoder.allocate(rows, self.executor.columns, self.executor.fixed_shapes)

    def free(self) -> None:
        """Forgets its cache, which another model may use on."""
        vars(self).pop("cache", None)
        self.cached = []

    def may_admit(self, sequence: Sequence, columns: int) -> bool:
        """Whether the cache has room for this request, which needs at most `columns` columns."""
        return self.cache.may_admit(self._sharable(sequence.tokens), columns)

    def admit(self, row: int, sequence: Sequence, columns: int) -> None:
        """Gives a row of the cache to a request; cached[row] becomes the number of its tokens that are there."""
        self.cached[row] = self.cache.admit(row, self._sharable(sequence.tokens), columns)
        if self.states is not None:
            self.states.kept[row].clear()

    def _sharable(self, prompt: abc.Sequence[int]) -> abc.Sequence[int]:
        """The tokens of a prompt whose keys and values other rows may use too. Those of a decoder depend on the
        encoder's input, a reader of hidden states has to be given those of every token, and the state behind a shared
        beginning is not kept."""
        shared = self.encoder is None and self.hidden_reader is None and self.recurrence is None
        return prompt if shared else prompt[:1]

    def encode(self, row: int, sequence: Sequence) -> bool:
        """Has the encoder read the sequence's input for the row; returns whether there is an encoder."""
        if self.encoder is None:
            return False
        assert sequence.encoder_input, "an encoder-decoder needs an input"
        self.encoder.read(row, sequence.encoder_input)
        return True

    def prompt_read(self, row: int, sequence: Sequence) -> None:
        """Called when the row's prompt has been read completely: other rows may share it from now on."""
        self.cache.written(row, self._sharable(sequence.tokens))

    def release(self, row: int) -> None:
        """Frees a row of the cache: its request has ended."""
        self.cache.release(row)
        self.cached[row] = 0
        if self.states is not None:
            self.states.kept[row].clear()

    def cache_bytes(self) -> int:
        """Bytes that keys and values occupy now."""
        inputs = 0 if self.encoder is None else self.encoder.inputs.bytes()
        return self.cache.bytes() + inputs + (0 if self.states is None else self.states.bytes())

    def cache_tensors(self) -> list[Tensor]:
        """See `HasCache.cache_tensors`."""
        own = self.cache.tensors()
        return own if self.encoder is None or not own else own + self.encoder.inputs.tensors()

    @contextmanager
    def on_cache(self, tensors: abc.Sequence[Tensor]) -> Iterator[None]:
        """See `HasCache.on_cache`. Executors that need it run no encoder-decoders."""
        own = self.cache.tensors()
        self.cache.use(tensors)
        try:
            yield
        finally:
            self.cache.use(own)

    # -- A forward ------------------------------------------------------------------------------

    def rollback_to(self, starts: abc.Sequence[int], width: int, active: abc.Sequence[bool] | None = None) -> int:
        """Forgets everything at and beyond starts[b] in each active row, and reserves columns for `width` tokens from
        there on. Returns the number of columns that these will see."""
        on = active or [True] * len(starts)
        self.cached = [max(0, s) if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        self._make_room([s + width if a else 0 for s, a in zip(starts, on, strict=True)], keeps_all=True)
        self.cached = [s + width if a else c for s, c, a in zip(starts, self.cached, on, strict=True)]
        return self.visible_columns(max(starts) + width, len(starts) * width)

    def rollback_row(self, row: int, begin: int, end: int) -> int:
        """As `rollback_to`, of one row, which will read tokens begin .. end - 1."""
        self.cached[row] = begin
        self._make_room([end if other == row else 0 for other in range(self.cache.rows)], keeps_all=False)
        return self.visible_columns(end, end - begin)

    def _make_room(self, ends: abc.Sequence[int], keeps_all: bool) -> None:
        """Forgets what is beyond cached[b] in each row. The next forwards write columns below ends[b]; 0 is none."""
        self.cache.truncate(self.cached)
        self.cache.reserve(ends)
        if self.states is not None:
            self.states.truncate(self.cached)
            self.states.change([end > 0 for end in ends], keeps_all)

    def visible_columns(self, needed: int, new: int) -> int:
        """The number of leading columns that a forward of `new` tokens, of all rows, is given, if `needed` are filled:
        all, for kernels, which read on the device how many there are, so that one shape serves every length."""
        counts = self.fused is not None and self.fused.counts and new <= self.fused.most_rows
        if counts and self.cache.fixed_shapes:
            return self.cache.capacity
        return self.executor.columns(needed, self.cache.capacity)

    def forward(
        self, tokens: Tensor, first: Tensor, visible: int, row: int | None = None, tree: Tree | None = None,
        keep_logits: int = 0, suppressing: bool = True,
    ) -> Tensor:  # fmt: skip
        """Logits [b, N, V] (only the last `keep_logits` if not 0) of tokens [b, N], or of their embeddings [b, N, H],
        at positions first[b], first[b] + 1, ... or, in a tree, by depth; first [b]. Tokens at negative positions must
        be the one at position 0, which is then read several times. Unless `suppressing`, they are the module's own,
        also of tokens that generate() never draws. Only tensor operations: an executor may compile or capture it."""
        if self.fused is not None and self.fused.serves(tokens):
            read = tokens if tokens.is_floating_point() else self.vocabulary.read(tokens)
            logits = self.fused.logits(self.cache, read, first, visible, row, tree, keep_logits)
            return self.vocabulary.fit(self.allowed(logits) if suppressing else logits)
        places = places_of(first, tokens.shape[1], visible, tree)
        positions = places.positions
        if torch.compiler.is_compiling() or visible > self.context:  # guesses of idle rows, whose logits are not used
            positions = positions.clamp(max=self.context - 1)
        words = {"inputs_embeds": tokens} if tokens.is_floating_point() else {"input_ids": self.vocabulary.read(tokens)}
        self.cache.place(places.slots, visible, row)
        logits = self.decoder.logits(self, words, places._replace(positions=positions), row, keep_logits)
        return self.vocabulary.fit(self.allowed(logits) if suppressing else logits)

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits or log p [..., V] without the tokens that generate() never draws."""
        return logits.index_fill(-1, self.forbidden, -torch.inf) if len(self.forbidden) else logits
