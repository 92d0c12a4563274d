"""transformers in the same process, on the same prompts: `generate`, assisted generation with the
same drafter, and prompt lookup.

Each decodes one prompt at a time, since assisted generation refuses batches. The models are stock:
loaded again where our executor has changed its own. Assisted generation keeps gamma constant and has
no confidence threshold, as in the paper; its default has a heuristic for the one and .4 for the other.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from specbench.baselines.autoregressive import AutoregressiveBaseline, PeerOutput
from specbench.context import Context
from specbench.decoding.queue import Job


class TransformersBaseline(AutoregressiveBaseline):
    """`baseline=transformers`: peers `generate`, `assisted` (with a drafter that is a model) and
    `prompt_lookup`."""

    loads_models = True

    @dataclass
    class Settings:
        pass

    def __init__(self, settings: Settings, context: Context):
        target, drafter, sampling = context.target, context.drafter, context.sampling
        self.device, self.module = target.device, target.stock_module()
        self.options: dict[str, Any] = {
            "eos_token_id": target.stop_tokens or None,
            "pad_token_id": (target.stop_tokens or [0])[0],
            "repetition_penalty": sampling.repetition_penalty,
            "do_sample": not sampling.greedy,
        }
        if not sampling.greedy:
            self.options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        self.ways: dict[str, dict[str, Any]] = {"generate": {}}
        if context.gamma > 0:
            if drafter is not None:
                assistant = drafter.stock_module()
                assistant.generation_config.num_assistant_tokens = context.gamma
                assistant.generation_config.num_assistant_tokens_schedule = "constant"
                assistant.generation_config.assistant_confidence_threshold = 0
                self.ways["assisted"] = {"assistant_model": assistant}
            self.ways["prompt_lookup"] = {"prompt_lookup_num_tokens": context.gamma}
        self.names = tuple(self.ways)

    def decode(self, name: str, job: Job) -> PeerOutput:
        prompt = torch.tensor([list(job.tokens)], device=self.device)
        first = FirstStep(self.device)
        torch.manual_seed(job.key)
        text = self.module.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.limit - len(job.tokens),
            stopping_criteria=StoppingCriteriaList([first]),
            **self.options,
            **self.ways[name],
        )
        seconds = first.now() - first.seconds
        return PeerOutput(text[0, len(job.tokens) :].tolist(), text.shape[1] - first.length, seconds)


class FirstStep(StoppingCriteria):
    """Stops nothing; notes when the first step, which reads the prompt, had ended."""

    def __init__(self, device: torch.device):
        self.device, self.length, self.seconds = device, 0, 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        if not self.length:
            self.length, self.seconds = input_ids.shape[1], self.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
