"""Trains a T5 that translates English to German, and three drafters of about 1/3, 1/10 and 1/30 of its size.

    python experiments/train_ende/train.py --data FOLDER --out FOLDER

FOLDER holds src-train.txt and tgt-train.txt, 10,000 aligned lines: the folder data/ of OpenNMT-py
(github.com/OpenNMT/OpenNMT-py, MIT license). Stages, each of which starts from what the one before saved: a BPE
tokenizer; the target, on the reference translations; each drafter, on the target's soft targets; perplexity and BLEU of
all on held-out lines. An interrupted stage goes on where its last checkpoint was. Needs `pip install -e '.[train]'`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bleu import bleu
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

SEED, VOCABULARY, HELD_OUT, LONGEST = 0, 3000, 200, 96  # tokens of a line, at most
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
WORDS = 2000  # tokens of a batch, padding included
SAVED_EVERY = 30.0  # seconds
SHAPES: dict[str, dict[str, int]] = {  # 1.7 M, 0.56 M, 0.17 M and 0.06 M parameters
    "target": dict(d_model=128, d_kv=32, num_heads=4, d_ff=320, num_layers=3, num_decoder_layers=3),
    "drafter_large": dict(d_model=64, d_kv=16, num_heads=4, d_ff=192, num_layers=3, num_decoder_layers=3),
    "drafter": dict(d_model=32, d_kv=16, num_heads=2, d_ff=128, num_layers=2, num_decoder_layers=2),
    "drafter_small": dict(d_model=16, d_kv=8, num_heads=2, d_ff=48, num_layers=1, num_decoder_layers=1),
}
RATES = {"target": 2e-3, "drafter_large": 3e-3, "drafter": 5e-3, "drafter_small": 8e-3}
Pairs = list[tuple[list[int], list[int]]]


def train_tokenizer(lines: list[str], out: Path) -> Any:
    """A BPE tokenizer of both languages, which ends a line as T5's does."""
    if not (out / "tokenizer.json").exists():
        bpe = Tokenizer(models.BPE(unk_token=UNK))
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        bpe.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[PAD, EOS, UNK]))
        bpe.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 1)])
        made = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, unk_token=UNK)
        made.save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def new_model(part: str, vocabulary: int) -> T5ForConditionalGeneration:
    """A T5 with gated layers, tied embeddings and random weights."""
    config = T5Config(vocab_size=vocabulary, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
                      relative_attention_max_distance=64, dropout_rate=0.1, **SHAPES[part])  # fmt: skip
    return T5ForConditionalGeneration(config)


def batches(pairs: Pairs, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and outputs of lines of similar length, padded: [B, S] and [B, T], in an order that the epoch decides."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    noise = torch.rand(len(pairs), generator=generator).tolist()
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]) + 8 * noise[i])
    groups: list[list[int]] = [[]]
    for i in order:
        longest = max(len(pairs[j][side]) for j in (*groups[-1], i) for side in (0, 1))
        if groups[-1] and longest * (len(groups[-1]) + 1) * 2 > WORDS:
            groups.append([])
        groups[-1].append(i)
    for k in torch.randperm(len(groups), generator=generator).tolist():
        sides = ([torch.tensor(pairs[i][side]) for i in groups[k]] for side in (0, 1))
        source, target = (torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in sides)
        yield source, target


def losses(model: Any, source: Tensor, target: Tensor, teacher: Any) -> Tensor:
    """The mean loss over tokens: cross entropy of the reference or, with a teacher, of its law. [B, S], [B, T]."""
    real = target != 0
    given = {"input_ids": source, "attention_mask": (source != 0).long(),
             "decoder_input_ids": F.pad(target[:, :-1], (1, 0))}  # fmt: skip
    log_q = model(**given).logits[real].log_softmax(-1)
    if teacher is None:
        return F.nll_loss(log_q, target[real])
    with torch.no_grad():
        p = teacher(**given).logits[real].softmax(-1)
    return -(p * log_q).sum(-1).mean()


def train(part: str, pairs: Pairs, vocabulary: int, steps: int, out: Path, teacher: Any = None) -> None:
    """Trains one model for so many steps, from its last checkpoint on, and saves it in 16 bits."""
    folder, kept = out / part, out / f"{part}.checkpoint"
    if (folder / "config.json").exists():
        return
    torch.manual_seed(SEED)
    model: Any = new_model(part, vocabulary)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATES[part], weight_decay=0.01, betas=(0.9, 0.98))
    step, seconds = 0, 0.0
    if kept.exists():
        state = torch.load(kept)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, seconds = state["step"], state["seconds"]
    began = saved = time.perf_counter()
    bar, epoch, place = tqdm(total=steps, initial=step, desc=part), 0, 0
    model.train()
    while step < steps:
        for source, target in batches(pairs, epoch):
            place += 1
            if place <= step:  # of an epoch that was interrupted
                continue
            warm = min(1.0, (step + 1) / max(1, steps // 20))
            for group in optimiser.param_groups:
                group["lr"] = RATES[part] * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = losses(model, source, target, teacher)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{float(loss):.2f}")
            if time.perf_counter() - saved > SAVED_EVERY or step == steps:
                saved = time.perf_counter()
                spent = seconds + saved - began
                state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                torch.save(state | {"step": step, "seconds": spent}, kept.with_suffix(".tmp"))
                kept.with_suffix(".tmp").replace(kept)
            if step == steps:
                break
        epoch += 1
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(out).save_pretrained(folder)


@torch.inference_mode()
def evaluate(part: str, pairs: Pairs, references: list[str], tokenizer: Any, out: Path) -> dict[str, float]:
    """Perplexity of the reference translations, and BLEU of greedy ones."""
    model: Any = T5ForConditionalGeneration.from_pretrained(out / part, dtype=torch.float32).eval()
    nats = tokens = 0.0
    guesses = []
    for source, target in pairs:
        x, y = torch.tensor([source]), torch.tensor([target])
        nats += float(losses(model, x, y, None)) * len(target)
        tokens += len(target)
        text = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=LONGEST, do_sample=False)[0]
        guesses.append(tokenizer.decode(text, skip_special_tokens=True))
    sizes = {"parameters": model.num_parameters(), "bytes": (out / part / "model.safetensors").stat().st_size}
    return {"perplexity": math.exp(nats / tokens), "bleu": bleu(guesses, references), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000, help="of each model")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="the last lines, which nobody trains on")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    source, target = ((given.data / f"{side}-train.txt").read_text("utf-8").split("\n") for side in ("src", "tgt"))
    lines = [(a, b) for a, b in zip(source, target, strict=True) if a.strip() and b.strip()]
    tokenizer = train_tokenizer([text for pair in lines[: -given.held_out] for text in pair], given.out)
    encoded = [[tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] for text in pair] for pair in lines]
    pairs: Pairs = [(a, b) for a, b in encoded]
    shown, held_out = pairs[: -given.held_out], pairs[-given.held_out :]
    teacher = None
    for part in SHAPES:
        train(part, shown, len(tokenizer), given.steps, given.out, teacher)
        if part == "target":
            teacher = T5ForConditionalGeneration.from_pretrained(given.out / part, dtype=torch.float32).eval()
    references = [b for _, b in lines[-given.held_out :]]
    found = {part: evaluate(part, held_out, references, tokenizer, given.out) for part in SHAPES}
    (given.out / "metrics.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
