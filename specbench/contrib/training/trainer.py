"""Trains a student on text and measures its acceptance; the loop is transformers' own Trainer."""

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from rich.progress import track
from torch import Tensor

from specbench.component import chosen_class
from specbench.config.devices import pick_device
from specbench.contrib.training.losses import LOSSES
from specbench.contrib.training.student import Student, StudentSettings
from specbench.data.stdlib_corpus import read_modules
from specbench.data.text_file import read_text
from specbench.errors import ConfigError
from specbench.models.pretrained import PretrainedModel, load_config, load_module, load_tokenizer
from specbench.results.provenance import provenance
from specbench.settings import LARGEST_SEED, BaseSettings, setting, validate

log = logging.getLogger(__name__)
HELD_OUT_ROWS = 64


@dataclass
class Training(BaseSettings):
    """The scalars of conf/train.yaml."""

    loss: str = setting(choices=LOSSES)
    text: str | None = setting()
    tokens: int = setting(ge=1, le=10**11)
    row: int = setting(ge=8, le=10**6)
    batch_size: int = setting(ge=1, le=10**5)
    epochs: float = setting(ge=1e-6, le=1000)
    seed: int = setting(ge=0, le=LARGEST_SEED)
    device: str = setting()


def train(config: DictConfig, out_dir: Path) -> dict[str, Any]:
    """Trains, measures on held-out text, and writes the checkpoint and metrics.json to `out_dir`; returns the metrics.
    Raises ConfigError."""
    scalars, target_settings, kind, settings = checked_settings(config)
    device = pick_device(scalars.device)
    transformers.set_seed(scalars.seed)
    texts, held_out = _texts(scalars)
    tokenizer = load_tokenizer(target_settings, "target")
    rows = text_rows(texts, tokenizer, scalars.row, scalars.tokens, scalars.seed)
    held_out_rows = text_rows(held_out, tokenizer, scalars.row, HELD_OUT_ROWS * scalars.row)
    target = load_module(target_settings, "target", device, torch.float32, scalars.seed)
    model = None
    if settings.own_model is not None:
        model = load_module(own_settings(settings), "method", device, torch.float32, scalars.seed)
    student = kind(target, scalars.loss, settings, model).to(device)
    started = time.perf_counter()
    training = _fit(student, rows, scalars, settings.learning_rate, out_dir)
    training["seconds"] = time.perf_counter() - started
    unseen = [row.to(device) for row in held_out_rows.split(2)]
    sums = sum(student.eval().evaluate(row) for row in track(unseen, "held out"))
    shares = (sums[:, :-1] / sums[:, -1:]).tolist()
    student.save(out_dir, [guess[1:] for guess in shares])
    for folder in student.complete(out_dir):
        tokenizer.save_pretrained(folder)
    metrics = {
        "method": kind.__name__,
        "use": kind.use(settings, out_dir),
        "loss": scalars.loss,
        "alpha_by_guess": [guess[0] for guess in shares],
        "agreement_by_guess": [guess[1] for guess in shares],
        "held_out_positions": int(sums[0, -1]),
        "further": student.further(unseen),
        "training": training,
        "config": OmegaConf.to_container(config, resolve=True),
        "provenance": {k: v for k, v in provenance(device).items() if k != "argv"},
    }
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def checked_settings(config: DictConfig) -> tuple[Training, Any, Any, Any]:
    """The scalars, the target's settings, and the class and the settings of the method. Raises ConfigError for what can
    be known before anything loads."""
    masked = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("target", "method", "hydra")])
    masked._set_parent(config)
    scalars = validate(Training, masked)
    _, target = chosen_class(config.get("target"), "target", PretrainedModel, "target=NAME")
    kind, settings = chosen_class(config.get("method"), "method", Student, "method=NAME")
    if scalars.row <= settings.ahead:
        raise ConfigError(f"row={scalars.row} is not possible with {settings.ahead} guesses ahead: it must be more")
    config_of_target = load_config(target, "target")
    if config_of_target.is_encoder_decoder:
        raise ConfigError(
            f"target.path={target.path} cannot be trained for: it is an encoder-decoder, and python -m specbench.train "
            "needs a target without an encoder; experiments/train_ende trains a drafter of one"
        )
    shape = config_of_target.get_text_config()
    longest = getattr(shape, "max_position_embeddings", None)
    if longest is not None and scalars.row > longest:
        raise ConfigError(f"row={scalars.row} is not possible: the context of {target.path} is {longest} tokens")
    if settings.own_model is not None:
        own_settings(settings).check("method.")
    return scalars, target, kind, settings


def own_settings(settings: StudentSettings) -> PretrainedModel.Settings:
    """Settings of the checkpoint of the student's own model."""
    return PretrainedModel.Settings(path=str(settings.own_model), weights="pretrained", chat_template="never")


def _texts(scalars: Training) -> tuple[list[str], list[str]]:
    """Training and held-out texts: those of the shipped pair, or nine tenths and the last tenth of a file."""
    if scalars.text is None:
        return list(read_modules(held_out=False).values()), list(read_modules(held_out=True).values())
    text = read_text(scalars.text, "text")
    cut = len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


def text_rows(texts: list[str], tokenizer: Any, row: int, tokens: int, seed: int | None = None) -> Tensor:
    """All texts one after another, cut into rows `[n, row]`; at most `tokens` tokens in all, from random places if
    there is a seed. Raises ConfigError if the text is shorter than one row."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream = torch.tensor([token for text in ids for token in (*text, *end)])
    if len(stream) < row:
        raise ConfigError(f"row={row} is not possible: a text has only {len(stream)} tokens")
    rows = stream[: len(stream) // row * row].view(-1, row)
    if seed is not None:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return rows[: max(1, tokens // row)]


def _fit(student: Student, rows: Tensor, scalars: Training, learning_rate: float, out_dir: Path) -> dict[str, Any]:
    """Runs the Trainer on rows `[n, row]`, and returns what was done. An interrupted training keeps what it has
    learned."""
    try:
        arguments = transformers.TrainingArguments(
            output_dir=str(out_dir), num_train_epochs=scalars.epochs, seed=scalars.seed,
            per_device_train_batch_size=scalars.batch_size, learning_rate=learning_rate, warmup_steps=20,
            lr_scheduler_type="cosine", max_grad_norm=1.0, logging_steps=25, save_strategy="no", report_to="none",
            remove_unused_columns=False, dataloader_pin_memory=False,
            use_cpu=next(student.parameters()).device.type == "cpu",
        )  # fmt: skip
    except ImportError as error:
        raise ConfigError("training needs accelerate: pip install -e '.[train]'") from error
    steps = math.ceil(math.ceil(len(rows) / scalars.batch_size) * scalars.epochs)
    trainer = transformers.Trainer(
        student, arguments, train_dataset=[{"input_ids": row} for row in rows],
        optimizers=student.optimisers(learning_rate, steps),
    )  # fmt: skip
    status = "complete"
    try:
        trainer.train()
    except KeyboardInterrupt:
        status = "interrupted"
        log.warning("interrupted after %d of %d steps: measuring and writing what is there",
                    trainer.state.global_step, trainer.state.max_steps)  # fmt: skip
    return {
        "status": status,
        "tokens": rows.numel(),
        "epochs": trainer.state.epoch or 0.0,  # of these tokens
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
