"""A training of several models side by side on the same batches, which goes on after an interruption.

`train_ende`, `train_docstrings` and `train_bytes` share it. Everything that the next step depends on is in the
checkpoint, so an interrupted training ends with the weights that an uninterrupted one has.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

SEED = 0
SAVED_EVERY = 30.0  # seconds
WARM_UP = 0.05  # of all steps
Logits = Callable[[Any, Any], tuple[Tensor, Tensor]]  # of (model, batch): logits [n, V] and the tokens [n] they predict


def train(models: Mapping[str, Any], rates: Mapping[str, float], steps: int, data: Iterator[Any], logits: Logits,
          kept: Path, teacher: Any = None) -> None:  # fmt: skip
    """Trains models, each at its rate of learning, on tokens or, with a teacher, on its law, for so many batches of
    `data`, whose order is the same in each call; the caller has set the seed. Goes on from the checkpoint `kept`,
    if there is one."""
    trained: Any = torch.nn.ModuleDict(models)
    groups = [{"params": list(trained[name].parameters()), "name": name} for name in models]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    step, seconds = 0, 0.0
    if kept.exists():
        state = torch.load(kept)
        trained.load_state_dict(state["models"])
        optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["random"])
        step, seconds = state["step"], state["seconds"]
    began = saved = time.perf_counter()
    bar = tqdm(total=steps, initial=step, desc=" ".join(models), mininterval=10)
    for _ in range(step):  # batches of before the interruption
        next(data)
    trained.train()
    while step < steps:
        bar.set_postfix(one_step(trained, rates, optimiser, next(data), step / steps, logits, teacher), refresh=False)
        step += 1
        bar.update()
        if time.perf_counter() - saved > SAVED_EVERY or step == steps:
            saved = time.perf_counter()
            state = {"models": trained.state_dict(), "optimiser": optimiser.state_dict(), "step": step}
            state |= {"random": torch.get_rng_state(), "seconds": seconds + saved - began}
            torch.save(state, kept.with_suffix(".tmp"))
            kept.with_suffix(".tmp").replace(kept)
    bar.close()
    trained.eval()


def one_step(trained: Any, rates: Mapping[str, float], optimiser: Any, batch: Any, done: float, logits: Logits,
             teacher: Any) -> dict[str, str]:  # fmt: skip
    """One step of every model; `done` is the share of all steps that came before. Returns the losses in words."""
    p, shown = None, {}
    if teacher is not None:
        with torch.no_grad():
            p = logits(teacher, batch)[0].softmax(-1)
    for group in optimiser.param_groups:
        model = trained[group["name"]]
        warm = min(1.0, (done + 1e-3) / WARM_UP)
        group["lr"] = rates[group["name"]] * warm * 0.5 * (1 + math.cos(math.pi * done))
        found = loss(model, batch, logits, p)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        shown[group["name"]] = f"{found.item():.2f}"
    optimiser.step()
    optimiser.zero_grad()
    return shown


def loss(model: Any, batch: Any, logits: Logits, p: Tensor | None = None) -> Tensor:
    """The mean loss of a token: cross entropy of the text or, where a teacher's p [n, V] is given, of p."""
    found, tokens = logits(model, batch)
    return F.cross_entropy(found, tokens) if p is None else -(p * found.log_softmax(-1)).sum(-1).mean()


def seconds(kept: Path) -> float:
    """How long the training of a checkpoint took, all its parts together."""
    return float(torch.load(kept)["seconds"])


def arguments(about: str | None) -> argparse.ArgumentParser:
    """The parser of a folder's command, with where the models go."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for checkpoints and models")
    return parser
