"""Does training on total variation give a larger alpha than training on KL? On the same held-out text.

    python experiments/drafters/losses.py

Both shipped drafters began as `shipped:drafter` and saw the same million tokens in the same order
(`python -m specbench.train method=distill loss=kl|tv tokens=1000000`). Their betas are compared position by
position; the interval is a bootstrap over rows of 512 tokens.
"""

import numpy as np
import torch
from rich.progress import track

from specbench.context import Context
from specbench.data.stdlib_corpus import read_modules
from specbench.decoding.sampling import Sampling
from specbench.models.pretrained import PretrainedModel, load_module, load_tokenizer
from specbench.train.losses import overlap
from specbench.train.training import blocks

ROW, RESAMPLES = 512, 10_000


@torch.inference_mode()
def main() -> None:
    def settings(name: str) -> PretrainedModel.Settings:
        return PretrainedModel.Settings(f"shipped:{name}", weights="pretrained", chat_template="never")

    context = Context(torch.device("cpu"), torch.float32, Sampling())
    names = ("drafter", "drafter_kl", "drafter_tv")
    target, *drafters = (load_module(settings(name), context, name) for name in ("target", *names))
    tokenizer = load_tokenizer(settings("target"), "target")
    rows = blocks(list(read_modules(held_out=True).values()), tokenizer, ROW, 10**9)
    betas = np.zeros((len(drafters), len(rows)))  # mean of each row
    for i, row in enumerate(track(rows, "held out")):
        p = target(row[None]).logits
        for d, drafter in enumerate(drafters):
            betas[d, i] = overlap(p, drafter(row[None]).logits).mean()
    chosen = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    print(f"{rows.numel():,} held-out tokens")
    for name, beta in zip(names, betas, strict=True):
        low, high = np.percentile(beta[chosen].mean(1), [2.5, 97.5])
        print(f"alpha of {name}: {beta.mean():.4f} ({low:.4f} to {high:.4f})")
    for a, b in ((2, 1), (1, 0)):
        difference = betas[a] - betas[b]
        low, high = np.percentile(difference[chosen].mean(1), [2.5, 97.5])
        print(f"{names[a]} - {names[b]}: {difference.mean():+.4f} ({low:+.4f} to {high:+.4f})")


if __name__ == "__main__":
    main()
