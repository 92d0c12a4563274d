"""Checkpoints: what is loaded whole, and what is refused with one sentence."""

import json
import shutil
from functools import cache
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

from specbench.config.build import build
from specbench.config.check import check
from specbench.errors import ConfigError
from specbench.models import hub

BERT = dict(SIZES, model_type="bert")
SHARD = "model-00002-of-00003.safetensors"
LAYER_1 = "model.layers.1.mlp.up_proj.weight"
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip

BROKEN = {
    "a tensor is missing": (pop(LAYER_1), f"lacks {LAYER_1}"),
    "a tied pair is missing": (then(config(tie_word_embeddings=True), pop(HEAD), pop(EMBED)), "lacks"),
    "a tensor too many": (tensors(lambda state: state.update(extra=torch.ones(3))), "no place for: extra"),
    "fewer layers than weights": (config(num_hidden_layers=1), "no place for: model.layers.1."),
    "another vocabulary": (config(vocab_size=4100), "[4160, 16] for [4100, 16]"),
    "Llama declared as BERT": (content("config.json", json.dumps(BERT)), "lacks"),
    "NaN in a weight": (put(LAYER_1, 7, torch.nan), f"not finite in float32, in {LAYER_1}"),
    "logits overflow": (tensors(lambda s: s.update({HEAD: s[HEAD] * (3e38 / s[HEAD].abs().max())})), "logits"),
    "weights of 0": (tensors(lambda s: s.update({name: 0 * w for name, w in s.items()})), "logits that are all 0"),
    "BERT": (other(**BERT), "is not causal"),
    "no weights": (without(WEIGHTS), "could not be loaded"),
    "weights cut in half": (cut(WEIGHTS, 0.5), "could not be loaded"),
    "a pointer of Git LFS": (content(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "could not be loaded"),
    "a shard is missing": (shards(without(SHARD)), SHARD),
    "a pickle that runs code": (harmful, "could not be loaded"),
    "no config.json": (without("config.json"), "no config.json"),
    "config.json is no JSON": (content("config.json", "{'model_type': llama"), "could not be loaded"),
    "an unknown model type": (config(model_type="nope"), "nope"),
    "heads that do not divide": (config(num_attention_heads=3, head_dim=...), "could not be loaded"),
    "no language model": (content("config.json", '{"model_type": "vit"}'), "is no language model (model_type vit)"),
    "a multimodal model": (content("config.json", '{"model_type": "llava"}'), "a multimodal checkpoint"),
    "a PEFT adapter": (content("adapter_config.json", '{"base_model_name_or_path": "a/b"}'), "it is a PEFT adapter"),
    "a package that is not here": (config(quantization_config={"quant_method": "hqq"}), "install what is missing"),
    "code of its own": (config(model_type="own", auto_map={"AutoConfig": "own.C"}), "trust_remote_code"),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "could not be loaded (tokenizer"),
    "tokenizer.json is cut": (cut("tokenizer.json", 0.5), "could not be loaded (tokenizer"),
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
    """The sentence that a run is refused with, by the command line, with `target.path` or another path."""
    values = OmegaConf.merge(composition(*overrides), {group: {"path": str(path)} for group, path in paths.items()})
    with pytest.raises(ConfigError) as caught:
        build(check(values))
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1 and len(sentence) < 1200
    return sentence


@pytest.fixture
def changed(good, tmp_path):
    """A function that makes a copy of the good checkpoint, and changes it."""

    def make(change):
        folder = Path(shutil.copytree(good, tmp_path / "model"))
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


AS_DRAFTER = ("a tensor is missing", "NaN in a weight", "BERT", "a pickle that runs code", "code of its own")


@pytest.mark.parametrize("name", [slow_unless(place < 2, name) for place, name in enumerate(AS_DRAFTER)])
def test_a_broken_drafter_is_refused(name, good, changed):
    change, expected = BROKEN[name]
    folder = changed(change)
    sentence = refusal("target=model", "drafter=model", target=good, drafter=folder)
    assert sentence.startswith("drafter.") and str(folder) in sentence and expected in sentence, sentence


FINE = {
    "as it is": lambda folder: None,
    "in shards": shards(),
    "as a pickle": binary(),
    "tied, with both tensors": then(
        config(tie_word_embeddings=True), tensors(lambda s: s.update({HEAD: s[EMBED].clone()}))
    ),
    "in float64": tensors(lambda s: s.update({name: t.double() for name, t in s.items()})),
    "GPT-2": other(model_type="gpt2", n_positions=2048),
    "BERT as a decoder": other(**BERT, is_decoder=True),
    "no generation config": without("generation_config.json"),
}


@pytest.mark.parametrize("name", only(("in shards", "as a pickle", "tied, with both tensors"), FINE))
def test_a_whole_checkpoint_is_loaded(name, changed):
    folder = changed(FINE[name])
    parts = parts_of("target=model", f"target.path={folder}/", "drafter=model", f"drafter.path={folder}")
    assert parts.target.vocab_size == 4160


PATHS = {
    "a//b": "is not a model", "..": "no config.json", "a b": "is not a model", "/nowhere": "no such folder",
    "'{good}/config.json'": "no such folder", "'{tmp}'": "no config.json", "shipped:nothing": "no such folder",
    "{good} target.revision=main": "target.revision=main",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_no_model_is_refused_before_anything_loads(path, good, tmp_path):
    given = f"target.path={path.format(good=good, tmp=tmp_path)}".split(" target.")
    overrides = [given[0], *(f"target.{more}" for more in given[1:])]
    with pytest.raises(ConfigError, match=r"^target\.") as caught:
        check(composed(*small("logger=none", "target=model", *overrides)))
    assert PATHS[path] in str(caught.value)


SHAPES = {
    "vocab_size=1000": "ids up to 4095",
    "num_attention_heads=null": "target.",
    "hidden_size=1000000": "the run needs",
    "model_type=nope": "target.shape.model_type=nope is not",
    "+nope=3": "target.shape.nope is not a setting",
}


@pytest.mark.parametrize("value", SHAPES)
def test_a_shape_that_no_model_has_is_refused(value):
    key = value.lstrip("+")
    sizes = [f"target.shape.{name}={size}" for name, size in TINY.items()]
    sentence = refusal("target=llama3b", "target.chat_template=auto", "target.weights=random", "drafter=random",
                       *sizes, f"{value[: len(value) - len(key)]}target.shape.{key}")  # fmt: skip
    assert SHAPES[value] in sentence, sentence


def test_weights_that_overflow_in_the_run_s_dtype_are_refused(changed):
    sentence = refusal("target=model", "drafter=random", "dtype=float16", target=changed(put(NORM, 3, 1e5)))
    assert f"not finite in float16, in {NORM}: use dtype=float32" in sentence


def test_a_hub_that_does_not_answer_is_said_at_once(monkeypatch, tmp_path):
    """Its own library would try again for half a minute; another port of this machine answers nobody."""
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    hub.hub_answers.cache_clear()
    for given in ("./a/b", str(tmp_path), "a/b/c", "shipped:target"):
        hub.refuse_unreachable("target", given)
    with pytest.raises(ConfigError, match="meta-llama/none is not on this machine"):
        hub.refuse_unreachable("target", "meta-llama/none")
    assert hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "proxy"})
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    hub.hub_answers.cache_clear()
    hub.refuse_unreachable("target", "meta-llama/none")  # the control
    hub.hub_answers.cache_clear()
