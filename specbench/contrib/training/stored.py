"""What the frozen target computes for the rows of a training, stored once for all epochs in a file that is mapped into
memory.

B rows, T tokens, A layers that are read, H the target's hidden size, V' vocabulary of the drafter, S bytes of a token.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from specbench.contrib.training.rows import TrainingRows
from specbench.errors import ConfigError

ROUNDING = 0.02  # of the largest logit: what 16 bits may change, and what a target that changes its logits exceeds


class Seen(NamedTuple):
    """What a drafter is trained on: the target's hidden states [B, T, A * H] in front of some layers, logits of p among
    the V' tokens [B, T, V'], their share of p [B, T], the likeliest token [B, T], and the last hidden states [B, T, H],
    which the output matrix reads."""

    features: Tensor
    law: Tensor
    share: Tensor
    best: Tensor
    last: Tensor


class StoredRows(Dataset[dict[str, Tensor]]):
    """The rows of a training, with S bytes of each token up to the last place that counts."""

    def __init__(self, path: Path, rows: TrainingRows, size: int):
        self.rows, self.path, self.ends = rows, path, row_ends(rows)
        total = int(self.ends[-1])
        self.content = torch.from_file(str(path), shared=False, size=total * size, dtype=torch.uint8).view(total, size)

    def __len__(self) -> int:
        return len(self.rows.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens, spans = self.rows.tokens[row], self.rows.spans[row]
        end = int(self.ends[row])
        own = self.content[end - int(spans[1]) - 1 : end]
        stored = F.pad(own, (0, 0, 0, len(tokens) - len(own)))  # what stands behind is read by nobody
        return {"input_ids": tokens, "spans": spans, "stored": stored}


def row_ends(rows: TrainingRows) -> Tensor:
    """Behind which token of the file each row ends."""
    return (rows.spans[:, 1] + 1).cumsum(0)


def store(student: Any, rows: TrainingRows, folder: Path, target: Any, together: int) -> StoredRows:
    """Has the target read so many rows at a time, and stores in the folder what `student` needs of it. What an
    interrupted call of the same rows, and of the same `target` (any JSON that names it), has stored stays. Raises
    ConfigError if it cannot be stored."""
    known = repr((target, list(student.read_layers), student.targets.tolist())).encode()
    arrays = [tensor.numpy().tobytes() for tensor in (rows.tokens, rows.spans)]
    path = folder / f"features-{hashlib.sha256(b''.join([known, *arrays])).hexdigest()[:16]}.bin"
    forget(folder, path)
    ends, size = row_ends(rows), pack_features(student, rows.tokens[:1, :2]).shape[-1]
    there = path.stat().st_size // size if path.exists() else 0
    done = int((ends <= there).sum()) if there < ends[-1] else len(ends)
    done -= done % together if done < len(ends) else 0  # so that an interruption changes no batch
    kept = int(ends[done - 1]) * size if done else 0
    free, needed = shutil.disk_usage(folder).free, int(ends[-1]) * size - kept
    if needed > free:
        raise ConfigError(f"features=disk is not possible: it takes {needed / 1e9:.3g} GB in {folder}, where "
                          f"{free / 1e9:.3g} GB are free")  # fmt: skip
    with path.open("ab") as file:
        file.truncate(kept)
        steps = range(done, len(ends), together)
        for first in track(steps, f"the target's hidden states ({needed / 1e9:.1f} GB)", disable=not steps):
            lengths = (rows.spans[first : first + together, 1] + 1).tolist()
            content = pack_features(student, rows.tokens[first : first + together, : max(lengths)], check=first == 0)
            for own, length in zip(content.cpu(), lengths, strict=True):
                file.write(own[:length].numpy().tobytes())
    return StoredRows(path, rows, size)


def forget(folder: Path, but: Path | None = None) -> None:
    """Removes what was stored in a folder, except one file."""
    for path in folder.glob("features-*.bin"):
        if path != but:
            path.unlink()


def pack_features(student: Any, tokens: Tensor, check: bool = False) -> Tensor:
    """What is stored of tokens [B, T]: bytes [B, T, S], of features and last hidden states in 16 bits, the share in 32,
    and the likeliest token. Raises ConfigError if `unpack` cannot give p again."""
    seen, dtype = student.read(tokens.to(student.target.device)), _dtype(student)
    states = torch.cat([seen.features, seen.last], -1).to(dtype)
    if not states.isfinite().all():
        raise ConfigError("features=disk is not possible: a hidden state is too large for 16 bits, choose "
                          "precision=bfloat16")  # fmt: skip
    parts = (states, seen.share.float()[..., None], seen.best.int()[..., None])
    found = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    if check and (unpack(student, found).law - seen.law).abs().max() > ROUNDING * seen.law.abs().max():
        raise ConfigError("features=disk is not possible: the target's logits are not its output matrix times its last "
                          "hidden states")  # fmt: skip
    return found


def unpack(student: Any, stored: Tensor) -> Seen:
    """What bytes [B, T, S] of `pack_features` stand for."""
    model, rows = student.target, student.head_rows()
    states = stored[..., :-8].contiguous().view(_dtype(student)).to(model.dtype)
    features, last = states[..., : -rows.shape[1]], states[..., -rows.shape[1] :]
    share = stored[..., -8:-4].contiguous().view(torch.float32)[..., 0]
    best = stored[..., -4:].contiguous().view(torch.int32)[..., 0].long()
    return Seen(features, F.linear(last, rows.to(last)), share, best, last)


def _dtype(student: Any) -> torch.dtype:
    return torch.bfloat16 if student.target.dtype == torch.bfloat16 else torch.float16
