"""Trains a T5 on pairs of texts, and drafters on its soft targets: what train_ende and train_docstrings share.

Stages, each of which starts from what the one before saved: a BPE tokenizer; the target, on the outputs of the pairs;
all drafters at once, on the target's soft targets; perplexity and BLEU of all on held-out pairs, and texts of the
target for drafters of counts. Needs `pip install -e '.[train]'`.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bleu import bleu
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from training import SEED, loss, seconds, train
from transformers import (
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
OWN_TEXTS = 2500  # that the target samples
Texts = list[tuple[str, str]]
Pairs = list[tuple[list[int], list[int]]]
Batch = tuple[Tensor, Tensor]  # [B, S] and [B, T]


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how long. The first of the shapes is the target."""

    shapes: dict[str, dict[str, int]]  # by part, arguments of T5Config
    rates: dict[str, float]  # of learning, by part
    steps: tuple[int, int]  # of the target, and of the drafters
    vocabulary: int
    longest: tuple[int, int]  # tokens of an input and of an output, at most
    words: int  # tokens of a batch, padding included
    held_out: int = 200  # pairs at the end, which nobody trains on


def train_tokenizer(texts: Texts, size: int, out: Path) -> Any:
    """A BPE tokenizer of both sides, which ends a text as T5's does."""
    if not (out / "tokenizer.json").exists():
        bpe = Tokenizer(models.BPE(unk_token=UNK))
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        lines = [text for pair in texts for text in pair]
        bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, special_tokens=[PAD, EOS, UNK]))
        bpe.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 1)])
        made = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, unk_token=UNK)
        made.save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def new_model(shape: dict[str, int], vocabulary: int) -> T5ForConditionalGeneration:
    """A T5 with gated layers, tied embeddings and random weights."""
    config = T5Config(vocab_size=vocabulary, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
                      relative_attention_max_distance=64, dropout_rate=0.1, **shape)  # fmt: skip
    return T5ForConditionalGeneration(config)


def batches(pairs: Pairs, epoch: int, words: int) -> Iterator[Batch]:
    """Inputs and outputs of pairs of similar length, padded, in an order that the epoch decides."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    noise = torch.rand(len(pairs), generator=generator).tolist()
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]) + 8 * noise[i])
    groups: list[list[int]] = [[]]
    for i in order:
        longest = [max(len(pairs[j][side]) for j in (*groups[-1], i)) for side in (0, 1)]
        if groups[-1] and sum(longest) * (len(groups[-1]) + 1) > words:
            groups.append([])
        groups[-1].append(i)
    for k in torch.randperm(len(groups), generator=generator).tolist():
        sides = ([torch.tensor(pairs[i][side]) for i in groups[k]] for side in (0, 1))
        source, target = (torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in sides)
        yield source, target


def endless(pairs: Pairs, words: int) -> Iterator[Batch]:
    """The batches of one epoch after the other."""
    epoch = 0
    while True:
        yield from batches(pairs, epoch, words)
        epoch += 1


def logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of the tokens [n] of the outputs, and these tokens, padding left out."""
    source, target = batch
    given = {"input_ids": source, "attention_mask": (source != 0).long(),
             "decoder_input_ids": F.pad(target[:, :-1], (1, 0))}  # fmt: skip
    return model(**given).logits[target != 0], target[target != 0]


def stage(recipe: Recipe, parts: Sequence[str], pairs: Pairs, vocabulary: int, out: Path, teacher: Any = None) -> None:
    """Trains parts side by side and saves each in 16 bits, unless that is done."""
    if all((out / part / "config.json").exists() for part in parts):
        return
    torch.manual_seed(SEED)
    fresh = {part: new_model(recipe.shapes[part], vocabulary) for part in parts}
    steps, data = recipe.steps[teacher is not None], endless(pairs, recipe.words)
    train(fresh, recipe.rates, steps, data, logits, out / f"{parts[0]}.checkpoint", teacher)
    for part, model in fresh.items():
        AutoTokenizer.from_pretrained(out).save_pretrained(out / part)
        model.to(torch.bfloat16).save_pretrained(out / part)


def load(folder: Path) -> Any:
    """A trained part, in 32 bits."""
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def evaluate(folder: Path, pairs: Pairs, references: list[str], tokenizer: Any, longest: int) -> dict[str, float]:
    """Perplexity of the references, and BLEU of greedy texts."""
    model: Any = load(folder)
    nats = tokens = 0.0
    for source, target in pairs:
        nats += float(loss(model, (torch.tensor([source]), torch.tensor([target])), logits)) * len(target)
        tokens += len(target)
    guesses = generated(model, [source for source, _ in pairs], tokenizer, longest, do_sample=False)
    sizes = {"parameters": model.num_parameters(), "bytes": (folder / "model.safetensors").stat().st_size}
    return {"perplexity": math.exp(nats / tokens), "bleu": bleu(guesses, references), **sizes}


@torch.inference_mode()
def generated(model: Any, sources: Sequence[list[int]], tokenizer: Any, longest: int, **how: Any) -> list[str]:
    """The model's texts for these inputs, 50 at a time."""
    texts = []
    for begin in tqdm(range(0, len(sources), 50), desc="texts", mininterval=10):
        rows = [torch.tensor(source) for source in sources[begin : begin + 50]]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # its own has the encoder's number of layers
        found = model.generate(x, attention_mask=(x != 0).long(), past_key_values=cache, max_new_tokens=longest, **how)
        texts += tokenizer.batch_decode(found, skip_special_tokens=True)
    return texts


def everything(recipe: Recipe, texts: Texts, out: Path) -> None:
    """All stages; those that have finished are not done again."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts[: -recipe.held_out], recipe.vocabulary, out)
    pairs: Pairs = []
    for a, b in texts:
        x, y = (tokenizer(text, truncation=True, max_length=most)["input_ids"]
                for text, most in zip((a, b), recipe.longest, strict=True))  # fmt: skip
        pairs.append((x, y))
    shown, held_out = pairs[: -recipe.held_out], pairs[-recipe.held_out :]
    target, *drafters = recipe.shapes
    stage(recipe, [target], shown, len(tokenizer), out)
    stage(recipe, drafters, shown, len(tokenizer), out, load(out / target))
    if not (out / "own.txt").exists():
        torch.manual_seed(SEED)
        sources = [a for a, _ in shown[:OWN_TEXTS]]
        own = generated(load(out / target), sources, tokenizer, recipe.longest[1], do_sample=True, top_k=0)
        (out / "own.txt").write_text("\n".join(own) + "\n", encoding="utf-8")
    references = [b for _, b in texts[-recipe.held_out :]]
    longest = recipe.longest[1]
    found: dict[str, Any] = {
        part: evaluate(out / part, held_out, references, tokenizer, longest) for part in recipe.shapes
    }
    found["training_seconds"] = {part: seconds(out / f"{part}.checkpoint") for part in (target, drafters[0])}
    (out / "metrics.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
