"""Which shapes should the shipped pair have? c and v of untrained candidates, and Theorem 3.8.

    python experiments/train_pair/shapes.py [--alpha .65]

Times one token and gamma + 1 tokens after 256 of context, all candidates interleaved, medians.
"""

import argparse
import statistics
import time

import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specbench.theory import expected_tokens

CONTEXT, REPEATS, WARM_UP = 256, 60, 10
TARGETS = {  # layers, width, MLP width, heads
    "4 x 512": (4, 512, 1536, 8),
    "2 x 768": (2, 768, 3072, 12),
    "3 x 640": (3, 640, 2304, 10),
    "4 x 640": (4, 640, 1920, 10),
    "6 x 448": (6, 448, 1344, 7),
    "8 x 384": (8, 384, 1152, 6),
    "12 x 384": (12, 384, 1024, 6),
}
DRAFTERS = {"1 x 128": (1, 128, 768, 2), "1 x 160": (1, 160, 448, 5), "2 x 128": (2, 128, 384, 2)}
GAMMAS = (3, 5)


def model(shape: tuple[int, int, int, int]) -> LlamaForCausalLM:
    layers, width, mlp, heads = shape
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def measure(models: dict[str, LlamaForCausalLM]) -> dict[tuple[str, int], float]:
    """Median seconds by (name, tokens)."""
    caches = {}
    for name, m in models.items():
        caches[name] = DynamicCache(config=m.config)
        m(input_ids=torch.randint(4096, (1, CONTEXT)), past_key_values=caches[name])
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in tqdm(range(WARM_UP + REPEATS)):
        for name, m in models.items():
            for tokens in (1, *(gamma + 1 for gamma in GAMMAS)):
                x = torch.randint(4096, (1, tokens))
                start = time.perf_counter()
                m(input_ids=x, past_key_values=caches[name])
                if repeat >= WARM_UP:
                    times.setdefault((name, tokens), []).append(time.perf_counter() - start)
                caches[name].crop(-tokens)
    return {key: statistics.median(values) for key, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=0.65, help="acceptance rate to predict speedups for")
    args = parser.parse_args()
    models = {name: model(shape) for name, shape in (TARGETS | DRAFTERS).items()}
    seconds = measure(models)
    print("| target | drafter | M parameters | ms a token | c | v(4) | v(6) | gamma 3 | gamma 5 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for target in TARGETS:
        step = seconds[target, 1]
        for drafter in DRAFTERS:
            c = seconds[drafter, 1] / step
            v = {gamma: seconds[target, gamma + 1] / step for gamma in GAMMAS}
            speed = (expected_tokens(args.alpha, g) / (g * c + v[g]) for g in GAMMAS)
            size = models[target].num_parameters() / 1e6
            cells = [f"{size:.1f}", f"{step * 1e3:.2f}", f"{c:.3f}", *(f"{v[g]:.2f}" for g in GAMMAS)]
            print(f"| {target} | {drafter} |", " | ".join([*cells, *(f"{s:.2f}x" for s in speed)]), "|")


if __name__ == "__main__":
    main()
