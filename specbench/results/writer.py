"""Writes the files of a run, which every run leaves; loggers mirror them."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specbench.errors import causes
from specbench.results.atomic_files import (
    GROUPS,
    PART,
    PartFile,
    synchronise,
    with_room,
    write_json,
    write_text,
    writing,
)
from specbench.results.completion import FILES, RESULTS, contents
from specbench.results.parquet import POSITIONS, position_rows, round_rows, rounds_schema, write_all_sums, write_rows
from specbench.results.schema import RunResult, plain
from specbench.stats.records import Failure, Group, RunRecord


def write_config(config: dict[str, Any], out_dir: Path) -> None:
    """Writes the resolved configuration to config.yaml, before the run begins. Raises ConfigError."""
    with writing(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))


class PromptsFile(PartFile):
    """prompts.jsonl.part, which grows while a run decodes."""

    def __init__(self, out_dir: Path):
        """Raises ConfigError if it cannot be written."""
        super().__init__(out_dir / PART, "w")

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends one line per record, all of them or, where the disk stays full, none. Raises ConfigError."""
        text = "".join(json.dumps(plain(record), ensure_ascii=False) + "\n" for record in records)
        self.write(text.encode("utf-8", "backslashreplace"))


def write_result(
    result: RunResult,
    record: RunRecord,
    digest: str,
    out_dir: Path,
    tokenizer: Any,
    identity: Mapping[str, Any] | None = None,
    overrides: Sequence[str] | None = None,
) -> None:
    """Writes prompts.jsonl, rounds.parquet, positions.parquet, sums.parquet and, last, results.json, which shows that
    the others are complete. The tokenizer turns each round's tokens into text. With `identity`, of what the run was
    made of, a sweep can use the results again. Raises ConfigError."""
    part = out_dir / PART
    with writing(out_dir / "prompts.jsonl"):
        (out_dir / RESULTS).unlink(missing_ok=True)
        synchronise(part)
        os.replace(part, out_dir / "prompts.jsonl")
    with_room(lambda: write_rows(out_dir / "rounds.parquet", round_rows(record, tokenizer), rounds_schema(record)))
    with_room(lambda: write_rows(out_dir / "positions.parquet", position_rows(record), POSITIONS))
    with_room(lambda: write_all_sums(out_dir, [record.sums], list(record.sums.columns)))
    found: dict[str, Any] = {"config_digest": digest, "overrides": None if overrides is None else list(overrides)}
    if identity is not None:
        found["identity"] = {**identity, "files": {name: contents(out_dir / name) for name in FILES}}
    with_room(lambda: write_json(out_dir / RESULTS, result.as_dict() | found))
    if result.status == "complete":
        with writing(out_dir / GROUPS):
            (out_dir / GROUPS).unlink(missing_ok=True)


def prompt_records(group: Group, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Lines of prompts.jsonl: text in, text out, counts, and times in seconds. If rows decode together, each has its
    share of the seconds."""
    for result in group.results:
        request, ours, theirs, peers = result.request, result.speculative, result.baseline, result.outputs
        betas = [beta for r in ours.rounds for beta in r.beta]
        yield {
            "id": request.id,
            "category": request.category,
            "prompt_tokens": request.prompt_tokens,
            "encoder_tokens": None if request.encoder_input is None else len(request.encoder_input),
            "limit": result.limit,
            "tokens": len(ours.tokens),
            "baseline_tokens": len(theirs.tokens),
            "rounds": len(ours.rounds),
            "alpha": sum(betas) / len(betas) if betas else None,
            "block_efficiency": sum(r.tokens for r in ours.rounds) / len(ours.rounds),
            "decode_seconds": ours.seconds,
            "baseline_decode_seconds": theirs.seconds,
            "prefill_seconds": group.speculative.prefill_seconds / len(group.results),
            "baseline_prefill_seconds": group.baseline.prefill_seconds / len(group.results),
            **{f"{peer}_decode_seconds": output.decode_seconds for peer, output in peers.items()},
            **{f"{peer}_tokens": output.count for peer, output in peers.items()},
            **{f"{peer}_error": causes(o) for peer, o in result.peers.items() if isinstance(o, RuntimeError)},
            "prompt": request.text,
            "reference": request.reference,
            "output": tokenizer.decode(ours.tokens, skip_special_tokens=True),
            "baseline_output": tokenizer.decode(theirs.tokens, skip_special_tokens=True),
        }


def failure_records(failure: Failure) -> Iterator[dict[str, Any]]:
    """Lines of prompts.jsonl for requests that could not be decoded."""
    for request in failure.requests:
        yield {
            "id": request.id,
            "category": request.category,
            "prompt_tokens": request.prompt_tokens,
            "error": failure.error,
            "prompt": request.text,
        }
