"""Trains a student on text and measures its acceptance; the loop is transformers' own Trainer."""

import json
import logging
import math
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from specbench.component import chosen_class
from specbench.config.devices import pick_device
from specbench.contrib.training.curve import AtCheckpoints, Curve, checkpoints
from specbench.contrib.training.losses import LOSSES
from specbench.contrib.training.rows import TrainingRows, first_process_first, parts, read_prompts
from specbench.contrib.training.stored import forget, store
from specbench.contrib.training.student import Student, StudentSettings
from specbench.data.json_lines import need_file
from specbench.data.sources import of_python
from specbench.errors import ConfigError, first_line, installing
from specbench.models.pretrained import PretrainedModel, load_config, load_module, load_tokenizer
from specbench.results.atomic_files import write_json
from specbench.results.folder_lock import locked
from specbench.results.provenance import provenance
from specbench.settings import LARGEST_SEED, TEMPERATURE, BaseSettings, file_hash, setting, validate

log = logging.getLogger(__name__)
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OF_TARGET = ("target", "version of target.path", "precision", "seed")
MAY_CHANGE = ("resume", "every", "device", "hydra")  # between a training and its continuation


@dataclass
class Training(BaseSettings):
    """The scalars of conf/train.yaml."""

    loss: str = setting(choices=LOSSES)
    text: str | None = setting()
    prompts: str | None = setting()
    max_new_tokens: int = setting(ge=1, le=10**6)
    temperature: float = setting(**TEMPERATURE)
    tokens: int = setting(ge=1, le=10**11)
    row: int = setting(ge=8, le=10**6)
    batch_size: int = setting(ge=1, le=10**5)
    accumulate: int = setting(ge=1, le=10**5)
    epochs: float = setting(ge=1e-6, le=1000)
    features: str = setting(choices=("live", "disk"))
    warmup: int = setting(ge=0, le=10**9)
    precision: str = setting(choices=tuple(PRECISIONS))
    every: int = setting(ge=1, le=10**9)
    resume: bool = setting()
    seed: int = setting(ge=0, le=LARGEST_SEED)
    device: str = setting()


def train(config: DictConfig, out_dir: Path) -> dict[str, Any]:
    """Trains, measures on held-out text, and writes the checkpoint and metrics.json to `out_dir`; returns the metrics.
    A training that was interrupted goes on from its last checkpoint there. Raises ConfigError."""
    checked = checked_settings(config)
    first = os.environ.get("RANK", "0") == "0"  # of several processes
    with locked(out_dir) if first else nullcontext():
        return _train(config, out_dir, checked, first)


def _train(config: DictConfig, out_dir: Path, checked: tuple[Training, Any, Any, Any], first: bool) -> dict[str, Any]:
    """`train`, in a folder that no other training writes into."""
    scalars, target_settings, kind, settings = checked
    told: Any = OmegaConf.to_container(config, resolve=True)
    own = {key: told[key] for key in sorted(told) if key not in MAY_CHANGE}
    own |= _versions(scalars, target_settings, settings)
    begun = _last_checkpoint(own, scalars.resume, out_dir, first)
    tokenizer = load_tokenizer(target_settings, "target")
    student, rows, held_out = _prepared(scalars, target_settings, kind, settings, tokenizer)
    curve = Curve(student, held_out, out_dir, scalars.precision == "bfloat16")
    started = time.perf_counter()
    examples = _examples(student, rows, scalars, out_dir, [own[key] for key in OF_TARGET])
    state, status = _fit(student, rows, examples, scalars, settings.learning_rate, out_dir, curve, begun)
    seconds = time.perf_counter() - started
    shares, positions = curve.measure()
    metrics = {
        "method": kind.__name__,
        "use": kind.use(settings, out_dir),
        "loss": scalars.loss,
        "alpha_by_guess": [guess[0] for guess in shares],
        "agreement_by_guess": [guess[1] for guess in shares],
        "held_out_positions": positions,
        "further": student.further(curve.held_out_tokens()),
        "training": {"status": status, "tokens": rows.tokens.numel(), "seconds": seconds} | _told(state),
        "config": told,
        "provenance": {k: v for k, v in provenance(student.target.device).items() if k != "argv"},
    }
    if first:
        student.save(out_dir, [guess[1:] for guess in shares])
        for folder in student.complete(out_dir):
            tokenizer.save_pretrained(folder)
        curve.add(state, shares)
        write_json(out_dir / "metrics.json", metrics)
        if status == "complete":
            _forget(out_dir)
            forget(out_dir)
    return metrics


def _told(state: Any) -> dict[str, Any]:
    """What the Trainer's state says of a training: how often its tokens were read, steps, and losses."""
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {"epochs": state.epoch or 0.0, "steps": state.global_step, "losses": losses}


def _prepared(
    scalars: Training, target_settings: Any, kind: Any, settings: Any, tokenizer: Any
) -> tuple[Student, TrainingRows, TrainingRows]:
    """The student on its device, and its rows and held-out rows. Raises ConfigError."""
    device = pick_device(scalars.device)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    target = load_module(target_settings, "target", device, PRECISIONS[scalars.precision], scalars.seed)
    rows, held_out = parts(scalars, tokenizer, target_settings, target)
    model = None
    if settings.own_model is not None:
        model = load_module(own_settings(settings), "method", device, torch.float32, scalars.seed)
    transformers.set_seed(scalars.seed)
    student: Student = kind(target, scalars.loss, settings, model)
    student.prepare(rows.tokens, rows.spans)
    return student.to(device), rows, held_out


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
    if scalars.features == "disk" and not kind.spans:
        raise ConfigError(f"features=disk is not possible with {kind.__name__}: only method=eagle3 and method=dflash "
                          "read stored hidden states")  # fmt: skip
    if scalars.prompts is not None:
        _check_prompts(scalars, kind)
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
    if (reason := kind.unfit(settings, shape)) is not None:
        raise ConfigError(reason)
    if settings.own_model is not None:
        own_settings(settings).check("method.")
    return scalars, target, kind, settings


def _check_prompts(scalars: Training, kind: type[Student]) -> None:
    """Raises ConfigError if prompts are given that cannot be used."""
    if scalars.text is not None:
        raise ConfigError(f"text={scalars.text} and prompts={scalars.prompts} are both set: choose one of them")
    if not kind.spans:
        raise ConfigError(f"prompts={scalars.prompts} is not possible with {kind.__name__}: only method=eagle3 and "
                          "method=dflash learn from answers, use text=FILE")  # fmt: skip
    need_file(str(scalars.prompts), "prompts")
    read_prompts(str(scalars.prompts))


def own_settings(settings: StudentSettings) -> PretrainedModel.Settings:
    """Settings of the checkpoint of the student's own model."""
    return PretrainedModel.Settings(path=str(settings.own_model), weights="pretrained", chat_template="never")


# -- Checkpoints -------------------------------------------------------------------------------------------


def _versions(scalars: Training, target: Any, settings: Any) -> dict[str, str]:
    """Versions of what a training reads besides its settings. Raises ConfigError."""
    key, path = ("text", scalars.text) if scalars.prompts is None else ("prompts", scalars.prompts)
    found = {f"version of {key}": of_python() if path is None else file_hash(path)}
    models = {"target.path": target}
    if settings.own_model is not None:
        models["method.model"] = own_settings(settings)
    for key, model in models.items():
        load_config(model, key.partition(".")[0])  # from here on the commit of a hub id is known
        found[f"version of {key}"] = model.sources()["path"]
    return found


def _last_checkpoint(own: dict[str, Any], resume: bool, out_dir: Path, first: bool) -> str | None:
    """The newest whole checkpoint of an interrupted training in the folder; without one the `first` process clears the
    folder. `own` says what makes a training the same. Raises ConfigError if the checkpoints are of another one."""
    before = _told_before(out_dir)
    if before is None and any(out_dir.glob("checkpoint-*")):
        raise ConfigError(f"{out_dir} has a checkpoint-*, but no training.json that says what it is of: "
                          "give another folder (hydra.run.dir), or remove the checkpoints")  # fmt: skip
    found = [folder for folder in checkpoints(out_dir) if _is_whole(folder)] if resume else []
    if before is None or not found:
        if first:
            _forget(out_dir)
            out_dir.mkdir(parents=True, exist_ok=True)
            write_json(out_dir / "training.json", own)
        return None
    if others := [key for key in {**own, **before} if own.get(key) != before.get(key)]:
        raise ConfigError(f"{out_dir} holds an unfinished training with another {others[0]}: give another folder "
                          "(hydra.run.dir), or begin anew with resume=false")  # fmt: skip
    return str(max(found, key=lambda folder: int(folder.name.split("-")[1])))


def _told_before(out_dir: Path) -> dict[str, Any] | None:
    """What an earlier training has written of itself into the folder; None if nothing that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((out_dir / "training.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and found.keys() >= {"method", "target"} else None
    return None


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written to its end: its state is written last."""
    with suppress(OSError, ValueError):
        return "global_step" in json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return False


def _forget(out_dir: Path) -> None:
    for folder in checkpoints(out_dir):
        rmtree(folder)


def _arguments(scalars: Training, learning_rate: float, out_dir: Path, on_cpu: bool) -> Any:
    """What the Trainer is told. Raises ConfigError."""
    try:
        arguments = transformers.TrainingArguments(
            output_dir=str(out_dir), num_train_epochs=scalars.epochs, seed=scalars.seed,
            per_device_train_batch_size=scalars.batch_size, gradient_accumulation_steps=scalars.accumulate,
            learning_rate=learning_rate, warmup_steps=scalars.warmup, lr_scheduler_type="cosine", max_grad_norm=1.0,
            bf16=scalars.precision == "bfloat16", logging_steps=25, report_to="none", save_strategy="steps",
            save_steps=scalars.every, remove_unused_columns=False, dataloader_pin_memory=False,
            ddp_find_unused_parameters=False, use_cpu=on_cpu,
        )  # fmt: skip
    except ImportError as error:
        raise ConfigError(f"training needs accelerate ({first_line(error)}): {installing('train')}") from error
    _ = arguments.device
    arguments._n_gpu = min(1, arguments.n_gpu)  # several devices are used by several processes alone
    return arguments


def _examples(student: Student, rows: TrainingRows, scalars: Training, folder: Path, target: Any) -> Any:
    """What the Trainer draws from: one element a row."""
    if scalars.features == "disk":
        with first_process_first():
            return store(student, rows, folder, target, scalars.batch_size)
    examples: list[dict[str, Tensor]] = [{"input_ids": row} for row in rows.tokens]
    if student.spans:
        examples = [{**own, "spans": span} for own, span in zip(examples, rows.spans, strict=True)]
    return examples


def _fit(
    student: Student, rows: TrainingRows, examples: Any, scalars: Training, learning_rate: float, out_dir: Path,
    curve: Curve, begun: str | None,
) -> tuple[Any, str]:  # fmt: skip
    """Runs the Trainer, from the checkpoint `begun` on; returns its state, and "complete" or "interrupted". What was
    interrupted keeps what it has learned."""
    arguments = _arguments(scalars, learning_rate, out_dir, next(student.parameters()).device.type == "cpu")
    batches = math.ceil(len(rows.tokens) / (scalars.batch_size * arguments.world_size))
    steps = math.ceil(math.ceil(batches / scalars.accumulate) * scalars.epochs)
    curve.tokens_of_step = rows.tokens.numel() / max(1, math.ceil(batches / scalars.accumulate))
    trainer = transformers.Trainer(
        student, arguments, train_dataset=examples, optimizers=student.optimisers(learning_rate, steps, scalars.warmup),
        callbacks=[AtCheckpoints(), *([curve] if arguments.process_index == 0 else [])],
    )  # fmt: skip
    status = "complete"
    try:
        trainer.train(resume_from_checkpoint=begun)
    except KeyboardInterrupt:
        status = "interrupted"
        log.warning("interrupted after %d of %d steps: measuring and writing what is there",
                    trainer.state.global_step, trainer.state.max_steps)  # fmt: skip
    return trainer.state, status
