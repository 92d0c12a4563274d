"""Trains a student on text and measures its acceptance on held-out text; the loop is transformers' own Trainer."""

import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from rich.progress import track
from torch import Tensor

from specbench.data.files import read_text
from specbench.data.stdlib import read_modules
from specbench.errors import ConfigError, first_line, installing
from specbench.executors.machine import pick_device, pick_dtype
from specbench.models.load import PretrainedModel, load_config, load_module, load_tokenizer
from specbench.models.sizes import context_of
from specbench.settings import LARGEST_SEED, BaseSettings, chosen, validate
from specbench.train.student import Student

HELD_OUT_ROWS = 64
HELD_OUT_SHARE = 0.1  # of a text file


class Training(BaseSettings):
    """The scalars of conf/train.yaml."""

    loss: Literal["kl", "tv"]
    text: str | None
    tokens: int = Field(ge=1, le=10**11)
    row: int = Field(ge=8, le=10**6)
    batch_size: int = Field(ge=1, le=10**5)
    accumulate: int = Field(ge=1, le=10**5)
    epochs: float = Field(ge=1e-6, le=1000)
    warmup: int = Field(ge=0, le=10**9)
    precision: Literal["float32", "bfloat16"]
    seed: int = Field(ge=0, le=LARGEST_SEED)
    device: str


def train(config: DictConfig, out_dir: Path) -> dict[str, Any]:
    """Trains, measures on held-out text, writes a checkpoint and metrics.json; returns these. Raises ConfigError."""
    scalars, target_settings, kind, settings = checked_settings(config)
    tokenizer = load_tokenizer(target_settings, "target")
    student = loaded_student(scalars, target_settings, kind, settings)
    rows, held_out = training_rows(scalars.text, tokenizer, scalars.row, scalars.tokens, scalars.seed)
    started = time.perf_counter()
    state = fit(student, rows, scalars, settings.learning_rate, out_dir)
    seconds = time.perf_counter() - started
    shares, positions = measure(student, held_out, scalars.precision == "bfloat16")
    metrics = {
        "method": kind.__name__,
        "use": kind.use(settings, out_dir),
        "loss": scalars.loss,
        "alpha_by_guess": [guess[0] for guess in shares],
        "agreement_by_guess": [guess[1] for guess in shares],
        "held_out_positions": positions,
        "training": {
            "tokens": rows.numel(),
            "seconds": seconds,
            "epochs": state.epoch or 0.0,
            "losses": [entry["loss"] for entry in state.log_history if "loss" in entry],
        },
        "config": OmegaConf.to_container(config, resolve=True),
    }
    student.save(out_dir, [guess[1:] for guess in shares])
    for folder in student.models_in(out_dir):
        tokenizer.save_pretrained(folder)
    (out_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return metrics


def checked_settings(config: DictConfig) -> tuple[Training, Any, Any, Any]:
    """The scalars, the target's settings, the method's class and settings. Raises ConfigError before anything loads."""
    scalar_keys = [str(key) for key in config if key not in ("target", "method", "hydra")]
    masked = OmegaConf.masked_copy(config, scalar_keys)
    masked._set_parent(config)
    scalars = validate(Training, masked)
    target = chosen(config.get("target"), "target", PretrainedModel).settings
    method = chosen(config.get("method"), "method", Student)
    kind, settings = method.kind, method.settings
    if scalars.row <= settings.ahead:
        raise ConfigError(f"row={scalars.row} is not possible with {settings.ahead} guesses ahead: it must be more")
    config_of_target = load_config(target, "target")
    if config_of_target.is_encoder_decoder:
        raise ConfigError(
            f"target.path={target.path} cannot be trained for: it is an encoder-decoder, and python -m specbench.train "
            "needs a target without an encoder; experiments/train_ende trains a drafter of one"
        )
    if scalars.row > (longest := context_of(config_of_target.get_text_config(), "decoder")):
        raise ConfigError(f"row={scalars.row} is not possible: the context of {target.path} is {longest} tokens")
    if settings.own_model is not None:
        settings.own_model.check("method.")
    return scalars, target, kind, settings


def loaded_student(scalars: Training, target_settings: Any, kind: type[Student], settings: Any) -> Student:
    """The student with its target and its own model, on the device. Raises ConfigError."""
    device = pick_device(scalars.device)
    target = load_module(target_settings, "target", device, pick_dtype(scalars.precision, device), scalars.seed)
    model = None
    if settings.own_model is not None:
        model = load_module(settings.own_model, "method", device, torch.float32, scalars.seed)
    transformers.set_seed(scalars.seed)
    return kind(target, scalars.loss, settings, model).to(device)


def training_rows(path: str | None, tokenizer: Any, row: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows [n, row] of training text and of held-out text: nine tenths of a file and its last tenth or, without a
    path, the modules of the standard library that the shipped pair was trained on and those that were held out."""
    if path is None:
        training = list(read_modules(held_out=False).values())
        held_out = list(read_modules(held_out=True).values())
    else:
        text = read_text(path, "text")
        cut = round(len(text) * (1 - HELD_OUT_SHARE))
        training, held_out = [text[:cut]], [text[cut:]]
    return text_rows(training, tokenizer, row, tokens, seed), text_rows(held_out, tokenizer, row, HELD_OUT_ROWS * row)


def text_rows(texts: list[str], tokenizer: Any, row: int, tokens: int, seed: int | None = None) -> Tensor:
    """All texts one after another, each with the end-of-text token, cut into rows [n, row]; at most `tokens` tokens in
    all, from random places if there is a seed. Raises ConfigError if the text is shorter than one row."""
    end = tokenizer.eos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for text in ids for token in (*text, end) if token is not None])
    if len(stream) < row:
        raise ConfigError(f"row={row} is not possible: a text has only {len(stream)} tokens")
    rows = stream[: len(stream) // row * row].view(-1, row)
    if seed is not None:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    return rows[: max(1, tokens // row)]


def fit(student: Student, rows: Tensor, scalars: Training, learning_rate: float, out_dir: Path) -> Any:
    """Runs the Trainer on rows [n, T]; returns its state. Raises ConfigError."""
    try:
        arguments = transformers.TrainingArguments(
            output_dir=str(out_dir),
            num_train_epochs=scalars.epochs,
            per_device_train_batch_size=scalars.batch_size,
            gradient_accumulation_steps=scalars.accumulate,
            learning_rate=learning_rate,
            warmup_steps=scalars.warmup,
            lr_scheduler_type="cosine",
            bf16=scalars.precision == "bfloat16",
            seed=scalars.seed,
            logging_steps=25,
            report_to="none",
            save_strategy="no",
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            use_cpu=next(student.parameters()).device.type == "cpu",
        )
    except ImportError as error:
        raise ConfigError(f"training needs accelerate ({first_line(error)}): {installing('train')}") from error
    arguments._n_gpu = min(1, arguments.n_gpu)  # else the Trainer copies the student to every device that it sees
    examples: Any = [{"input_ids": row} for row in rows]
    trainer = transformers.Trainer(student, arguments, train_dataset=examples)
    trainer.train()
    return trainer.state


def measure(student: Student, rows: Tensor, autocast: bool) -> tuple[list[list[float]], int]:
    """For each guess alpha on rows [n, T], how often its best, second, .. token was argmax; how many positions."""
    device = student.target.device
    student.eval()
    with torch.autocast(device.type, torch.bfloat16, autocast):
        sums = torch.stack([student.evaluate(part.to(device)) for part in track(rows.split(2), "held out")]).sum(0)
    return (sums[:, :-1] / sums[:, -1:]).tolist(), int(sums[0, -1])
