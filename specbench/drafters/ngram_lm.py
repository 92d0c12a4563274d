"""Unigram and bigram drafters (sections 3.6 and 4.2), fitted on a text."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specbench.data.files import read_text
from specbench.data.sources import place_of
from specbench.data.stdlib_corpus import read_modules
from specbench.decoding.sampling import Sampling
from specbench.drafters.lookup_base import CountDrafter
from specbench.drafters.sampling_overrides import OwnSampling
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel


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
    """The bigram model (section 3.6): q(x | y) is the share of x among the tokens that followed y in the text,
    interpolated with the unigram as if each context had been seen `smoothing` times more, with unigram
    continuations."""

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
