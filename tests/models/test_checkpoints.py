"""Checkpoints: what is loaded whole, and what is refused with one sentence."""

import json
import shutil
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from checkpoints import (
    EMBED,
    HEAD,
    NORM,
    SIZES,
    WEIGHTS,
    binary,
    checkpoint,
    config,
    content,
    cut,
    edit_tokenizer,
    harmful,
    other,
    pop,
    put,
    shards,
    tensors,
    then,
    without,
)
from choosing import only, slow_unless
from omegaconf import OmegaConf
from small_runs import composed, parts_of, small
from torch.profiler import ProfilerActivity, profile
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specbench.config.build import build
from specbench.config.validate import check
from specbench.data.sources import SHIPPED
from specbench.errors import ConfigError
from specbench.models.random_weights import random_module
from specbench.run.run import run

BERT = dict(SIZES, model_type="bert")
SHARD = "model-00002-of-00003.safetensors"
LAYER_1 = "model.layers.1.mlp.up_proj.weight"

OF_MAMBA = '{"model_type": "mamba", "vocab_size": 4160, "hidden_size": 16, "num_hidden_layers": 1}'
BROKEN = {
    # tensors
    "a tensor is missing": (pop(LAYER_1), f"lacks {LAYER_1}"),
    "the embedding is missing": (pop(EMBED), f"lacks {EMBED}"),
    "the output matrix is missing": (pop(HEAD), f"lacks {HEAD}"),
    "a tied pair is missing": (then(config(tie_word_embeddings=True), pop(HEAD), pop(EMBED)), "lacks"),
    "a tensor too many": (tensors(lambda state: state.update(extra=torch.ones(3))), "no place for: extra"),
    "more layers than weights": (config(num_hidden_layers=3), "lacks model.layers.2."),
    "fewer layers than weights": (config(num_hidden_layers=1), "no place for: model.layers.1."),
    "another vocabulary": (config(vocab_size=4100), "[4160, 16] for [4100, 16]"),
    "Llama declared as BERT": (content("config.json", json.dumps(BERT)), "lacks"),
    "weights of whole numbers": (tensors(lambda s: s.update({NORM: torch.ones(16, dtype=torch.int8)})), "of floating"),
    # not finite, not causal
    "NaN in a weight": (put(LAYER_1, 7, torch.nan), f"not finite in float32, in {LAYER_1}"),
    "logits overflow": (tensors(lambda s: s.update({HEAD: s[HEAD] * (3e38 / s[HEAD].abs().max())})), "logits"),
    "weights of 0": (tensors(lambda s: s.update({name: 0 * w for name, w in s.items()})), "logits that are all 0"),
    "BERT": (other(**BERT), "is not causal"),
    "BERT, hardly trained": (other(**BERT | {"initializer_range": 0.02}), "is not causal"),
    # weight files
    "no weights": (without(WEIGHTS), "no weights"),
    "only GGUF": (then(without(WEIGHTS), content("model.gguf", b"GGUF")), "model.gguf"),
    "weights of no bytes": (content(WEIGHTS, b""), f"{WEIGHTS} is empty"),
    "weights cut in half": (cut(WEIGHTS, 0.5), f"{WEIGHTS} is damaged"),
    "a pointer of Git LFS": (content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "a folder named like weights": (then(without(WEIGHTS), lambda f: (f / WEIGHTS).mkdir()), WEIGHTS),
    "a shard is missing": (shards(without(SHARD)), f"{SHARD} is not there"),
    "an index that is no JSON": (shards(cut("model.safetensors.index.json", 0.5)), "model.safetensors.index.json"),
    "an index without a map": (shards(content("model.safetensors.index.json", "{}")), "weight_map"),
    "a pickle that runs code": (harmful, "pytorch_model.bin is damaged"),
    "a pickle cut in half": (then(binary(), cut("pytorch_model.bin", 0.5)), "pytorch_model.bin is damaged"),
    "a pickle of whole numbers": (binary(lambda state: {n: t.to(torch.int8) for n, t in state.items()}), "floating"),
    "an adapter only": (then(without(WEIGHTS, "config.json"), content("adapter_config.json", "{}")), "adapter_config"),
    "an adapter beside weights": (content("adapter_config.json", '{"peft_type": "LORA"}'), "merge it"),
    # config.json
    "no config.json": (without("config.json"), "no config.json"),
    "config.json is no JSON": (content("config.json", "{'model_type': llama"), "config.json is not JSON"),
    "config.json is a list": (content("config.json", "[1]"), "config.json holds list"),
    "config.json is UTF-16": (content("config.json", '{"model_type": "llama"}'.encode("utf-16")), "config.json"),
    "config.json is nested deeply": (content("config.json", '{"a":' * 100_000), "config.json is not JSON"),
    "no model type": (config(model_type=...), "names no model_type"),
    "an unknown model type": (config(model_type="nope"), "nope"),
    "text for a number": (config(hidden_size="large"), "hidden_size"),
    "null for a number": (config(num_hidden_layers=None), "num_hidden_layers"),
    "-1 layers": (config(num_hidden_layers=-1), "num_hidden_layers=-1"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "a vocabulary of 0": (config(vocab_size=0), "vocab_size=0"),
    "a negative context": (config(max_position_embeddings=-5), "max_position_embeddings=-5"),
    "heads that do not divide": (config(num_attention_heads=3, head_dim=...), "could not be loaded"),
    "an unknown activation": (config(hidden_act="nope"), "could not be loaded"),
    "an encoder of sounds": (content("config.json", '{"model_type": "moonshine"}'), "reads no text"),
    "no language model": (content("config.json", '{"model_type": "vit"}'), "vocab_size=None in its config"),
    "Mamba with other weights": (content("config.json", OF_MAMBA), "lacks backbone."),
    "a package that is not here": (config(quantization_config={"quant_method": "hqq"}), "cannot run on this machine"),
    "an unknown quantization": (config(quantization_config={"quant_method": "nope"}), "nope"),
    "code of its own": (config(model_type="own", auto_map={"AutoConfig": "own.C"}), ".trust_remote_code=true"),
    "generation_config.json is no JSON": (content("generation_config.json", "{"), "generation_config.json is not"),
    "an end of text that is text": (content("generation_config.json", '{"eos_token_id": ["</s>", 2]}'), "eos_token_id"),
    "an end of text of 71 bits": (content("generation_config.json", f'{{"eos_token_id": {2**70}}}'), "eos_token_id"),
    # tokenizer
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer (config.json, "),
    "tokenizer.json is cut": (cut("tokenizer.json", 0.5), "could not be loaded"),
    "tokenizer_config.json is a list": (content("tokenizer_config.json", "[]"), "tokenizer_config.json holds list"),
    "a tokenizer without its vocabulary": (
        then(without("tokenizer.json"), content("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}')),
        "reads no text",
    ),
    "a tokenizer without a token for unknown words": (
        content("tokenizer_config.json", '{"tokenizer_class": "BertTokenizer"}'), "tokenizer: Exception: WordPiece",
    ),
    "a tokenizer with too many ids": (other(vocab_size=4000), "ids up to 4095"),
    "a token beyond the embedding": (
        edit_tokenizer(lambda t: t["model"]["vocab"].update(zzzzzz=9999)),
        "ids up to 9999, but the model has 4160",
    ),
}  # fmt: skip


@cache
def composition(*overrides: str):
    """Composed once, because this takes longer than the rest of a test."""
    return composed(*small("logger=none", *overrides))


def refusal(*overrides: str, **paths: Path) -> str:
    """The sentence that a run is refused with, built as the command line builds it, with `target.path` or another path
    set."""
    values = OmegaConf.merge(composition(*overrides), {group: {"path": str(path)} for group, path in paths.items()})
    with pytest.raises(ConfigError) as caught:
        build(check(values))
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) < 1200
    return sentence


@pytest.fixture
def changed(good, tmp_path):
    """A function that makes a copy of the good checkpoint, or of another folder, and changes it."""

    def make(change, source=good):
        folder = Path(shutil.copytree(source, tmp_path / "model"))
        change(folder)
        return folder

    return make


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_target_is_refused(name, changed):
    change, expected = BROKEN[name]
    folder = changed(change)
    sentence = refusal("target=model", "drafter=random", target=folder)
    assert sentence.startswith("target.") and str(folder) in sentence and expected in sentence, sentence
    assert "hf auth" not in sentence and not (folder / "ran").exists()


AS_DRAFTER = ("a tensor is missing", "fewer layers than weights", "another vocabulary", "NaN in a weight", "BERT",
              "weights cut in half", "a pickle that runs code", "config.json is a list", "-1 layers",
              "a tokenizer with too many ids", "code of its own", "no weights")  # fmt: skip


@pytest.mark.parametrize("kind, name", [  # the same checks as of a target
    *(slow_unless(place == 0, "model", name) for place, name in enumerate(AS_DRAFTER)), ("multi_draft", AS_DRAFTER[0])
])  # fmt: skip
def test_a_broken_drafter_is_refused(kind, name, good, changed):
    change, expected = BROKEN[name]
    folder = changed(change)
    if kind == "model":
        sentence = refusal("target=model", "drafter=model", target=good, drafter=folder)
    else:
        sentence = refusal("target=model", f"drafter={kind}", f"drafter.paths=[{folder}]", target=good)
    assert sentence.startswith("drafter.") and str(folder) in sentence and expected in sentence, sentence


FINE = {
    "as it is": lambda folder: None,
    "in shards": shards(),
    "as a pickle": binary(),
    "tied": then(config(tie_word_embeddings=True), pop(HEAD)),
    "tied, with both tensors": then(
        config(tie_word_embeddings=True), tensors(lambda s: s.update({HEAD: s[EMBED].clone()}))
    ),
    "in float64": tensors(lambda s: s.update({name: t.double() for name, t in s.items()})),
    "in bfloat16": tensors(lambda s: s.update({name: t.bfloat16() for name, t in s.items()})),
    "GPT-2": other(model_type="gpt2", n_positions=2048),
    "BERT as a decoder": other(**BERT, is_decoder=True),
    "a decoder without a first token": other(
        model_type="pegasus", vocab_size=4160, d_model=16, decoder_layers=2, decoder_ffn_dim=32,
        decoder_attention_heads=4, encoder_layers=2, encoder_attention_heads=4, is_encoder_decoder=False,
    ),
    "no generation config": without("generation_config.json"),
    "a tokenizer without special tokens": content("tokenizer_config.json", "{}"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", only(("in shards", "as a pickle", "tied, with both tensors", "BERT as a decoder"), FINE)
)
def test_a_whole_checkpoint_is_loaded(name, changed):
    folder = changed(FINE[name])
    parts = parts_of("target=model", f"target.path={folder}/", "drafter=model", f"drafter.path={folder}")
    assert parts.target.vocab_size == 4160


def test_a_model_may_be_its_own_drafter(good, tmp_path):
    parts = parts_of("target=model", f"target.path={good}", "drafter=model", f"drafter.path={good}", "temperature=1")
    result, _ = run(parts, tmp_path)
    assert result.alpha.mean == pytest.approx(1, abs=1e-5) and result.lossless.passed


PATHS = {
    "a//b": "is not a model", "..": "no config.json", "a b": "is not a model", "'a/b/'": "is not a model",
    "''": "must be text that is not empty", "/nowhere": "no such folder", "'~/nowhere/at/all'": "no such folder",
    "'{tmp}/loop'": "no such folder", "'{good}/config.json'": "it is a file", "'{tmp}'": "only loop",
    "x" * 300: "is not a model", "shipped:nothing": "no such folder",
    "{good} target.revision=main": "target.revision=main is not possible",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_no_model_is_refused_before_anything_loads(path, good, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    given = f"target.path={path.format(good=good, tmp=tmp_path)}".split(" target.")
    overrides = [given[0], *(f"target.{more}" for more in given[1:])]
    with pytest.raises(ConfigError, match=r"^target\.") as caught:
        check(composed(*small("logger=none", "target=model", *overrides)))
    assert PATHS[path] in str(caught.value)


SHAPES = {
    "vocab_size=0": "target.shape.vocab_size=0",
    "vocab_size=many": "vocab_size",
    "vocab_size=1000": "ids up to 4095",
    "num_hidden_layers=1000000": "target.shape.num_hidden_layers=1000000",
    "num_hidden_layers=-1": "target.shape.num_hidden_layers=-1",
    "num_attention_heads=null": "target.shape",
    "num_attention_heads=1.5": "target.shape",
    "hidden_size=100000000000": "the run needs",
    "hidden_size=1000000": "the run needs",
    "model_type=nope": "target.shape.model_type=nope is not",
    "~model_type": "target.shape.model_type=None is not",
    "+nope=3": "target.shape.nope is not a setting",
}


@pytest.mark.parametrize("value", SHAPES)
def test_a_shape_that_no_model_has_is_refused(value):
    key = value.lstrip("+~")
    mark = value[: len(value) - len(key)]
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
    small_shape = [f"target.shape.{name}={size}" for name, size in tiny.items()]
    sentence = refusal("target=llama3b", "target.chat_template=auto", "target.weights=random", "drafter=random",
                       *small_shape, f"{mark}target.shape.{key}")  # fmt: skip
    assert SHAPES[value] in sentence, sentence


def test_random_weights_have_the_digits_of_the_shape_s_dtype():
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
    words = [f"target.shape.{name}={size}" for name, size in tiny.items()]
    target = parts_of("target=llama3b", "target.weights=random", "drafter=random", "verifier=synthetic", *words).target
    assert target.random_weights and target.dtype == torch.float32
    weights = [*target.stock_module().parameters()]
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert any(weight.std() > 0 for weight in weights)
    once, tied = sum(weight.nbytes for weight in weights), target.stock_module().lm_head.weight.nbytes
    assert target.weight_bytes == pytest.approx((once + tied) / 2, rel=0.01)  # held in 16 bits, a tied one twice


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "t5"])
def test_random_weights_have_the_spread_that_transformers_gives_them(model_type):
    """All numbers come from one block; no two matrices, and no two rows of one, are equal."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 70_000}
    config = CONFIG_MAPPING[model_type](**sizes, bos_token_id=0, eos_token_id=0, dtype="float32")
    loader = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    make = partial(random_module, loader, config, device=torch.device("cpu"), dtype=torch.float32)
    module, same, other = make(0), make(0), make(1)
    for (name, weight), expected in zip(
        module.named_parameters(), loader.from_config(config).parameters(), strict=True
    ):
        values = weight.detach()
        assert torch.equal(values, same.get_parameter(name))
        if values.dim() == 1:  # of norms, and biases
            assert torch.equal(values, expected)
            continue
        error = 5 / values.numel() ** 0.5  # five standard errors
        assert float(values.std()) == pytest.approx(float(expected.detach().std()), rel=error)
        assert abs(float(values.mean())) < error * float(values.std())
        assert not torch.equal(values, other.get_parameter(name)) and len(values.unique(dim=0)) == len(values)
    matrices = [weight.detach().flatten()[:64] for weight in module.parameters() if weight.dim() > 1]
    assert len(torch.stack(matrices).unique(dim=0)) == len(matrices)


def test_random_weights_are_not_drawn_one_by_one():
    """Of a model of billions of them that would take minutes."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    config = CONFIG_MAPPING["llama"](**sizes, dtype="float32")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        random_module(AutoModelForCausalLM, config, 0, torch.device("cpu"), dtype=torch.float32)
    drawn = {event.key: event.count for event in profiled.key_averages() if event.key.endswith(("normal_", "uniform_"))}
    assert drawn == {"aten::normal_": 1}  # the block


def test_weights_that_overflow_in_the_run_s_dtype_are_refused(changed):
    sentence = refusal("target=model", "drafter=random", "dtype=float16", target=changed(put(NORM, 3, 1e5)))
    assert f"not finite in float16, in {NORM}: use dtype=float32" in sentence


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% if %}", "{{ messages[9].content }}", "{{ 1/0 }}"]
)
def test_a_chat_template_that_fails_is_refused_before_models_load(template, changed):
    folder = changed(then(content("chat_template.jinja", template), content(WEIGHTS, "")))
    sentence = refusal("target=model", "drafter=random", target=folder)
    assert sentence.startswith("target.chat_template") and "target.chat_template=never" in sentence


EXTRAS = {
    "a tensor is missing": (pop("up"), "lacks up"),
    "NaN": (put("up", 5, torch.nan), "not finite"),
    "no weights": (without(WEIGHTS), "no weights"),
    "cut": (cut(WEIGHTS, 0.5), f"{WEIGHTS} is damaged"),
    "no heads": (config(heads=0), "heads=0"),
    "more heads than weights": (config(heads=9, accuracy=[]), "other shapes"),
    "accuracy of other heads": (config(accuracy=[[0.5]]), "accuracy"),
    "accuracy that is text": (config(accuracy="high"), "accuracy"),
    "another model": (lambda folder: checkpoint(shutil.rmtree(folder) or folder), "holds no Medusa heads"),
}


@pytest.mark.slow  # tests/drafters/test_published.py has heads of others
@pytest.mark.parametrize("name", EXTRAS)
def test_broken_heads_are_refused(name, changed):
    change, expected = EXTRAS[name]
    folder = changed(change, SHIPPED / "heads")
    sentence = refusal("drafter=medusa", f"drafter.path={folder}")
    assert sentence.startswith(f"drafter.path={folder}") and expected in sentence, sentence
