"""Decodes a target's answers to prompts on a CPU, many rows at once, which `python -m specbench.train prompts=OUT`
reads.

`python experiments/smollm2/answers.py PROMPTS OUT` writes one JSON line for each prompt: number, prompt, answer, and
finish_reason, stop or length. What is in OUT already stays. Several processes may share the work: `--part 1/2` writes
the answers to every second prompt, into a file of its own.

A row whose answer has ended goes to the next prompt at once, and keys and values lie in one tensor for all rows. This
reads Llama models with full attention; `generate()` reads all models, more slowly.

R rows, W tokens of a row, G heads of keys, H of queries, D sizes of a head, T tokens, V vocabulary.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbench.config.paths import conf_dir
from specbench.contrib.training.rows import read_prompts, stop_tokens
from specbench.contrib.training.trainer import checked_settings
from specbench.data.prompts import Prompt, render
from specbench.models.pretrained import load_module, load_tokenizer, uses_template

Done = Callable[[int, list[int], bool], None]  # number, tokens, whether the answer has ended by itself
BLOCK = 256  # tokens whose probabilities are added up first, to draw one


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """Attention of queries [R, H, T, D] to keys and values [R, G, W, D], which are not repeated for the heads that
    share them; mask [R, 1, 1 or T, W]."""
    rows, heads, count, size = query.shape
    groups = key.shape[1]
    mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, heads // groups, 1)
    query = query.reshape(rows, groups, heads // groups * count, size)
    found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return found.view(rows, heads, count, size).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("grouped", grouped_attention)


class Rows:
    """Keys and values of R rows, as the model's cache: `row` is the one whose prompt is read, or None for a token of
    each."""

    is_compileable = False

    def __init__(self, config: Any, rows: int, width: int):
        size = (config.num_hidden_layers, rows, config.num_key_value_heads, width, config.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.is_sliding = [False] * config.num_hidden_layers
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.row: int | None = None
        self.all = torch.arange(rows)

    def get_seq_length(self, *_: Any) -> int:
        """Unused: positions are given."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds keys and values [R, G, T, D] of a layer; returns those that are attended to."""
        keys, values = self.keys[layer], self.values[layer]
        if self.row is not None:
            keys[self.row, :, : key.shape[2]], values[self.row, :, : key.shape[2]] = key[0], value[0]
            return key, value
        keys[self.all, :, self.lengths], values[self.all, :, self.lengths] = key[:, :, 0], value[:, :, 0]
        width = int(self.lengths.max()) + 1
        return keys[:, :, :width], values[:, :, :width]


def draw(logits: Tensor, temperature: float) -> Tensor:
    """A token [R] for each row of logits [R, V]: first a block of tokens, then one of it."""
    if temperature == 0:
        return logits.argmax(-1)
    weights = logits.sub(logits.amax(-1, keepdim=True)).div_(temperature).exp_()
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    point = torch.rand(len(weights), 1) * ends[:, -1:]
    block = torch.searchsorted(ends, point).clamp_(max=ends.shape[1] - 1)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    point = point - ends.gather(1, block) + within[:, -1:]
    token = block * BLOCK + torch.searchsorted(within, point).clamp_(max=BLOCK - 1)
    return token[:, 0].clamp_(max=logits.shape[1] - 1)


@torch.inference_mode()
def answer(model: Any, asked: dict[int, list[int]], done: Done, rows: int, longest: int, temperature: float) -> None:
    """Calls `done` for each prompt of `asked`, by its number, as its answer ends."""
    stops = stop_tokens(model)
    cache = Rows(model.config, rows, max(map(len, asked.values())) + longest)
    owners, answers = [-1] * rows, dict[int, list[int]]()  # a row without an answer is free
    waiting, tokens = list(reversed(asked)), torch.zeros(rows, dtype=torch.long)

    def add(owner: int, token: int) -> None:
        answers[owner].append(token)
        if token in stops or len(answers[owner]) == longest:
            done(owner, answers.pop(owner), token in stops)

    while waiting or answers:
        for row in range(rows):
            while waiting and owners[row] not in answers:
                owners[row] = waiting.pop()
                answers[owners[row]], cache.row, text = [], row, torch.tensor([asked[owners[row]]])
                count = text.shape[1]
                causal = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
                logits = model(input_ids=text, attention_mask=causal, position_ids=torch.arange(count)[None],
                               past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # fmt: skip
                cache.lengths[row], tokens[row] = count, draw(logits[:, -1].float(), temperature)[0]
                add(owners[row], int(tokens[row]))
        cache.row = None
        cache.lengths[[row for row in range(rows) if owners[row] not in answers]] = 0
        mask = (torch.arange(int(cache.lengths.max()) + 1) <= cache.lengths[:, None])[:, None, None]
        logits = model(input_ids=tokens[:, None], attention_mask=mask, position_ids=cache.lengths[:, None],
                       past_key_values=cache, use_cache=True).logits[:, -1]  # fmt: skip
        tokens, cache.lengths = draw(logits.float(), temperature), cache.lengths + 1
        for row, token in enumerate(tokens.tolist()):
            if owners[row] in answers:
                add(owners[row], token)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("prompts")
    parser.add_argument("out")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--longest", type=int, default=384, help="tokens of a prompt and its answer")
    parser.add_argument("--temperature", type=float, default=0.6)
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    with initialize_config_dir(str(conf_dir()), version_base=None):
        config = compose("train", [f"target={options.target}", "method=eagle3", f"prompts={options.prompts}"])
    _, settings, _, _ = checked_settings(config)
    tokenizer, prompts = load_tokenizer(settings, "target"), [own.prompt for own in read_prompts(options.prompts)]
    model = load_module(settings, "target", torch.device("cpu"), torch.float32, 0)
    model.set_attn_implementation("grouped")
    out = Path(options.out)
    whole = out.read_text().rpartition("\n")[0] if out.exists() else ""  # without a line that was cut off
    if out.exists():
        out.write_text(f"{whole}\n" if whole else "")
    there = {json.loads(line)["number"] for line in whole.splitlines()}
    chat = uses_template(settings, tokenizer, "target")
    asked = {}
    for number in range(part - 1, len(prompts), parts):
        text = render(Prompt(str(number), (prompts[number],)), [], tokenizer, chat).tokens
        if number not in there and len(text) + options.max_new_tokens <= options.longest:
            asked[number] = list(text)
    wanted = len(range(part - 1, len(prompts), parts)) - len(there)
    print(f"{len(asked)} answers to decode; {wanted - len(asked)} prompts leave too little room and are left out")
    if not asked:
        return
    torch.manual_seed(part + len(there) * parts)
    began, count = time.perf_counter(), 0
    with out.open("a") as file, Progress() as progress:
        task = progress.add_task("answers", total=len(asked))

        def done(number: int, tokens: list[int], ended: bool) -> None:
            nonlocal count
            count += len(tokens)
            text = tokenizer.decode(tokens[:-1] if ended else tokens)
            line = {"number": number, "prompt": prompts[number], "answer": text,
                    "finish_reason": "stop" if ended else "length"}  # fmt: skip
            file.write(json.dumps(line) + "\n")
            file.flush()
            rate = count / (time.perf_counter() - began)
            progress.update(task, advance=1, description=f"{count} tokens, {rate:.0f}/s")

        answer(model, asked, done, options.rows, options.max_new_tokens, options.temperature)
    print(f"{count} tokens of answers in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
