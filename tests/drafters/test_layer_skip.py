"""The target without some of its parts: its logits, the search for the parts, and the law of real layers."""

import itertools
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from architectures import spread, tiny_config
from choosing import only
from decoder_cases import DigitTokenizer, V
from law_cases import AcceptEverything, excess
from transformers import AutoModelForCausalLM

from specbench.cache.static import StaticCache
from specbench.data.prompts import Prompt
from specbench.decoding.sampling import Sampling
from specbench.decoding.speculative import decode_speculative
from specbench.decoding.state import Job, State
from specbench.decoding.timer import Clock
from specbench.drafters import layer_skip
from specbench.drafters.layer_skip import LayerParts, LayerSkipDrafter, best_subset
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.context import Context
from specbench.models.language_model import LanguageModel, decoder_layers
from specbench.policies.gamma.fixed import FixedGamma
from specbench.verifiers.speculative import SpeculativeVerifier

LAST = {"llama": ("o_proj", "down_proj"), "gemma2": ("o_proj", "down_proj"), "gpt2": ("attn.c_proj", "mlp.c_proj"),
        "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h")}  # the last products of attention and MLP  # fmt: skip


@cache
def module_of(model_type, layers=3, **more):
    config = tiny_config(model_type)
    config.num_hidden_layers = layers
    for name, value in more.items():
        setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        spread(module)
    return module


def layer_of(module, n):
    return decoder_layers(module)[int(n)]


def silenced(model_type, parts):
    """A copy of a module in which the last products of these parts are zero."""
    module = deepcopy(module_of(model_type))
    for name in parts:
        kind, _, n = name.partition(".")
        last = layer_of(module, n).get_submodule(
            next(path for path, _ in layer_of(module, n).named_modules()
                 if path.endswith(LAST[model_type][kind == "mlp"])))  # fmt: skip
        for weight in last.parameters():
            weight.zero_()
    return module


@pytest.mark.parametrize("model_type", LAST)
def test_parts_that_are_left_out_add_nothing(model_type):
    """Against the same model with weights of zero; the other parts of its layers are seen to matter."""
    parts, text = LayerParts(module_of(model_type)), torch.tensor([[5, 9, 33, 17, 8]])
    assert parts.names == [f"{kind}.{n}" for n in range(3) for kind in ("attention", "mlp")]
    found = {}
    for skip in ((), ("attention.1",), ("mlp.0", "attention.2"), ("attention.0", "mlp.0", "mlp.1")):
        found[skip] = parts.without(skip)(input_ids=text).logits
        assert torch.allclose(found[skip], silenced(model_type, skip)(input_ids=text).logits, atol=1e-5)
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in itertools.combinations(found.values(), 2))
    assert torch.equal(module_of(model_type)(input_ids=text).logits, found[()])


@pytest.mark.parametrize("model_type", ["opt", "bloom", "bert"])
def test_layers_that_add_otherwise_are_left_out_as_a_whole(model_type):
    module, text = module_of(model_type), torch.tensor([[5, 9, 33]])
    parts = LayerParts(module)
    assert parts.names == ["layer.0", "layer.1", "layer.2"]
    short, held = parts.without(["layer.1"]), []

    def instead(part, given):
        return (held[0][0] if isinstance(held[0], tuple) else held[0], *given[1:])

    hooks = [layer_of(module, 0).register_forward_hook(lambda part, given, result: held.append(result)),
             layer_of(module, 2).register_forward_pre_hook(instead)]  # fmt: skip
    whole = module(input_ids=text, use_cache=False).logits  # layer 2 reads what layer 0 returned
    for hook in hooks:
        hook.remove()
    assert torch.allclose(short(input_ids=text, use_cache=False).logits, whole, atol=1e-5)
    assert not torch.allclose(module(input_ids=text, use_cache=False).logits, whole, atol=1e-3)


def test_a_search_exchanges_what_hurts():
    """Three names cost nothing, the others do."""
    names, free = [f"mlp.{n}" for n in range(9)], {"mlp.1", "mlp.2", "mlp.7"}
    score = lambda skip: -len({*skip} - free)  # noqa: E731
    assert best_subset(names, 3, 200, 0, score) == (["mlp.1", "mlp.2", "mlp.7"], 0)
    assert best_subset(names, 3, 1, 0, score) == (["mlp.0", "mlp.3", "mlp.6"], -3)  # where it begins
    assert best_subset(names, 9, 50, 0, score)[0] == names


def target_of(module, sampling):
    return LanguageModel(module, DigitTokenizer(), name="tiny", sampling=sampling, new_cache=StaticCache,
                         executor=EagerExecutor())  # fmt: skip


PROMPTS = [Prompt(str(n), (f"{n} 4 9 2",)) for n in range(3)]


def drafter_of(module, sampling, gamma=3, prompts=PROMPTS, seed=0, **settings):
    target = target_of(module, sampling)
    context = Context(target.device, torch.float32, sampling, StaticCache, target.executor, seed, gamma,
                      prompts=prompts)  # fmt: skip
    settings = {"skip": None, "share": 0.5, "trials": 40} | settings
    return target, LayerSkipDrafter.from_settings(LayerSkipDrafter.Settings(**settings), context, target)


@pytest.mark.parametrize("temperature", only([1], [0, 1]))
def test_what_the_target_does_not_use_is_found(temperature):
    module = deepcopy(module_of("llama", vocab_size=V, eos_token_id=None))
    unused = ["mlp.0", "attention.1", "attention.2"]
    for n, name in ((0, "mlp.down_proj"), (1, "self_attn.o_proj"), (2, "self_attn.o_proj")):
        module.model.layers[n].get_submodule(name).weight.zero_()
    _, drafter = drafter_of(module, Sampling(temperature=temperature))
    assert drafter.model.name == f"tiny without {', '.join(sorted(unused))}"
    assert "mean beta, 1.000, at 96 tokens that the target wrote after the first 3 prompts" in drafter.notes[0]


def test_one_search_serves_all_gammas(monkeypatch):
    """And each other setting, sampling of the target or the drafter, text, seed or target begins its own."""
    searches = []
    monkeypatch.setattr(layer_skip, "best_subset", lambda *given: searches.append(given) or best_subset(*given))
    module, own = deepcopy(module_of("llama", vocab_size=V, eos_token_id=None)), Sampling()
    names = [drafter_of(module, own, gamma=gamma, trials=4)[1].model.name for gamma in (2, 5)]
    assert names[0] == names[1] and len(searches) == 1
    others = ({"trials": 5}, {"share": 0.3}, {"temperature": 0.5}, {"seed": 1}, {"prompts": PROMPTS[:2]},
              {"sampling": Sampling(temperature=0.5), "temperature": 1.0}, {"module": deepcopy(module)})  # fmt: skip
    for number, other in enumerate(others):
        drafter_of(**{"module": module, "sampling": own, "trials": 4} | other)
        assert len(searches) == 2 + number, other


@pytest.mark.parametrize(("verifier", "passes"), [(SpeculativeVerifier, True), (AcceptEverything, False)])
def test_real_layers_leave_the_target_law(verifier, passes):
    """Pairs of the first new tokens of 4,000 texts, against the stock module's law; and a control."""
    sampling, rows, prompt = Sampling(), 4000, [3, 7, 1, 3]
    target, drafter = drafter_of(module_of("llama", vocab_size=V, eos_token_id=None), sampling,
                                 skip=["attention.0", "mlp.1", "layer.2"])  # fmt: skip
    state = State.start([Job(prompt, 7, key) for key in range(rows)], [], 4, target.device)
    target.allocate(rows, state.tokens.shape[1])
    target.prefill(state)
    decode_speculative(state, target, drafter, FixedGamma(3), verifier(sampling), Clock())
    logits = target.stock_module()(input_ids=torch.tensor([[*prompt, x] for x in range(V)])).logits
    law = (logits[:1, 3].softmax(-1).T * logits[:, 4].softmax(-1)).double().numpy()  # [x1, x2]
    new = np.array(state.new_tokens())
    counts = np.bincount(new[:, 0] * V + new[:, 1], minlength=V * V)
    assert (excess(counts, law.ravel() * rows) < 1) == passes


def test_layers_that_need_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"drafter=layer_skip is not possible with .*tiny: KeyError"):
        drafter_of(AutoModelForCausalLM.from_config(tiny_config("gemma3n_text")).eval(), Sampling(), skip=["layer.0"])
