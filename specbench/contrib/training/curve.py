"""Measures a student on held-out rows as it learns: alpha and agreement of each guess, one line a measurement."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import TrainerCallback

from specbench.contrib.training.rows import TrainingRows
from specbench.errors import visible
from specbench.results.atomic_files import write_text


def checkpoints(folder: Path) -> list[Path]:
    """The folders that the Trainer names checkpoint-STEP."""
    return [path for path in folder.glob("checkpoint-*") if path.name.split("-", 1)[1].isdecimal()]


class AtCheckpoints(TrainerCallback):
    """Each checkpoint, and so the end, has the mean loss up to it: a training that goes on tells the same losses. It
    replaces the one before. (`save_total_limit` may remove any folder named checkpoint-*.)"""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See TrainerCallback."""
        control.should_log |= control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See TrainerCallback."""
        for path in checkpoints(Path(args.output_dir)) if state.is_world_process_zero else ():
            if int(path.name.split("-")[1]) < state.global_step:
                rmtree(path)


class Curve(TrainerCallback):
    """Before each checkpoint but the last it measures, prints, and writes curve.csv."""

    tokens_of_step = 0.0

    def __init__(self, student: Any, rows: TrainingRows, folder: Path, autocast: bool):
        self.student, self.rows, self.path, self.autocast = student, rows, folder / "curve.csv", autocast

    def held_out_tokens(self) -> list[Tensor]:
        """The held-out rows, in batches of two, on the student's device."""
        return [tokens.to(self.student.target.device) for tokens in self.rows.tokens.split(2)]

    def measure(self) -> tuple[list[list[float]], int]:
        """For each guess alpha, then how often its best, second best, ... token was the target's argmax; and the number
        of places at which the first guess was measured."""
        batches = list(zip(self.held_out_tokens(), self.rows.spans.split(2), strict=True))
        trains, device = self.student.training, self.student.target.device
        self.student.eval()
        with torch.autocast(device.type, torch.bfloat16, self.autocast):
            sums = sum(self.student.evaluate(tokens, spans.to(device)) for tokens, spans in track(batches, "held out"))
        self.student.train(trains)
        return (sums[:, :-1] / sums[:, -1:].clamp(min=1)).tolist(), int(sums[0, -1])

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """See TrainerCallback."""
        if control.should_save and state.global_step < state.max_steps:
            self.add(state, self.measure()[0])

    def add(self, state: Any, shares: list[list[float]]) -> None:
        """Adds a measurement to the Trainer's state, which checkpoints hold, and writes those that are there."""
        found: dict[str, Any] = {"step": state.global_step, "tokens": round(state.global_step * self.tokens_of_step)}
        for name, place in (("agreement", 1), ("alpha", 0)):
            found |= {f"{name}_{k}": round(guess[place], 4) for k, guess in enumerate(shares, 1)}
        state.log_history.append(found)
        measured = (entry for entry in state.log_history if entry.keys() == found.keys())
        lines = [[*found], *([entry[name] for name in found] for entry in measured)]
        write_text(self.path, "".join(",".join(map(str, line)) + "\n" for line in lines))
        print(visible(" ".join(f"{name} {value:,}" for name, value in found.items())))
