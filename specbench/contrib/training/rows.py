"""Rows of tokens to train on: a text cut into pieces, or prompts with the target's own answers."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from rich.progress import track
from torch import Tensor

from specbench.data.json_lines import read_json_lines
from specbench.data.prompts import Prompt, render
from specbench.data.sources import of_tokenizer
from specbench.data.stdlib_corpus import read_modules
from specbench.data.text_file import read_text
from specbench.errors import ConfigError
from specbench.executors.machine import cache_dir
from specbench.models.pretrained import uses_template
from specbench.settings import file_hash

log = logging.getLogger(__name__)
HELD_OUT_ROWS = 64
ONE_IN = 10  # of text, or of answers, is held out
TOGETHER = 16  # answers that are decoded together


@dataclass(frozen=True)
class TrainingRows:
    """Tokens [n, T]; spans [n, 2] are the first and the last place of a row behind which p counts."""

    tokens: Tensor
    spans: Tensor

    @classmethod
    def whole(cls, tokens: Tensor) -> "TrainingRows":
        """Rows of which every place counts."""
        return cls(tokens, torch.tensor([[0, tokens.shape[1] - 1]]).repeat(len(tokens), 1))


def parts(scalars: Any, tokenizer: Any, settings: Any, target: Any) -> tuple[TrainingRows, TrainingRows]:
    """Rows of training and held-out ones; the first process decodes answers before the others read them."""
    if scalars.prompts is None:
        return text_parts(scalars.text, tokenizer, scalars.row, scalars.tokens, scalars.seed)
    with first_process_first():
        return answer_parts(scalars, tokenizer, settings, target)


def first_process_first() -> Any:
    """A context that the first process leaves before the others enter it."""
    if "RANK" not in os.environ:  # `accelerate launch` and torchrun start several processes
        return nullcontext()
    from accelerate import PartialState

    return PartialState().main_process_first()


def text_parts(path: str | None, tokenizer: Any, row: int, tokens: int, seed: int) -> tuple[TrainingRows, TrainingRows]:
    """Rows of training and held-out text: of a file nine tenths and the last tenth, else of the standard library the
    modules that the shipped pair was trained on, and the others."""
    if path is None:
        texts, held_out = (list(read_modules(held_out=held_out).values()) for held_out in (False, True))
    else:
        text = read_text(path, "text")
        cut = len(text) * (ONE_IN - 1) // ONE_IN
        texts, held_out = [text[:cut]], [text[cut:]]
    rows = text_rows(texts, tokenizer, row, tokens, seed)
    return TrainingRows.whole(rows), TrainingRows.whole(text_rows(held_out, tokenizer, row, HELD_OUT_ROWS * row))


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


# -- The target's own answers --------------------------------------------------------------------------


class PromptAndAnswer(NamedTuple):
    """A prompt, the answer to it if its file has one, and whether that answer has ended by itself."""

    prompt: str
    answer: str | None
    ended: bool


def read_prompts(path: str) -> list[PromptAndAnswer]:
    """The prompts of a file of JSON lines, with the answers if it has them. Raises ConfigError."""
    found: list[PromptAndAnswer] = []
    for number, record in read_json_lines(path, "prompts"):
        text, answer, reason = (record.get(name) for name in ("prompt", "answer", "finish_reason"))
        at = f"prompts={path} line {number}"
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f'{at} has no text: it must be an object with a "prompt"')
        if not isinstance(answer, str | None) or (found and (answer is None) != (found[0].answer is None)):
            raise ConfigError(f'{at} must have an "answer" that is a text, as every line or none')
        if reason not in (None, "stop", "length"):
            raise ConfigError(f'{at} has a "finish_reason" that is not "stop" or "length"')
        found.append(PromptAndAnswer(text, answer, reason != "length"))
    return found


def answer_parts(scalars: Any, tokenizer: Any, settings: Any, target: Any) -> tuple[TrainingRows, TrainingRows]:
    """Rows of training and held-out prompts with the target's answers, of which the answers count: every tenth one is
    held out. A row has one prompt, and is cut to `row` tokens. Raises ConfigError."""
    answers = own_answers(scalars, tokenizer, settings, target)
    fitting = [(text[: scalars.row], begin) for text, begin in answers if begin + 2 <= min(len(text), scalars.row)]
    if len(fitting) < len(answers):
        log.warning("%d of %d answers have fewer than two tokens within row=%d: they are left out",
                    len(answers) - len(fitting), len(answers), scalars.row)  # fmt: skip
    if len(fitting) < ONE_IN:
        raise ConfigError(
            f"prompts={scalars.prompts} gives {len(fitting)} answers within row={scalars.row} tokens: it must give "
            f"{ONE_IN}, of which one is held out"
        )
    held_out = fitting[ONE_IN - 1 :: ONE_IN][:HELD_OUT_ROWS]
    return _padded([own for i, own in enumerate(fitting, 1) if i % ONE_IN], scalars.row), _padded(held_out, scalars.row)


def _padded(answers: Sequence[tuple[Sequence[int], int]], row: int) -> TrainingRows:
    tokens = torch.zeros(len(answers), row, dtype=torch.long)
    for i, (text, _) in enumerate(answers):
        tokens[i, : len(text)] = torch.tensor(text)
    return TrainingRows(tokens, torch.tensor([[begin - 1, len(text) - 2] for text, begin in answers]))


def own_answers(scalars: Any, tokenizer: Any, settings: Any, target: Any) -> list[tuple[list[int], int]]:
    """Prompts with their answers, of the file or decoded, and where each answer begins. `settings` are the target's."""
    asked, chat = read_prompts(scalars.prompts), uses_template(settings, tokenizer, "target")

    def text(i: int) -> list[int]:
        return [*render(Prompt(str(i), (asked[i].prompt,)), [], tokenizer, chat).tokens]

    if asked and asked[0].answer is not None:
        end, cut = end_token(tokenizer, target), "\N{REPLACEMENT CHARACTER}"  # of a token that is half a character
        answers = [str(own.answer) if own.ended else str(own.answer).rstrip(cut) for own in asked]
        tokens = tokenizer(answers, add_special_tokens=False, verbose=False)["input_ids"]
        texts = map(text, range(len(asked)))
        return [([*begin, *answer, *end * own.ended], len(begin))
                for begin, answer, own in zip(texts, tokens, asked, strict=True)]  # fmt: skip
    return kept_answers(len(asked), text, scalars, tokenizer, settings, target)


def kept_answers(
    count: int, prompt: Callable[[int], list[int]], scalars: Any, tokenizer: Any, settings: Any, target: Any
) -> list[tuple[list[int], int]]:
    """Decodes answers to `count` prompts, of which `prompt` gives the tokens. What is decoded is kept in a file of the
    cache folder, which other trainings with the same answers read; one at a time decodes."""
    asked = [file_hash(scalars.prompts), vars(settings), settings.sources(), target.config.to_dict(),
             of_tokenizer(tokenizer), tokenizer.chat_template, scalars.precision, scalars.row, scalars.max_new_tokens,
             scalars.temperature, scalars.seed]  # fmt: skip
    name = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]
    path = cache_dir() / "answers" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        found = _kept(path)
        begins = [n for n in range(0, count, TOGETHER)
                  if not found.keys() >= {*range(n, min(n + TOGETHER, count))}]  # fmt: skip
        for begin in track(begins, "the target's answers", disable=not begins):
            texts = [prompt(i) for i in range(begin, min(begin + TOGETHER, count))]
            fitting = [text for text in texts if len(text) + 2 <= scalars.row]
            answered = iter(decode(target, fitting, scalars, begin) if fitting else ())
            new = {i: (next(answered) if len(text) + 2 <= scalars.row else text, len(text))
                   for i, text in enumerate(texts, begin)}  # fmt: skip
            lines = ({"prompt": i, "tokens": new[i][0], "begin": new[i][1]} for i in new if i not in found)
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            found = new | found
    return [found[i] for i in range(count)]


def _lock(path: Path) -> AbstractContextManager[Any]:
    """Holds the lock of a file of answers, within `with`."""
    lock = FileLock(f"{path}.lock")
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        log.warning("another training decodes these answers: waiting until it lets go of %s", lock.lock_file)
        return lock.acquire()


def _kept(path: Path) -> dict[int, tuple[list[int], int]]:
    """The first answer to each prompt, by its number, in a file, of which a last line that is not whole is cut off."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    records = [json.loads(line) for line in reversed(whole.splitlines())]
    return {record["prompt"]: (record["tokens"], record["begin"]) for record in records}


@torch.inference_mode()
def decode(target: Any, texts: Sequence[Sequence[int]], scalars: Any, number: int) -> list[list[int]]:
    """Each text with the target's own answer, the end of text included."""
    width = max(map(len, texts))
    padded = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    torch.manual_seed(scalars.seed + number)
    drawn = {"do_sample": True, "temperature": scalars.temperature, "top_k": 0, "top_p": 1.0}
    room = (getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize) - width
    out = target.generate(
        input_ids=padded.to(target.device), attention_mask=mask.to(target.device), pad_token_id=0, use_cache=True,
        max_new_tokens=min(room, scalars.max_new_tokens), repetition_penalty=1.0,
        **(drawn if scalars.temperature else {"do_sample": False}),
    )[:, width:].tolist()  # fmt: skip
    stops = stop_tokens(target)
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in out]
    return [[*text, *row[:end]] for text, row, end in zip(texts, out, ends, strict=True)]


def stop_tokens(target: Any) -> set[int]:
    """The tokens that end a text of the target's."""
    stops = target.generation_config.eos_token_id
    return {*stops} if isinstance(stops, list) else {stops} - {None}


def end_token(tokenizer: Any, target: Any) -> list[int]:
    """The token that stands behind an answer: of the target's the tokenizer's own, else the only one; [] if it has
    none. Raises ConfigError."""
    stops = stop_tokens(target)
    if len(stops) > 1 and tokenizer.eos_token_id not in stops:
        raise ConfigError("prompts with answers are not possible: the target ends its texts with any of "
                          f"{sorted(stops)}, and its tokenizer with {tokenizer.eos_token_id}")  # fmt: skip
    return [tokenizer.eos_token_id] if len(stops) > 1 else [*stops]
