"""Shared pieces: a tabular pair with known law, and the run of a decoder on it."""

import os
from collections.abc import Callable
from types import SimpleNamespace

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hydra import compose, initialize_config_dir

from specbench.cache.dynamic import DynamicCache
from specbench.cache.paged import PagedCache
from specbench.cache.slots import SlotCache
from specbench.cache.static import StaticCache
from specbench.context import Context
from specbench.decoding.sampling import Sampling
from specbench.drafters.counts import BigramDrafter, UnigramDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.ngram import NgramDrafter
from specbench.drafters.prompt_lookup import PromptLookupDrafter
from specbench.drafters.random import RandomDrafter
from specbench.executors.eager import EagerExecutor
from specbench.models.language_model import LanguageModel
from specbench.models.tabular import TabularMarkov, random_table
from specbench.paths import conf_dir

CACHES = {"static": StaticCache, "dynamic": DynamicCache, "paged": PagedCache}
CACHE_SETTINGS = {"paged": PagedCache.Settings(block_size=4, blocks=None)}
DRAFTERS = ("model", "ngram", "ngram_sample", "prompt_lookup", "bigram", "unigram", "random")
V = 16


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


class DigitTokenizer:
    """Tokens are numbers separated by spaces."""

    eos_token_id = None
    bos_token_id = None
    chat_template = None
    backend_tokenizer = None

    def __call__(self, texts, add_special_tokens=True):
        if isinstance(texts, str):
            return {"input_ids": [int(t) for t in texts.split()]}
        return {"input_ids": [self(text)["input_ids"] for text in texts]}

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))

    def get_vocab(self):
        return {str(i): i for i in range(V)}


def cache_maker(cache: str | type) -> Callable[[int, int], SlotCache]:
    """What `LanguageModel` takes as `new_cache`."""
    kind = CACHES[cache] if isinstance(cache, str) else cache
    settings = CACHE_SETTINGS.get(cache) or kind.Settings()
    return lambda rows, columns: kind(settings, rows, columns)


def tabular_model(
    table: torch.Tensor,
    sampling: Sampling,
    cache: str | type = "static",
    context: int = 64,
    executor: EagerExecutor | None = None,
    device: torch.device | None = None,
) -> LanguageModel:
    """An order-2 Markov chain behind the ordinary adapter."""
    return LanguageModel(
        TabularMarkov(table, context=context).to(device),
        DigitTokenizer(),
        name="tabular",
        sampling=sampling,
        new_cache=cache_maker(cache),
        executor=executor or EagerExecutor(EagerExecutor.Settings(), None),
    )


def make_context(sampling: Sampling, target: LanguageModel | None = None, lenience: float = 1.0) -> Context:
    return Context(torch.device("cpu"), torch.float32, sampling, lenience, target=target)


def make_drafter(kind: str, target: LanguageModel, text_file: str, drafter_model: LanguageModel | None = None):
    """Any drafter for a target; `text_file` is what the count models are fitted on."""
    context = make_context(target.sampling, target)
    if kind == "model":
        return ModelDrafter.of(drafter_model, target.vocab_size, gamma=5)
    if kind.startswith("ngram"):
        settings = NgramDrafter.Settings(min_order=2, max_order=4, window=512, sample=kind == "ngram_sample")
        return NgramDrafter(settings, context)
    if kind == "prompt_lookup":
        return PromptLookupDrafter(PromptLookupDrafter.Settings(max_match=3, min_match=1), context)
    if kind == "bigram":
        return BigramDrafter(BigramDrafter.Settings(path=text_file, smoothing=1.0), context)
    if kind == "unigram":
        return UnigramDrafter(UnigramDrafter.Settings(path=text_file), context)
    return RandomDrafter(RandomDrafter.Settings(), context)


def composed(*overrides: str):
    """The configuration that the command line would compose."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.fixture(scope="session")
def number_text(tmp_path_factory) -> str:
    """A text of numbers for the count models."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(V, (4000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(map(str, numbers)))
    return str(path)


@pytest.fixture(scope="session")
def tables() -> SimpleNamespace:
    """A target law and an adversarial drafter: its logits are the target's, negated."""
    table = random_table(V, seed=1)
    return SimpleNamespace(target=table, adversarial=-table, similar=table + random_table(V, seed=2, spread=0.5))
