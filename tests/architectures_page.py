"""Writes docs/reference/architectures.md when it is run: which causal architectures of transformers run."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import LISTED, spread, tiny_config, write
from transformers import GenerationConfig

from specbench.cache.static import StaticCache
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.architecture import family_of
from specbench.models.checkpoint_checks import reads_trees
from specbench.models.context import Context
from specbench.models.pretrained import PretrainedModel, footprint

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"
RELEASE = f"transformers {transformers.__version__}"
TEXT = """# Architectures

Every causal architecture that {release} lists is built by a test with a tiny configuration and random weights,
and drafts for itself: alpha is 1 and the text at temperature 0 is that of `generate()`, in batches, with every cache,
in chains and trees. Those that cannot run so are refused by a sentence before anything is decoded.
Of {all}, {runs} run, {chains} of them in chains only, and {refused} are refused.

`python tests/architectures_page.py` writes this page, and a test holds it to what the code does.

- A model is loaded with SDPA where transformers has it for the architecture, and otherwise with transformers' eager
  attention, which serves soft caps (Gemma 2), sinks (GPT-OSS), local layers (GPT-Neo) and ALiBi (Bloom, MPT).
- Each model is compared with its own plain forward when it loads, on rows of unequal length and on a tree. It is
  refused if rows differ. If only the tree does, drafters of trees are refused.
- BERT and its kin run with `is_decoder=true` in their configuration; without it they are not causal, and refused.
- Positions of RoBERTa and its kin begin behind their padding's, as in training and in their own forward; `generate()`
  counts from 0, and there the text is that of plain forwards.
- An architecture that is an encoder-decoder by default is listed as its decoder alone, `is_encoder_decoder=false`.

| architecture | runs | attention | trees | why not |
|---|---|---|---|---|
{rows}
"""


def row_of_model(model_type: str, model: Any) -> str:
    """The row of an architecture that runs."""
    attention = {"sdpa": "SDPA"}.get(model.config._attn_implementation, model.config._attn_implementation)
    return f"| {model_type} | yes | {attention} | {'yes' if model.trees else 'no'} | |"


def row_of_refusal(model_type: str, sentence: str) -> str:
    """The row of an architecture that is refused with a sentence, which begins with the path of its folder."""
    begin, _, why = sentence.partition(" ")
    assert begin.endswith(f"/{model_type}"), sentence
    return f"| {model_type} | no | | | {why.split(': repair')[0].replace('|', '/')} |"


def rows() -> dict[str, str]:
    """The rows of the page, by architecture."""
    lines = (line for line in PAGE.read_text().splitlines() if line.startswith("| "))
    return {line.split(" ")[1]: line for line in lines}


def is_of_this_release() -> bool:
    """Whether the page was written with the installed release of transformers."""
    return f" {RELEASE} lists" in PAGE.read_text()


def write_page(found: dict[str, str]) -> None:
    """Writes the page from the rows of all architectures."""
    run = [row for row in found.values() if "| yes |" in row]
    chains = sum(" no |" in row for row in run)
    counts = {"runs": len(run), "all": len(found), "chains": chains, "refused": len(found) - len(run)}
    PAGE.write_text(TEXT.format(release=RELEASE, rows="\n".join(found.values()), **counts))


def loaded(model_type: str, **more) -> PretrainedModel:
    """A tiny model, built as a run builds it, with `more` in its configuration. Raises ConfigError."""
    folder = write(tiny_config(model_type, **more), Path(tempfile.mkdtemp()) / model_type)
    settings = PretrainedModel.Settings(path=str(folder), revision=None, weights="random", chat_template="never")
    footprint(settings, "target", torch.float32)
    context = Context(torch.device("cpu"), torch.float32, Sampling(), StaticCache, EagerExecutor())
    model = PretrainedModel(settings, context, "target")
    spread(model.module)
    model.recurrence = family_of(model.module.config).state(model.module, model.mask, f"target.path={folder}")
    model.trees = reads_trees(model, f"target.path={folder}")  # with weights of which each matters
    model.module.generation_config = GenerationConfig()  # of the model's own law
    return model


def outcome(model_type: str) -> tuple[PretrainedModel | None, str]:
    """A tiny model or, if it is refused, None; and its row in docs/reference/architectures.md."""
    try:
        model = loaded(model_type)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return None, row_of_refusal(model_type, str(error))
    return model, row_of_model(model_type, model)


if __name__ == "__main__":
    with torch.inference_mode():
        write_page({model_type: outcome(model_type)[1] for model_type in LISTED})
