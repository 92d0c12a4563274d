"""Whole decodes in bfloat16 on a CUDA device that runs on the CPU (`cuda_on_cpu`): queue, recorder and clock included.

Each fails if an operation mixes devices, if a shape depends on values, if the host waits anywhere but in a place that
`WAITS` lists, or oftener, if a graph waits, if a second decode of the same lengths makes a new graph, or if a token is
not the CPU's.

How the combinations are chosen: every drafter is decoded twice, sampled in three rows and greedily in one, and in one
of both with graphs (but `own_trees`, whose shapes follow gamma); the default run has every eleventh of these. Caches,
verifiers and the repetition penalty go round with periods of their own, so that each occurs with most others. Every
gamma policy and executor is also tried with the drafter `model`, and so are verifiers that no drafter has here.
Compiled programs need a GPU to be made, and are not here; without them `auto` runs as on a GPU.
"""

from unittest import mock

import pytest
import torch
from choosing import slow_unless
from cuda_on_cpu import cuda_on_cpu
from decoder_cases import CACHES, CHAINS, DRAFTERS
from fake_cuda_cases import POLICIES, PUBLISHED, VERIFIERS, WAITS, Case, Decoder, violations

from specbench.config.paths import conf_dir
from specbench.executors.packed_linear import SharedLinear
from specbench.kernels import ops
from specbench.models.float_logits import FloatLinear

LAWLESS = (
    "ngram",
    "prompt_lookup",
    "suffix",
)  # guesses are point masses at every temperature


def combinations() -> list[Case]:
    """Two cases for every drafter, one for plain decoding with each cache, and more with the drafter `model`."""
    caches, drafters = list(CACHES), list(DRAFTERS)
    chain = ["speculative", "iterative", "match", "block", "synthetic", "typical", "rejection"]
    tree = ["iterative", "match", "typical", "traversal"]
    cases = []
    for greedy in (False, True):
        for i, drafter in enumerate(drafters):
            names = chain if drafter in CHAINS else [*tree, "greedy_tree"] if greedy else tree
            verifier = names[(i // 2 + greedy) % len(names)]
            if verifier == "rejection" and (greedy or drafter in LAWLESS):
                verifier = "speculative"
            graphs = i % 2 == greedy and drafter != "own_trees"  # its shapes follow gamma
            cache = ("static", "paged")[i // 2 % 2] if graphs else caches[i % 3]
            executor = "cudagraph" if graphs else "eager" if drafter == "own_trees" else ("eager", "auto")[i // 2 % 2]
            cases.append(Case(drafter, verifier, cache, executor, temperature=float(not greedy),
                              penalty=(1.0, 1.3)[i // 4 % 2], rows=1 if greedy else 3))  # fmt: skip
    cases += [Case(drafter, cache=cache, executor=executor, temperature=temperature)
              for drafter in PUBLISHED for cache, executor, temperature in (
                  ("dynamic", "eager", 0.0), ("static", "cudagraph", 1.0))]  # fmt: skip
    more = [Case(None, cache=cache) for cache in CACHES] + [Case(None, executor="cudagraph", rows=1)]
    more += [Case(policy=p, executor="cudagraph") for p in POLICIES] + [Case(policy="adaptive"), Case()]
    more += [Case(verifier=v, temperature=float(v != "greedy_tree")) for v in VERIFIERS if v not in chain]
    more += [Case(stop=True), Case(stop=True, executor="cudagraph", drafter="tree_independent", verifier="iterative")]
    more += [Case("tree_distinct", "traversal", executor="cudagraph")]
    more += [Case(load=True), Case(load=True, executor="cudagraph")]
    more += [Case(triton=True, rows=1), Case(triton=True, cache="paged", executor="cudagraph", rows=1)]
    return list(dict.fromkeys(cases + more))


def slow(case: Case) -> bool:
    """Whether the case is left to `-m slow`, where ten of eleven drafters are too: a drafter's second one, policies
    without graphs or like others, verifiers that the drafters' cases have, and kernels in Triton's interpreter."""
    if case.executor == "eager" and case.policy != "fixed":
        return True
    if case in [Case(verifier=name) for name in VERIFIERS if name not in ("speculative", "greedy_tree")]:
        return True
    if case.triton or ((case.stop or case.load) and case.executor == "cudagraph"):
        return True
    if case == Case("tree_distinct", "traversal", executor="cudagraph"):
        return True
    if case.policy in ("heuristic", "entropy"):  # `confidence` and `adaptive` stand for them
        return True
    return case.temperature == 0 and case.drafter not in (None, "model") and case.verifier != "greedy_tree"


# Drafts below drafts may have new lengths; a tree of past outputs may find its first guess in the second decode.
VARYING = ("under_", "suffix_tree")


@pytest.mark.parametrize("case", [
    slow_unless(not slow(case) and (place % 11 == 4 or case.drafter in (None, "model")), case)
    for place, case in enumerate(combinations())
], ids=str)  # fmt: skip
def test_a_decode_runs_on_cuda_and_waits_where_the_table_says(case, number_text):
    with torch.inference_mode(False), torch.no_grad():
        expected = Decoder(case, None, number_text)()
    with cuda_on_cpu() as device, mock.patch.object(ops, "has_triton", lambda: case.triton):
        decode = Decoder(case, device, number_text)
        kinds = {type(layer) for layer in decode.session.parts.target.module.modules()}
        assert FloatLinear in kinds and (SharedLinear in kinds) == (case.executor != "eager"), "as a GPU has them"
        found, tokens = violations(case, device, decode)
        assert found == []
        # Other policies may choose a new gamma.
        if case.executor == "cudagraph" and case.policy == "fixed" and not (case.drafter or "").startswith(VARYING):
            decode(plain=True)  # a round without guesses
            for seed in (2, 3, 4):  # by chance the first decode met no draft, or none that was accepted to its end
                decode(seed=seed)
            captures = decode.executor.captures
            decode(seed=1)
            assert decode.executor.captures == captures > 0, "a second decode made new graphs"
    if not case.triton:  # the kernel of attention rounds otherwise in 16 bits
        assert tokens == expected


def test_the_page_has_the_table():
    """`docs/engine.md` lists the places of `WAITS`."""
    rows = [f"| `{place}` | {wait.times} | {wait.why} |" for place, wait in WAITS.items()]
    page = (conf_dir().parent / "docs" / "engine.md").read_text()
    assert "\n".join(rows) in page


def test_every_verifier_and_executor_of_a_gpu_occurs():
    options = {path.stem for path in (conf_dir() / "verifier").glob("*.yaml")}
    assert options == set(VERIFIERS) == {case.verifier for case in combinations()}
    assert {path.stem for path in (conf_dir() / "cache").glob("*.yaml")} == {case.cache for case in combinations()}
    assert {case.drafter for case in combinations()} == {None, *DRAFTERS, *PUBLISHED}
    graphs = {case.drafter for case in combinations() if case.executor == "cudagraph"}
    assert graphs == {None, *DRAFTERS, *PUBLISHED} - {"own_trees"}
