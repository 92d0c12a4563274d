"""Measures a student on held-out rows as it learns: alpha and agreement of each guess, one line a measurement."""

import csv
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import TrainerCallback

from specbench.contrib.training.rows import Rows
from specbench.errors import visible
from specbench.results.atomic_files import write_text


class Curve(TrainerCallback):
    """Before each checkpoint but the last it measures, prints, and adds a line to curve.csv."""

    tokens_of_step = 0.0

    def __init__(self, student: Any, rows: Rows, folder: Path, autocast: bool):
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
            self.add(state.global_step, self.measure()[0])

    def add(self, step: int, shares: list[list[float]]) -> None:
        """Writes a measurement behind this step; those of later steps were of a training that was interrupted."""
        columns: dict[str, Any] = {"step": step, "tokens": round(step * self.tokens_of_step)}
        for name, place in (("alpha", 0), ("agreement", 1)):
            columns |= {f"{name}_{k}": f"{guess[place]:.4f}" for k, guess in enumerate(shares, 1)}
        head, *lines = csv.reader(self.path.read_text().splitlines()) if self.path.exists() else [[*columns]]
        lines = [line for line in lines if int(line[0]) < step] if head == [*columns] else []
        lines.append([str(value) for value in columns.values()])
        write_text(self.path, "".join(",".join(line) + "\n" for line in ([*columns], *lines)))
        found = "  ".join(f"{name} {' '.join(f'{guess[place]:.3f}' for guess in shares)}"
                          for name, place in (("agreement by guess", 1), ("alpha", 0)))  # fmt: skip
        print(visible(f"{columns['tokens']:,} tokens: {found}"))
