"""Trains an unconditional language model of bytes, and its drafter, on Python's standard library.

    python experiments/train_bytes/train.py --out FOLDER

The tokens are the 256 bytes and an end of text, which is also where a text begins. The target is trained on windows of
the library's modules, the drafter on the target's soft targets of other windows; perplexity of both, and alpha by
teacher forcing, on the modules that are held out. Needs `pip install -e '.[train]'`.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import SEED, arguments, loss, seconds, train

from specbench.data.stdlib import read_modules

END = "<|endoftext|>"
CONTEXT, WINDOW, ROWS = 512, 256, 8  # positions of the models; tokens of a row, rows of a batch
SHAPES = {  # 0.27 M and 0.02 M parameters
    "target": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=5, num_attention_heads=4),
    "drafter": dict(hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2),
}
RATES = {"target": 4e-3, "drafter": 8e-3}
STEPS = {"target": 1500, "drafter": 800}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 is the end of a text, with which texts begin, too; byte b is token b + 1."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that ByteLevel writes as the same character
    others = [byte for byte in range(256) if byte not in own]  # it writes these as characters from 256 on
    written = {byte: chr(byte) for byte in own} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab={END: 0} | {written[byte]: byte + 1 for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=END, eos_token=END, model_max_length=CONTEXT)


def stream(*, held_out: bool) -> Tensor:
    """The tokens of all modules, each with the end of text before it: [n]."""
    modules = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
               for text in read_modules(held_out=held_out).values()]  # fmt: skip
    return torch.cat([F.pad(module.short() + 1, (1, 0)) for module in modules])


def windows(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless rows [ROWS, WINDOW + 1] from anywhere in the tokens; every second one begins where a module does."""
    generator = torch.Generator().manual_seed(seed)
    begins = (tokens[: -WINDOW - 1] == 0).nonzero().flatten()
    while True:
        anywhere = torch.randint(len(tokens) - WINDOW - 1, (ROWS,), generator=generator)
        first = begins[torch.randint(len(begins), (ROWS,), generator=generator)]
        chosen = torch.where(torch.arange(ROWS) % 2 == 0, anywhere, first)
        yield tokens[chosen[:, None] + torch.arange(WINDOW + 1)].long()


def logits(model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, V] of the tokens [n] after the first of each row."""
    return model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()


def stage(part: str, tokens: Tensor, tokenizer: Any, out: Path, teacher: Any = None) -> Any:
    """A trained part in 32 bits, trained and saved in 16 bits unless that is done."""
    if not (out / part / "config.json").exists():
        torch.manual_seed(SEED)
        config = LlamaConfig(**SHAPES[part], vocab_size=len(tokenizer), max_position_embeddings=CONTEXT,
                             tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)  # fmt: skip
        model = LlamaForCausalLM(config)
        kept = out / f"{part}.checkpoint"
        train({part: model}, RATES, STEPS[part], windows(tokens, SEED + len(part)), logits, kept, teacher)
        tokenizer.save_pretrained(out / part)
        model.to(torch.bfloat16).save_pretrained(out / part)
    return LlamaForCausalLM.from_pretrained(out / part, dtype=torch.float32).eval()


@torch.inference_mode()
def evaluate(target: Any, drafter: Any, tokens: Tensor) -> dict[str, Any]:
    """Perplexity of a byte for both, and the mean of sum min(p, q), on rows of held-out tokens."""
    rows = tokens[: len(tokens) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)[:800].long()
    sums = torch.zeros(4, dtype=torch.double)
    for batch in rows.split(ROWS):
        (p, _), (q, _) = (logits(model, batch) for model in (target, drafter))
        agree = (p.argmax(-1) == q.argmax(-1)).double().mean()
        overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean()
        sums += torch.stack([loss(target, batch, logits), loss(drafter, batch, logits), overlap, agree]) * len(batch)
    nll_p, nll_q, overlap, agree = (sums / len(rows)).tolist()
    return {"held_out_bytes": rows[:, 1:].numel(),
            "perplexity": {"target": math.exp(nll_p), "drafter": math.exp(nll_q)},
            "parameters": {"target": target.num_parameters(), "drafter": drafter.num_parameters()},
            "alpha_on_held_out_text": {"temperature_1": overlap, "temperature_0": agree}}  # fmt: skip


def main() -> None:
    out = arguments(__doc__).parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokens = stream(held_out=False)
    target = stage("target", tokens, tokenizer, out)
    drafter = stage("drafter", tokens, tokenizer, out, target)
    found = evaluate(target, drafter, stream(held_out=True))
    found["training_seconds"] = {part: seconds(out / f"{part}.checkpoint") for part in SHAPES}
    (out / "metrics.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
