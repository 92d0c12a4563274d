"""Every encoder-decoder that transformers lists runs exactly, or is refused in a sentence before it decodes."""

from functools import cache

import pytest
import torch
from checkpoints import config_only, with_tokenizer
from choosing import only
from decoder_cases import CACHES, adapted, generated_by
from encoder_decoder_cases import INPUTS, LIKE_BART, LIKE_T5, NEW, V, decoded_by
from encoder_decoder_cases import module_of as tiny_module
from small_runs import parts_of, run
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as LISTED

from specbench.cache.slots import cache_argument
from specbench.decoding.sampling import Sampling
from specbench.errors import ConfigError
from specbench.executors.eager import EagerExecutor
from specbench.models.encoder_decoder import refuse_decoder
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import reads_trees, stock_logits

SEAMLESS = LIKE_BART | {"hidden_size": 16}
PROPHETNET = {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
              "num_decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip
RUNS = {
    "bart": LIKE_BART, "blenderbot": LIKE_BART, "blenderbot-small": LIKE_BART, "marian": LIKE_BART, "mvp": LIKE_BART,
    "mbart": LIKE_BART, "pegasus": LIKE_BART, "plbart": LIKE_BART, "pegasus_x": LIKE_BART, "m2m_100": LIKE_BART,
    "bigbird_pegasus": LIKE_BART | {"attention_type": "original_full"},
    "led": LIKE_BART | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32,
                        "attention_window": 4},
    "seamless_m4t": SEAMLESS, "seamless_m4t_v2": SEAMLESS,
    "t5": LIKE_T5, "mt5": LIKE_T5, "umt5": LIKE_T5, "longt5": LIKE_T5,
}  # fmt: skip
REFUSED = {
    "bigbird_pegasus": (LIKE_BART, "an attention_type in its config"),
    "switch_transformers": (LIKE_T5, "expert_capacity in its config"),
    "nllb-moe": (LIKE_BART, "expert_capacity in its config"),
    "prophetnet": (PROPHETNET, "a decoder whose positions cannot be set for each row"),
    "fsmt": (LIKE_BART | {"src_vocab_size": V, "tgt_vocab_size": V, "langs": ["en", "de"]}, "does not follow"),
}  # fmt: skip
WAYS = [("static", 1, None), ("static", 3, "model"), ("static", 1, "tree_best"), ("dynamic", 3, "tree_best"),
        ("dynamic", 1, "model"), ("paged", 3, "tree_best"), ("paged", 1, "model")]  # fmt: skip


def module_of(kind: str, seed: int = 0, **more):
    return tiny_module(kind, seed, **(RUNS.get(kind) or REFUSED[kind][0]) | more)


@cache
def loaded(kind: str, seed: int) -> LanguageModel:
    return adapted(module_of(kind, seed), tokens=V)


def skip_if_refused(kind: str) -> None:
    """Older releases of transformers have a UMT5 that is not causal."""
    try:
        reads_trees(loaded(kind, 0), kind)
    except ConfigError as refused:
        assert kind == "umt5"
        pytest.skip(str(refused))


def with_cache(kind: str, name: str, temperature: float, seeds=(0, 1)) -> list[LanguageModel]:
    sampling = Sampling(temperature=temperature)
    return [loaded(kind, seed).shared(sampling, CACHES[name], EagerExecutor()) for seed in seeds]


@pytest.mark.parametrize("kind", only(["m2m_100", "t5"], RUNS))
def test_tokens_are_those_of_generate(kind):
    skip_if_refused(kind)
    assert reads_trees(loaded(kind, 0), kind)
    expected = [generated_by(loaded(kind, 0).module, read, NEW - i) for i, read in enumerate(INPUTS)]
    assert len({tuple(text) for text in expected}) == 3
    for cache_name, rows, drafts in WAYS:
        assert decoded_by(with_cache(kind, cache_name, 0), drafts, rows) == expected, (cache_name, rows, drafts)


@pytest.mark.parametrize("kind", only(["m2m_100"], RUNS))
def test_a_checkpoint_of_every_kind_runs(kind, tmp_path):
    skip_if_refused(kind)
    module_of(kind, vocab_size=4160).save_pretrained(tmp_path / "model")
    with_tokenizer(tmp_path / "model")
    same = [f"{role}{value}" for role in ("target", "drafter") for value in ("=model", f".path={tmp_path / 'model'}")]
    parts = parts_of(*same, "temperature=0", "batch_size=2", "executor=eager", "max_new_tokens=6", "gamma=2")
    result, _ = run(parts, tmp_path)
    assert result.alpha.mean == pytest.approx(1, abs=1e-5) and result.lossless.passed


def test_padding_in_a_text_has_no_position_as_in_generate():
    """M2M-100 gives padding no position, and generate() counts it for the tokens behind it."""
    module = module_of("m2m_100")
    model, text = adapted(module, tokens=V), torch.tensor([[2, 8, 0, 30, 0, 0, 9, 17]])
    assert model.encoder.positions.no_position == 0
    model.allocate(1, 16)
    model.open_text(text, 1, 8, INPUTS[0])
    ours = model.read_row(text, 0, 0, 7)[0]
    name = cache_argument(module.forward)
    kept = {"encoder_outputs": module.get_encoder()(input_ids=torch.tensor([INPUTS[0]])), name: None}
    stepwise = []
    for token in text[0, :-1].tolist():  # as generate() does
        output = module(decoder_input_ids=torch.tensor([[token]]), use_cache=True, **kept)
        kept[name] = output[name]
        stepwise.append(output.logits[0])
    torch.testing.assert_close(ours, torch.cat(stepwise), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stock_logits(model, text, 1, INPUTS[0]), ours, atol=1e-4, rtol=1e-4)
    whole = module(input_ids=torch.tensor([INPUTS[0]]), decoder_input_ids=text[:, :-1], use_cache=False).logits[0]
    assert (whole - ours).abs().max() > 1e-2


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_refused(kind):
    module = module_of(kind, **({"attention_type": "block_sparse"} if kind == "bigbird_pegasus" else {}))
    with pytest.raises(ConfigError, match=REFUSED[kind][1]):
        refuse_decoder(module, kind)
        reads_trees(adapted(module, tokens=V), kind)


@pytest.mark.parametrize("kind", [
    k if k == "t5gemma" else pytest.param(k, marks=pytest.mark.slow)
    for k in LISTED if k not in RUNS and k not in REFUSED
])  # fmt: skip
def test_every_other_kind_is_refused_in_a_sentence(kind, tmp_path):
    made = CONFIG_MAPPING[kind]
    config = made.from_encoder_decoder_configs(*2 * [CONFIG_MAPPING["bert"]()]) if kind == "encoder-decoder" else made()
    config_only(config, tmp_path)
    with pytest.raises(ConfigError) as refused:
        parts_of("target=model", f"target.path={tmp_path}", "drafter=ngram")
    assert len(str(refused.value).splitlines()) == 1
