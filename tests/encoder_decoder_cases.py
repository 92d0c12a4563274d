"""Tiny encoder-decoders, their texts and the chi-square of these."""

import math

import torch
from decoder_cases import TREES, VERIFIERS, make_drafter, queued, spare_of, verifier_of
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from specbench.decoding.sequence import Sequence
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits
from specbench.policies.base import FixedGamma

V, NEW, HOT = 61, 10, 6.0
LIKE_BART = dict(d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                 encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, init_std=0.5, pad_token_id=0,
                 eos_token_id=1, decoder_start_token_id=2, forced_eos_token_id=None)  # fmt: skip
LIKE_T5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
               relative_attention_max_distance=12, initializer_factor=3.0, decoder_start_token_id=0)  # fmt: skip
KINDS = {"t5": LIKE_T5, "bart": LIKE_BART, "pegasus": LIKE_BART, "marian": LIKE_BART}
INPUTS = ([5, 9, 33, 17, 8, 40, 1], [12, 7, 1], [3, 44, 52, 6, 6, 20, 31, 29, 11, 1])


def module_of(kind: str, seed: int = 0, **more):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{"vocab_size": V} | KINDS.get(kind, {}) | more)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


def decoded_by(models, drafts=None, rows=3, which=INPUTS, new=None):
    """New tokens after the inputs, by a target and the drafter's own model."""
    (target, own), sampling = models, models[0].sampling
    drafter = drafts and make_drafter(drafts, target, "", own)
    spare, start = spare_of(drafts, 3) if drafts else 1, target.start_tokens
    jobs = [Sequence(start, len(start) + (new or NEW - i), 7 + i, read) for i, read in enumerate(which)]
    verifier = verifier_of(VERIFIERS["iterative" if drafts in TREES else "speculative"], sampling)
    queue = queued(target, drafter, jobs, rows, verifier, FixedGamma(3), 4, spare, stops=target.stop_tokens)
    return [sequence.generated for sequence in queue.sequences]


def chi_squared(texts: list[list[int]], target: LanguageModel, inputs=INPUTS) -> list[tuple[float, int]]:
    """For each of two inputs in turn: chi-squared of the first tokens of the texts that followed it, against their law
    by the target's stock module, and the degrees of freedom; then the same of second tokens given the first."""
    begin, heat, found = target.start_tokens, target.sampling.temperature, []
    laws: dict = {}
    for place, which in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = torch.zeros(V, dtype=torch.double)
        counts = torch.zeros_like(expected)
        for text in texts[which::2]:
            if len(text) > place:
                key = (which, *text[:place])
                if key not in laws:
                    so_far = torch.tensor([[*begin, *text[:place], 0]])
                    logits = stock_logits(target, so_far, so_far.shape[1] - 1, inputs[which])[0]
                    laws[key] = logits.double().div(heat).softmax(-1)
                expected += laws[key]
                counts[text[place]] += 1
        often = expected >= 5
        rest = torch.stack([expected[~often].sum(), counts[~often].sum()])
        chi = ((counts - expected)[often] ** 2 / expected[often]).sum()
        chi += (rest[1] - rest[0]) ** 2 / rest[0].clamp(min=1)
        impossible = bool(counts[expected == 0].any())
        found.append((math.inf if impossible else float(chi), int(often.sum())))
    return found
