"""Every option composes; every mistake is one sentence that names it, with exit code 2."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from small_runs import composed, run_main

from specbench.config.devices import pick_device
from specbench.config.paths import conf_dir
from specbench.config.validate import check
from specbench.errors import ConfigError
from specbench.run_config import GROUPS, Role, with_role

NEEDS = {"target=model": "target.path=gpt2", "drafter=model": "drafter.path=gpt2",
         "data=hub": "data.path=org/name", "verifier=greedy_tree": "temperature=0",
         "baseline=server": "baseline.url=http://localhost:8000"}  # fmt: skip
REFUSED = {  # options that are right, but not in such a run
    "gamma_policy=oracle": r"specbench\.replay",
    "gamma_policy=known_betas": r"specbench\.replay",
    "drafter=mtp": "shipped:target, which holds no multi-token-prediction module",
    **({} if torch.cuda.is_available() else {"executor=cudagraph": "needs CUDA"}),
    **({} if importlib.util.find_spec("openvino") else {"executor=openvino": "install it with pip"}),
}
NO_FILE = ("data=stdlib", "data=hub", "data=docstrings", "data=unconditional", "data=librispeech")
OPTIONS = [
    f"{group}={file.stem}"
    for group in (*GROUPS, "metric", "experiment")
    for file in sorted((conf_dir() / group).glob("*.yaml"))
]


@pytest.fixture
def prompts_file(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "def f():", "turns": ["def f():"]}) + "\n")
    return path


@pytest.mark.parametrize("option", OPTIONS)
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


def test_the_digest_ignores_what_numbers_do_not_depend_on():
    digest = check(composed()).digest
    assert check(composed("name=other", "logger=none", "force=true")).digest == digest
    assert check(composed("gamma=6")).digest != digest


def files(folder: Path) -> dict[str, Path]:
    """The files that the bad inputs below refer to by name."""
    texts = {
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
        "list.jsonl": "[1, 2]\n",
        "long.jsonl": json.dumps({"prompt": "x = 1\n" * 600}),
        "twice.jsonl": '{"question_id": 1, "turns": ["a"]}\n' * 2,
        "turns.jsonl": json.dumps({"question_id": 1, "category": "math", "turns": ["1 + 1"]}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


BAD = {
    "a typo in a key": (["gama=5"], "gama is not a setting. Did you mean gamma?"),
    "a typo in a group's key": (["drafter=ngram", "drafter.windw=3"], "Did you mean drafter.window?"),
    "an unknown option": (["drafter=lama1b"], "Did you mean drafter=llama1b? Available: drafter=bigram"),
    "an unknown group": (["drafters=ngram"], "drafters is not a setting. Did you mean drafter?"),
    "an added key": (["+drafter.depth=3"], "drafter.depth is not a setting"),
    "text for a number": (["gamma=many"], "gamma=many is not allowed: it must be an integer >= 0"),
    "a fraction for an integer": (["gamma=2.5"], "gamma=2.5 is not allowed: it must be an integer >= 0"),
    "a truth value for an integer": (["gamma=true"], "gamma=True is not allowed: it must be an integer >= 0"),
    "a negative gamma": (["gamma=-1"], "gamma=-1 is not allowed: it must be an integer >= 0"),
    "lenience zero": (["lenience=0"], "lenience=0.0 is not allowed: it must be a number >= 1e-06 and <= 1"),
    "lenience above one": (["lenience=1.5"], "lenience=1.5 is not allowed"),
    "a negative temperature": (["temperature=-0.1"], "temperature=-0.1 is not allowed: it must be 0 or a number"),
    "top_p zero": (["top_p=0"], "top_p=0.0 is not allowed"),
    "batch size zero": (["batch_size=0"], "batch_size=0 is not allowed: it must be an integer >= 1"),
    "an unknown dtype": (["dtype=int8"], "dtype=int8 is not allowed: it must be one of auto, float32"),
    "an unknown device": (["device=tpu"], "device=tpu is not allowed: it must be auto, cpu, cuda or cuda:N"),
    "orders that cross": (["drafter=ngram", "drafter.min_order=5"], "drafter.min_order=5 is not allowed"),
    "a model without a path": (["drafter=model"], "drafter.path is not set: give a local folder or a hub id"),
    "a folder with = in its name": (["drafter=model", "drafter.path=a=b"], "needs quotes: 'drafter.path=\"a=b\"'"),
    "a folder that is no model": (["drafter=model", "drafter.path=./nowhere"], "drafter.path=./nowhere is not a model"),
    "a hub model that cannot be had": (["target=model", "target.path=nobody/nothing"], "target.weights=random"),
    "a chat template that is not there": (["target.chat_template=always"], "has no chat template"),
    "a missing file": (["data=jsonl", "data.path=missing.jsonl"], "data.path=missing.jsonl is not a file"),
    "an empty file": (["data=jsonl", "data.path={empty.jsonl}"], "empty.jsonl is empty: it must be a file of"),
    "a file of blank lines": (["data=jsonl", "data.path={blank.jsonl}"], "holds only blank lines"),
    "a malformed line": (["data=jsonl", "data.path={broken.jsonl}"], "line 2 is not JSON"),
    "a line that is no object": (["data=jsonl", "data.path={list.jsonl}"], "line 1 is not a JSON object"),
    "a missing field": (["data=jsonl", "data.path={long.jsonl}", "data.field=text"], "has no field 'text'"),
    "a missing template field": (["data=jsonl", "data.path={long.jsonl}", "data.template='{q}'"], "has no field 'q'"),
    "a missing category": (["data=questions", "data.path={turns.jsonl}", "data.category=art"], "it has math"),
    "an id that occurs twice": (["data=questions", "data.path={twice.jsonl}"], "two prompts with the id 1"),
    "no question file": (["data=questions", "data.path={long.jsonl}"], "has no list of turns"),
    "a prompt longer than the context": (["data=jsonl", "data.path={long.jsonl}"], "no prompt fits"),
    "a limit of zero": (["data.limit=0"], "data.limit=0 is not allowed: it must be"),
    "a bad job in a sweep": (["-m", "gamma=1,many"], "gamma=many is not allowed"),
    "graphs without CUDA": (["executor=cudagraph", "device=cpu"], "needs CUDA, use executor=compiled"),
    "a cache without fixed shapes": (["executor=compiled", "cache=dynamic"], "use cache=static or cache=paged"),
    "more than the memory": (["batch_size=1000000"], "use a smaller batch_size or max_new_tokens"),
    "a model too large": (["drafter=llama8b", "target=llama70b", "target.weights=random", "drafter.weights=random",
                           "dtype=float32"], "use a smaller model, dtype=bfloat16, executor=eager"),
    "blocks that hold no request": (["cache=paged", "cache.blocks=2", "data.limit=1"], "cache.blocks holds in all"),
    "a synthetic rate above one": (["verifier=synthetic", "verifier.alpha=1.2"], "verifier.alpha=1.2 is not allowed"),
    "no room to read": (["prefill_chunk=0"], "prefill_chunk=0 is not allowed: it must be an integer >= 1"),
    "a tree for a verifier of chains": (["drafter=tree", "verifier=block"],
        "verifier=block is not possible with drafter=tree, which drafts trees: use verifier=iterative"),
    "rejection sampling without a law": (["drafter=prompt_lookup", "verifier=rejection"], "guesses have no law"),
    "a greedy walk that samples": (["drafter=medusa", "verifier=greedy_tree"],
        "verifier=greedy_tree is not possible with temperature=1: it must be 0, or use verifier=iterative"),
    "lenience with another rule": (["lenience=0.5", "verifier=block"], "use verifier=speculative"),
    "lenience where rates are given": (
        ["lenience=0.5", "verifier=synthetic"],
        "verifier=synthetic is not possible with lenience below 1: use verifier=speculative",
    ),
    "lenience that follows the load": (["lenience_policy=load", "drafter=tree"], "use verifier=speculative"),
    "more guesses than heads": (["drafter=blockwise", "gamma=6"], "trained for at most 4 guesses"),
    "heads that are not there": (["drafter=medusa", "drafter.heads=./nowhere"], "python -m specbench.train"),
    "a tree below a chain": (["drafter=hierarchical", "drafter@drafter.below=tree"],
        "drafter.below._target_=specbench.drafters.tree.TreeDrafter is not possible: it must be a drafter of chains"),
    "a mistake below": (["drafter=hierarchical", "drafter.below.window=0"], "drafter.below.window=0 is not allowed"),
    "no draft at all": (["drafter=multi_draft", "drafter.paths=[]"], "drafter.paths=[] is not allowed"),
    "a tree without children": (["drafter=tree", "drafter.branching=[2,0]"], "drafter.branching=0 is not allowed"),
    "an unknown way to draw": (["drafter=tree", "drafter.children=all"], "one of independent, distinct, best"),
    "an exit after the last layer": (["drafter=early_exit", "drafter.layers=3", "drafter.head=null"],
        "drafter.layers=3 is not allowed: it must be from 1 to 2"),
    "a head for another exit": (["drafter=early_exit", "drafter.layers=2"], "it was trained for 1 layers"),
    "a tree that ends early": (["drafter=tree", "gamma_policy=entropy"], "needs a drafter that is a model"),
    "a drafter hotter than hot": (["drafter.temperature=-1"], "drafter.temperature=-1.0 is not allowed"),
    "broken grammar": (["gamma=[1"], "gamma=[1"),
    "a metric that is not in a list": (["metrics=calibration"], "choose metrics with metric=[NAME,NAME]"),
    "a class that is not there": (["verifier._target_=specbench.nothing.X"], "no such class can be imported"),
    "a class of another group": (["verifier._target_=specbench.drafters.random.RandomDrafter"],
                                 "it must be a subclass of Verifier"),
    "a setting of another option": (["verifier.alpha=.5"], "not a setting of the chosen verifier. Available: none."),
    "an unknown metric": (["metric=[calibration,nothing]"], "metric=nothing is not a choice"),
    "a metric without bins": (["metric=calibration", "metrics.calibration.bins=0"],
        "metrics.calibration.bins=0 is not allowed: it must be an integer >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(name, monkeypatch, capsys, tmp_path):
    arguments, expected = BAD[name]
    for file, path in files(tmp_path).items():
        arguments = [a.replace(f"{{{file}}}", str(path)) for a in arguments]
    code, err = run_main([*arguments, "logger=none"], monkeypatch, capsys, tmp_path)
    lines = [line for line in err.splitlines() if line.startswith("specbench:")]
    assert code == 2, err
    assert len(lines) == 1 and expected in lines[0]
    assert "Traceback" not in err


def test_different_tokenizers_are_refused_by_name(monkeypatch, capsys, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)).save_pretrained(folder)  # fmt: skip
    vocabulary = {c: i for i, c in enumerate("abcdefgh")}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[]))).save_pretrained(folder)
    arguments = ["drafter=model", f"drafter.path={folder}", "logger=none"]
    code, err = run_main(arguments, monkeypatch, capsys, tmp_path)
    assert code == 2
    assert "target.path=shipped:target" in err and f"drafter.path={folder}" in err and "must share one" in err


def test_the_message_survives_a_real_process(tmp_path):
    """What the tests above see in one process, a shell sees too."""
    call = [sys.executable, "-m", "specbench", "gama=5"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert done.returncode == 2
    assert done.stderr.strip().startswith("specbench: gama is not a setting.")
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_lists_the_choices(tmp_path):
    done = subprocess.run([sys.executable, "-m", "specbench", "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "prompt_lookup" in done.stdout and "python -m specbench drafter=llama1b" in done.stdout


def test_gzipped_lines_templates_and_categories(tmp_path):
    from specbench.data.prompts import load
    from specbench.data.records import JsonlData

    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as out:
        for i in range(3):
            out.write(json.dumps({"question": f"{i}?", "kind": "k"}) + "\n")
    data = JsonlData(JsonlData.Settings(path=str(path), field="prompt", template="Q: {question}\nA:",
                                        category_field="kind", limit=2))  # fmt: skip
    found = load(data)
    assert [p.turns[0] for p in found] == ["Q: 0?\nA:", "Q: 1?\nA:"]
    assert {p.category for p in found} == {"k"}


def test_a_local_hub_data_set(tmp_path):
    from specbench.data.prompts import load
    from specbench.data.records import HubData

    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    settings = dict(name=None, split="test", field="q", template=None, category_field=None, limit=None)
    found = load(HubData(HubData.Settings(path=str(tmp_path / "set"), **settings)))
    assert [p.turns[0] for p in found] == ["one", "two"]
    with pytest.raises(ConfigError, match=r"data\.path=.*could not be loaded"):
        load(HubData(HubData.Settings(path=str(tmp_path / "none"), **settings)))


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


def test_what_depends_on_a_setting():
    """A new scalar without a role is one that all depends on, but what is loaded."""
    labels, pooled = {*with_role(Role.LABEL)}, {*with_role(Role.LABEL | Role.POOLED)}
    assert labels == {"name", "force", "strict", "logger", "experiment"} < pooled
    assert "temperature" not in {*pooled, *with_role(Role.DRAFTING | Role.UNTRACED)}
    plain = check(composed("logger=none"))
    assert check(composed("strict=true", "force=true", "name=x")).digest == plain.digest
    for words in ("gamma=5", "seed=1", "lenience=0.9"):
        assert check(composed("logger=none", words)).digest != plain.digest
    assert check(composed("logger=none", "order=5", "seed=1")).traced() == plain.traced()
    assert check(composed("logger=none", "temperature=0")).traced() != plain.traced()
