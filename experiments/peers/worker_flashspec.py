"""Worker of flashspec, which has no plain decoding. It counts tokens and seconds of each step; the first one, in which
models read the prompt, is left out."""

import argparse
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from protocol import DecodeResult, Mode, Request, serve
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")


class Engines:
    """An engine for each temperature and mode, made when it is first asked for: the temperature is an engine's own."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.made = args, {}
        self.models = {name: self.model(name) for name in ("target", "drafter")}

    def model(self, name: str) -> Any:
        """The target or the drafter, in float32."""
        return AutoModelForCausalLM.from_pretrained(getattr(self.args, name), dtype=torch.float32).eval()

    def engine(self, mode: str, request: Request) -> SpeculativeEngine:
        """With a drafter that is the drafter's model or a lookup, chosen by no bandit."""
        key = mode, request["temperature"]
        if key not in self.made:
            sampling = SamplingConfig(temperature=request["temperature"], gamma=self.args.gamma,
                                      seed=request["seed"] if request["temperature"] else None)  # fmt: skip
            config = FlashSpecConfig(device="cpu", dtype="float32", drafter_strategy="bandit",
                                     bandit=BanditConfig(n_arms=1), eos_token_ids=tuple(request["stop"]),
                                     sampling=sampling)  # fmt: skip
            drafter = NgramDrafter(max_ngram=2)
            if mode == "draft":
                drafter = HuggingFaceDrafter(str(self.args.drafter), CPU, torch.float32, model=self.models["drafter"])
            target = TargetModel(str(self.args.target), CPU, torch.float32, model=self.models["target"])
            self.made[key] = SpeculativeEngine(config, [drafter], target)
        return self.made[key]

    def decode(self, mode: str, request: Request) -> DecodeResult:
        """One prompt."""
        found = self.engine(mode, request).generate(torch.tensor([request["ids"]]), max_new_tokens=request["new"])
        steps = found.arm_steps[1:]
        tokens = found.output_ids[0, : found.n_tokens_generated].tolist()
        return tokens, sum(step.emitted for step in steps), sum(step.seconds for step in steps)


def load(args: argparse.Namespace) -> tuple[Mapping[str, Mode], str]:
    """With the drafter, and with a lookup."""
    if args.precision != "f32":
        raise ValueError(f"it is measured in f32 only, not {args.precision}")
    torch.set_num_threads(args.threads)
    engines = Engines(args)
    return {mode: partial(engines.decode, mode) for mode in ("draft", "lookup")}, f"flashspec {version('flashspec')}"


if __name__ == "__main__":
    serve(load)
