"""Trains the pair that ships with specbench: a Llama on Python's standard library, and its drafter.

    python experiments/train_pair/train.py            # everything, about an hour on two cores

Stages, each of which starts from what the one before saved: a byte-level BPE tokenizer; the
target, trained on next-token prediction; the drafter, distilled from the target's soft targets;
perplexity and alpha on held-out modules. Needs `pip install -e '.[train]'`.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from specbench.data.stdlib import read_modules
from specbench.settings import SHIPPED

Losses = dict[str, float]  # a line of the Trainer's log
SEED = 0
CONTEXT = 512  # tokens; also the longest sequence that the models are trained on
VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
# shapes.py in this folder measures the candidates; README.md says why these two won.
TARGET_SHAPE = dict(hidden_size=640, intermediate_size=2304, num_hidden_layers=3, num_attention_heads=10)
DRAFTER_SHAPE = dict(hidden_size=160, intermediate_size=448, num_hidden_layers=1, num_attention_heads=5)


def train_tokenizer(texts: list[str], out: Path) -> None:
    """A byte-level BPE tokenizer of these texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, model_max_length=CONTEXT).save_pretrained(out)


def blocks_of(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """All texts, end-of-text after each, as rows of CONTEXT tokens: [n, CONTEXT]."""
    encoded = tokenizer(texts)["input_ids"]
    stream = torch.tensor([t for ids in encoded for t in (*ids, tokenizer.eos_token_id)])
    n = len(stream) // CONTEXT
    return stream[: n * CONTEXT].view(n, CONTEXT)


def fresh_model(shape: dict[str, int], tokenizer: PreTrainedTokenizerBase, tied: bool) -> LlamaForCausalLM:
    """An untrained Llama of this shape."""
    config = LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def start_as_bigram(model: LlamaForCausalLM, blocks: torch.Tensor, steps: int = 80) -> None:
    """Makes an untrained model a bigram model, so that training need not find that out slowly.

    The layers are silenced (their output matrices are zero) and the two embeddings are fitted to
    the corpus's bigram counts, all contexts at once. Half a minute of it replaces the first
    million tokens of training: README.md has the losses.
    """
    tokens = blocks.flatten().to(model.device)
    counts = torch.bincount(tokens[:-1] * VOCABULARY + tokens[1:], minlength=VOCABULARY**2)
    counts = counts.view(VOCABULARY, VOCABULARY).float() / (len(tokens) - 1)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        embedding.normal_(0, 1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    optimizer = torch.optim.Adam([embedding, head], lr=0.02, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in tqdm(range(steps), desc="bigram start"):
        logits = F.linear(model.model.norm(embedding), head)
        loss = (logits.logsumexp(-1) * counts.sum(1)).sum() - (logits * counts).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"bigram start: {loss.item():.3f} nats a token")


def arguments(learning_rate: float, epochs: float, batch_size: int, schedule: str) -> TrainingArguments:
    """What both trainings have in common, and these four."""
    return TrainingArguments(
        output_dir="outputs/train_pair",
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        warmup_steps=100,
        lr_scheduler_type=schedule,
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=SEED,
    )


class DistillationTrainer(Trainer):
    """Minimises KL(target || drafter) per position.

    The target's last hidden states are computed once for the whole corpus, since the drafter
    passes over it several times; only the output matrix is applied again in each batch.
    """

    def __init__(self, *args: Any, teacher_hidden: torch.Tensor, teacher_head: nn.Module, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.teacher_hidden, self.teacher_head = teacher_hidden, teacher_head

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            hidden = self.teacher_hidden[inputs["row"].cpu()].to(model.device, torch.float32)
            log_p = self.teacher_head(hidden).log_softmax(-1)
        outputs = model(input_ids=inputs["input_ids"])
        log_q = outputs.logits.float().log_softmax(-1)
        loss = F.kl_div(log_q.flatten(0, 1), log_p.flatten(0, 1), log_target=True, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


def train_target(blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, out: Path) -> list[Losses]:
    """Short rows first, since eight of 128 tokens teach more than two of 512; then whole ones."""
    set_seed(SEED)
    model = fresh_model(TARGET_SHAPE, tokenizer, tied=False)
    start_as_bigram(model, blocks)
    phases = (
        (blocks.view(-1, CONTEXT // 4), arguments(1e-3, 1.0, 8, "constant_with_warmup")),
        (blocks, arguments(1e-3, 0.3, 2, "linear")),
    )
    losses = []
    for rows, settings in phases:
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        losses += fit(Trainer(model, settings, train_dataset=dataset), tokenizer, out)
        model.float()
    return losses


def train_drafter(
    blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, target_folder: Path, out: Path, epochs: float
) -> list[Losses]:
    """Distils the drafter from the target's soft targets."""
    set_seed(SEED)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target.to(device).eval()
    with torch.no_grad():
        hidden = [
            target.model(rows.to(device)).last_hidden_state.to("cpu", torch.bfloat16)
            for rows in tqdm(blocks.split(4), desc="soft targets")
        ]
    trainer = DistillationTrainer(
        fresh_model(DRAFTER_SHAPE, tokenizer, tied=True),
        arguments(4e-3, epochs, 4, "linear"),
        train_dataset=[{"input_ids": row, "row": i} for i, row in enumerate(blocks)],
        teacher_hidden=torch.cat(hidden),
        teacher_head=target.lm_head,
    )
    return fit(trainer, tokenizer, out)


def fit(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, out: Path) -> list[Losses]:
    """Trains, saves model and tokenizer, and returns the log."""
    trainer.train()
    trainer.accelerator.unwrap_model(trainer.model).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    keep = ("step", "loss", "learning_rate", "train_runtime", "train_loss")
    return [{k: row[k] for k in keep if k in row} for row in trainer.state.log_history]


@torch.no_grad()
def evaluate(held_out: torch.Tensor, pair: Path) -> dict[str, Any]:
    """Perplexity of both on held-out modules, and alpha by teacher forcing on the same text."""
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(pair / part, dtype=torch.float32).eval() for part in ("target", "drafter")
    )
    sums = torch.zeros(4, dtype=torch.float64)
    for rows in tqdm(held_out.split(4), desc="held out"):
        log_p, log_q = (model(rows).logits[:, :-1].log_softmax(-1) for model in (target, drafter))
        nll_p, nll_q = (-m.gather(-1, rows[:, 1:, None]).sum() for m in (log_p, log_q))
        overlap = torch.minimum(log_p, log_q).exp().sum()
        agreement = (log_p.argmax(-1) == log_q.argmax(-1)).sum()
        sums += torch.stack([nll_p, nll_q, overlap, agreement]).double()
    n = held_out[:, 1:].numel()
    nll_p, nll_q, overlap, agreement = (sums / n).tolist()
    return {
        "held_out_tokens": n,
        "target_parameters": target.num_parameters(),
        "drafter_parameters": drafter.num_parameters(),
        "target_perplexity": math.exp(nll_p),
        "drafter_perplexity": math.exp(nll_q),
        "alpha_on_held_out_text": {"temperature_1": overlap, "temperature_0": agreement},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = ("tokenizer", "target", "drafter", "evaluate")
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--drafter-epochs", type=float, default=6)
    args = parser.parse_args()
    target, drafter = args.out / "target", args.out / "drafter"
    log_file = Path(__file__).with_name("losses.json")
    losses = json.loads(log_file.read_text()) if log_file.exists() else {}

    texts = list(read_modules(held_out=False).values())
    if "tokenizer" in args.stages:
        train_tokenizer(texts, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    blocks = blocks_of(texts, tokenizer)
    print(f"{blocks.numel():,} training tokens from {len(texts)} modules, {sum(map(len, texts)):,} characters")
    if "target" in args.stages:
        losses["target"] = train_target(blocks, tokenizer, target)
    if "drafter" in args.stages:
        # Every other row: the soft targets of one row say more than one-hot ones of two.
        losses["drafter"] = train_drafter(blocks[::2], tokenizer, target, drafter, args.drafter_epochs)
    log_file.write_text(json.dumps(losses, separators=(",", ":")) + "\n")
    if "evaluate" in args.stages:
        held_out = blocks_of(list(read_modules(held_out=True).values()), tokenizer)
        report = evaluate(held_out, args.out)
        (args.out / "metrics.json").write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
