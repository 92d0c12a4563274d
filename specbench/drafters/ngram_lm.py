"""Drafters that sample from a table: unigrams and bigrams of a text (sections 3.6 and 4.2), and tokens at random."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.data.files import read_text
from specbench.data.stdlib import read_modules
from specbench.decoding.draft import Draft
from specbench.decoding.noise import PROPOSAL, uniforms
from specbench.decoding.rows import window
from specbench.decoding.sampling import Sampling
from specbench.decoding.state import State
from specbench.decoding.transfers import counts
from specbench.drafters.base import Drafter, OwnSampling
from specbench.drafters.lookup_base import CountDrafter
from specbench.models.language_model import LanguageModel
from specbench.models.load import Context
from specbench.settings import place_of


class RandomDrafter(Drafter):
    """Draws every guess uniformly from the vocabulary, q(x) = 1 / V: the paper's theoretical case, which still
    guarantees a small improvement (section 3.6). At temperature 0 the guess is random too, and a point mass."""

    def __init__(self, vocab_size: int, greedy: bool):
        self.vocab_size, self.greedy = vocab_size, greedy

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "RandomDrafter":
        return cls(target.vocab_size, context.sampling.greedy)

    def propose(self, state: State, gamma: list[int]) -> Draft:
        uniform = uniforms(window(state.noise[PROPOSAL], state.length, max(gamma)))
        tokens = (uniform * self.vocab_size).long()
        q: Tensor | None = None
        if not self.greedy:
            q = torch.full((*tokens.shape, self.vocab_size), 1 / self.vocab_size, device=tokens.device)
        return Draft.chain(tokens, q, counts(tuple(gamma), tokens.device))


class UnigramDrafter(CountDrafter):
    """The unigram model (section 4.2): q(x) is proportional to the count of x in the text, plus one."""

    class Settings(OwnSampling):
        path: str | None

        def check(self, prefix: str) -> None:
            if self.path is not None:
                read_text(place_of(self.path), f"{prefix}path")

    def __init__(self, tokens: Tensor, vocab_size: int, sampling: Sampling):
        """Fits the counts on tokens [n]."""
        super().__init__(vocab_size, sampling)
        self.unigram = torch.bincount(tokens, minlength=vocab_size)[:vocab_size].float() + 1

    @classmethod
    def from_settings(cls, settings: Any, context: Context, target: LanguageModel) -> "UnigramDrafter":
        tokens = training_tokens(settings.path, target.tokenizer, by_line=target.encoder is not None)
        own = {"smoothing": settings.smoothing} if isinstance(settings, BigramDrafter.Settings) else {}
        return cls(tokens, target.vocab_size, settings.own(context).sampling, **own)

    def weights(self, tokens: Sequence[int]) -> Tensor:
        return self.unigram


class BigramDrafter(UnigramDrafter):
    """The bigram model (section 3.6): q(x | y) is the share of x among the tokens that followed y in the text, as if
    each context had been seen `smoothing` times more, with unigram continuations."""

    class Settings(UnigramDrafter.Settings):
        smoothing: float = Field(ge=1e-6, le=1e9)

    def __init__(self, tokens: Tensor, vocab_size: int, sampling: Sampling, smoothing: float):
        super().__init__(tokens, vocab_size, sampling)
        pairs, counts = (tokens[:-1] * vocab_size + tokens[1:]).unique(return_counts=True)
        self.followers, self.counts = pairs % vocab_size, counts.float()
        first = torch.arange(vocab_size + 1) * vocab_size
        self.begins = torch.searchsorted(pairs, first)  # [V + 1]; pairs of context y: begins[y] .. begins[y + 1] - 1
        self.backoff = self.unigram * (smoothing / self.unigram.sum())

    def weights(self, tokens: Sequence[int]) -> Tensor:
        begin, end = self.begins[tokens[-1]], self.begins[tokens[-1] + 1]
        return self.backoff.index_add(0, self.followers[begin:end], self.counts[begin:end])


def training_tokens(path: str | None, tokenizer: Any, *, by_line: bool = False) -> Tensor:
    """Token ids [n] of a text file or, if `path` is None, of the text that the shipped pair was trained on. With
    `by_line`, which is for the texts of an encoder-decoder, each line is a text of its own, with the tokens that the
    tokenizer gives an output (its end); else a file is one text, without an end."""
    texts = list(read_modules(held_out=False).values()) if path is None else [read_text(place_of(path), "drafter.path")]
    if by_line:
        lines = [line for text in texts for line in text.split("\n") if line.strip()]
        encoded = tokenizer(text_target=lines, verbose=False)["input_ids"]
    elif (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        encoded = [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]
    else:
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids])
