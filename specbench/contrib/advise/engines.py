"""The same drafter in other engines: what to paste, and what they do differently. Written from their documentation."""

import json
from collections.abc import Mapping, Sequence

VLLM, SGLANG, LLAMA, TRANSFORMERS = "vLLM", "SGLang", "llama.cpp", "transformers"
DIFFERENT = {
    VLLM: "By default its model drafter proposes its likeliest token, so at a temperature above 0 a guess is accepted "
    "with probability p(argmax q), not with sum min(p, q): expect another acceptance.",
    SGLANG: "It verifies a tree by greedy agreement or by its own sampling rule unless rejection sampling is switched "
    "on; spec_accept_length counts completion tokens over verifications.",
    LLAMA: "It needs both models as GGUF files with one vocabulary. A draft ends early where the drafter is unsure "
    "unless --spec-draft-p-min is 0, and a guess is kept if it equals what the target samples (sum p q at a "
    "temperature above 0).",
    TRANSFORMERS: "One request at a time. Its default is another schedule: the constant one and a threshold of 0 are "
    "needed for a constant gamma.",
}
NOTHING = "has no such drafter"


def configurations(target: str, words: Sequence[str]) -> dict[str, str]:
    """What to paste into each engine for a way of decoding, by the engine's name."""
    own = dict(word.split("=", 1) for word in words)
    drafter, gamma, path = own.get("drafter", ""), own.get("gamma", "4"), own.get("drafter.path", "DRAFTER")
    known: dict[str, Mapping[str, str]] = {
        "model": _engines(
            {"method": "draft_model", "model": path}, f"STANDALONE --speculative-draft-model-path {path}",
            f"-md DRAFTER.gguf --spec-type draft-simple --spec-draft-n-max {gamma} --spec-draft-p-min 0",
            f"assistant_model=AutoModelForCausalLM.from_pretrained({path!r}), num_assistant_tokens={gamma}, "
            "num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0",
            gamma,
        ),
        "suffix": _engines({"method": "suffix"}, "NGRAM", f"--spec-type ngram-mod --spec-draft-n-max {gamma}",
                           f"prompt_lookup_num_tokens={gamma}", gamma),
        "prompt_lookup": _engines(
            {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}, "NGRAM",
            f"--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m {gamma}",
            f"prompt_lookup_num_tokens={gamma}, max_matching_ngram_size=3", gamma,
        ),
        "self_quantized": _engines(
            {"method": "draft_model", "model": "QUANTIZED_COPY"},
            "STANDALONE --speculative-draft-model-path QUANTIZED_COPY",
            f"-md TARGET-Q4_0.gguf --spec-type draft-simple --spec-draft-n-max {gamma} --spec-draft-p-min 0",
            "", gamma,
        ),
        "mtp": _engines({"method": "mtp"}, "NEXTN", f"--spec-type draft-mtp --spec-draft-n-max {gamma}",
                        f"use_mtp=True, num_assistant_tokens={gamma}", gamma),
        "eagle3": _engines({"method": "eagle3", "model": path},
                           f"EAGLE3 --speculative-draft-model-path {path}", "", "", gamma),
    }  # fmt: skip
    begins = {VLLM: f"vllm serve {target} --speculative-config ", LLAMA: "llama-server -m TARGET.gguf ",
              SGLANG: f"python -m sglang.launch_server --model-path {target} --speculative-algorithm ",
              TRANSFORMERS: "model.generate(**inputs, "}  # fmt: skip
    found = known.get({"stdlib": "model", "lookup_or_model": "model"}.get(drafter, drafter), {})
    return {name: f"{begin}{found[name]}{')' * (name == TRANSFORMERS)}" if found.get(name) else f"{name} {NOTHING}"
            for name, begin in begins.items()}  # fmt: skip


def _engines(vllm: Mapping[str, object], sglang: str, llama: str, generate: str, gamma: str) -> dict[str, str]:
    """The parts of the four configurations that a drafter changes."""
    config = json.dumps({**vllm, "num_speculative_tokens": int(gamma)})
    drafts = f" --speculative-num-draft-tokens {int(gamma) + 1}"
    steps = f" --speculative-num-steps {gamma} --speculative-eagle-topk 1" if sglang != "NGRAM" else ""
    return {VLLM: f"'{config}'", SGLANG: sglang + steps + drafts, LLAMA: llama, TRANSFORMERS: generate}
