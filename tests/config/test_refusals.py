"""Wrong inputs of every kind, through the command line: one sentence that names them, exit code 2, nothing left behind;
and text from outside, which never reaches a terminal, a log or a page as it is."""

import json
import logging
import os
from pathlib import Path

import pandas as pd
import pytest
from small_runs import composed, run_main, small

from specbench.config.check import check
from specbench.errors import ConfigError, VisibleFormatter, first_line, shown, visible
from specbench.report.terminal import show, table
from specbench.verifiers.base import SpeculativeVerifier

REFUSED = {  # overrides: what the sentence holds
    "gama=5": "gama is not a setting. Did you mean gamma?",
    "drafter=ngram,bigram": "several values: python -m specbench -m makes a run of each, python -m specbench.compare",
    "--gamma 4": "--gamma is not an option: a setting is given as gamma=4",
    "drafter=ngram --gama=4": "gama is not a setting (settings are given without --, as gamma=4). Did you mean gamma?",
    "report outputs/run --format csv": "of its own: python -m specbench.report outputs/run --format csv",
    "drafter=ngram drafter.max_ordr=3": "Did you mean drafter.max_order",
    "drafter=lama1b": "Did you mean drafter=llama1b, drafter=llama8b? python",
    "drafters=ngram": "drafters is not a setting. Did you mean drafter?",
    "+drafter.depth=3": "drafter.depth is not a setting",
    "gamma=2.5": "gamma=2.5 is not allowed: it must be an integer >= 0",
    "lenience=0": "lenience=0 is not allowed: it must be a number >= 1e-06 and <= 1",
    "dtype=int8": "dtype=int8 is not allowed: it must be one of auto, float32",
    "drafter=ngram drafter.min_order=5": "drafter.min_order=5 is not allowed",
    "drafter=model": "drafter.path is not set: give a local folder, a GGUF file or a hub id",
    "drafter=model drafter.path=a=b": 'needs quotes: \'drafter.path="a=b"\'',
    "drafter=model drafter.path=./nowhere": "drafter.path=./nowhere is not a model",
    "target=model target.path=nobody/nothing": "target.weights=random",
    "target.chat_template=always": "has no chat template",
    "data=jsonl data.path=missing.jsonl": "data.path=missing.jsonl is not a file",
    "data=jsonl data.path={empty.jsonl}": "empty.jsonl is empty: it must be a file of",
    "data=jsonl data.path={long.jsonl} data.field=text": "has no field 'text'",
    "data=jsonl data.path={turns.jsonl} data.field=question": "has no field 'question'",
    "data=questions data.path={turns.jsonl} data.category=art": "it has math",
    "data=questions data.path={long.jsonl}": "has no list of turns",
    "data=jsonl data.path={long.jsonl} logger=none target.path=shipped:drafter drafter=random": "no prompt fits",
    "-m gamma=1,many": "gamma=many is not allowed",
    "executor=cudagraph device=cpu": "needs CUDA, use executor=compiled",
    "executor=compiled cache=dynamic": "use cache=static or cache=paged",
    "batch_size=1000000": "use a smaller batch_size or max_new_tokens",
    "drafter=llama8b target=llama70b target.weights=random drafter.weights=random dtype=float32":
        "use a smaller model, dtype=bfloat16",
    "cache=paged cache.blocks=2 data.limit=1 target.path=shipped:drafter drafter=random": "cache.blocks holds in all",
    "drafter=tree verifier=block":
        "verifier=block is not possible with drafter=tree, which drafts trees: use verifier=iterative",
    "temperature=1 drafter=prompt_lookup verifier=rejection": "guesses have no",
    "drafter=suffix drafter.depth=1": "drafter.depth=1 is not allowed: it must be an integer >= 2",
    "temperature=1 drafter=medusa verifier=greedy_tree":
        "verifier=greedy_tree is not possible with temperature=1: it must be 0, or use verifier=iterative",
    "lenience=0.5 verifier=block": "use verifier=speculative",
    "lenience=0.5 verifier=synthetic":
        "verifier=synthetic is not possible with lenience below 1: use verifier=speculative",
    "drafter=blockwise gamma=6": "trained for at most 4 guesses",
    "drafter=hierarchical drafter@drafter.below=tree":
        "drafter.below._target_=specbench.drafters.tree.TreeDrafter is not possible: it must be a drafter of chains",
    "drafter=multi_draft drafter.paths=[]": "drafter.paths=[] is not allowed",
    "drafter=tree drafter.branching=[2,0]": "drafter.branching=[2, 0] is not allowed",
    "drafter=early_exit drafter.layers=3 drafter.head=null": "drafter.layers=3 is not allowed: it must be from 1 to 2",
    "drafter=tree gamma_policy=entropy": "needs a drafter that is a model",
    "gamma=[1": "gamma=[1",
    "verifier._target_=specbench.drafters.ngram_lm.RandomDrafter": "it must be a subclass of Verifier",
    "verifier.alpha=.5": "not a setting of the chosen verifier. Available: none.",
    "name=../../esc": "name=../../esc is not allowed: it must be the name of a folder inside outputs/",
    "name=a/../../b": "name=a/../../b is not allowed",
    "name=''": "name='' is not allowed",
    "name='a\nb'": "name=a\\nb is not allowed",
    "name=" + "x" * 300: "name=xxxx",
    "gamma=" + "9" * 5000: "gamma=9999",
    "gamma=${oc.env:SPECBENCH_NOT_SET}": "gamma=${oc.env:SPECBENCH_NOT_SET} is not possible: KeyError",
    "gamma='${'": "gamma='${' is not possible",
    "gamma=20000": "gamma=20000 is not allowed: it must be an integer >= 0 and <= 1000",
    "force=2": "force=2 is not allowed: it must be true or false",
    "stop=[null]": "stop=[None] is not allowed",
    "top_k=4097": "top_k=4097 is not allowed: the target has 4096 tokens",
    "data=null": "data=null is not possible",
    "drafter._target_=os.system": "drafter._target_=os.system is not allowed: no such class can be imported",
    "drafter._target_=null": "drafter._target_ is not set",
    "drafter._target_=specbench.drafters.base.Drafter": "it must be a subclass of Drafter that can be built",
    "verifier._target_=test_refusals.Unfinished": "test_refusals.Unfinished cannot be built from its settings",
    "data.count=100000": "data.count=100000 is not possible: this Python's standard library has",
    "device=cpu:1": "device=cpu:1 is not allowed",
    "logger.project=a/b": "logger.project=a/b is not allowed",
    "drafter=tree drafter.branching=[11,10,10]": "drafter.branching=[11, 10, 10] is not allowed: the product",
    "drafter=dynamic_tree drafter.nodes=null": "are chains: use drafter=model",
    "drafter=dynamic_tree drafter.children=independent":
        "drafter.children=independent is not possible with drafter.nodes=16: it must be distinct or best",
    "drafter=tree drafter.branching=[[1]]": "drafter.branching=[[1]] is not allowed: it must be a list",
    "drafter=hierarchical drafter.below._target_=specbench.policies.base.FixedGamma": "must be a subclass of Drafter",
    "drafter=bigram drafter.path=/": "drafter.path=/ is not a file: it must be a text file in UTF-8",
    "-m gamma=1,${nope}": "gamma=${nope} is not allowed: Interpolation key 'nope' not found",
}  # fmt: skip


class Unfinished(SpeculativeVerifier):
    """A verifier whose constructor is not what builds it."""

    @classmethod
    def from_settings(cls, settings, sampling, lenience):
        return cls()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """The files that the overrides above name."""
    folder = tmp_path_factory.mktemp("files")
    texts = {"empty.jsonl": "", "long.jsonl": json.dumps({"prompt": "x = 1\n" * 600}),
             "turns.jsonl": json.dumps({"question_id": 1, "category": "math", "turns": ["1 + 1"]})}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


@pytest.mark.parametrize("overrides", REFUSED)
def test_one_sentence_names_the_key_and_the_value(overrides, files, monkeypatch, capsys, tmp_path):
    """Exit code 2, and nothing is left behind."""
    folder, words = tmp_path / "here" / "below", overrides
    folder.mkdir(parents=True)
    for name, path in files.items():
        words = words.replace(f"{{{name}}}", str(path))
    code, err = run_main(words.split(" "), monkeypatch, capsys, folder)
    told = [line for line in err.splitlines() if line.startswith("specbench:")]
    assert code == 2 and len(told) == 1 and "Traceback" not in err, err
    assert REFUSED[overrides] in told[0] and len(told[0]) < 2100
    assert os.listdir(tmp_path) == ["here"] and not (tmp_path / "here" / "esc").exists()
    assert set(os.listdir(folder)) <= {"outputs", "multirun"}


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "too long a name"])
def test_what_is_no_file_is_refused_before_it_is_opened(kind, tmp_path):
    path = tmp_path / ("x" * (300 if kind == "too long a name" else 3))
    if kind == "dangling link":
        path.symlink_to(tmp_path / "nothing")
    elif kind != "too long a name":
        {"folder": os.mkdir, "pipe": os.mkfifo}[kind](path)
    with pytest.raises(ConfigError, match=r"data\.path=.* (is not a file|cannot be read)"):
        check(composed("data=jsonl", f"data.path={path}"))


HOSTILE = "v2[/b] \x1b[31m\x9b2J\u202e$\\frac{"


def test_hostile_text_reaches_neither_terminal_nor_page(monkeypatch, capsys, tmp_path):
    """One run whose prompts, stop strings and folder hold markup, escapes and mathtext, and its page."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": HOSTILE, "kind": "[/b]$\\frac{"}))
    out = tmp_path / "v2[/b]$x$\\frac{"
    arguments = [f"hydra.run.dir='{out}'", f"data.path={tmp_path / 'p.jsonl'}", "data=jsonl", "logger=none",
                 "data.category_field=kind", "stop=['[/b]']", "data.limit=1"]  # fmt: skip
    code, err = run_main(small(*arguments), monkeypatch, capsys, tmp_path)
    assert code == 0, err
    for text in (err, (out / "page.html").read_text(), (out / "run.log").read_text()):
        assert not set(text) & set("\x1b\x9b\u202e")
    assert "v2[/b] \\x1b[31m\\x9b2J\\u202e$" in (out / "page.html").read_text()


def test_tables_logs_and_errors_show_escapes_as_text(capsys):
    show(table(pd.DataFrame({"[/i]\x1b]0;x\x07": ["[/b]\x1b[2J"]})))
    show(HOSTILE)
    out = capsys.readouterr().out
    assert "[/b]\\x1b[2J" in out and "[/i]\\x1b]0;x" in out and "\x1b" not in out
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", ("x\n[forged]\x1b[2J",), None)
    assert VisibleFormatter("%(message)s").format(record) == "x\\n[forged]\\x1b[2J"
    assert visible("a\tb\u2028\ud800é") == "a\\tb\\u2028\\ud800é" and visible("a\tb\nc\r", layout=True) == "a\tb\nc\\r"
    assert len(shown("x" * 10000)) < 200 and shown(10**5000) == "a number of thousands of digits"
    assert first_line(ValueError("\n\n a. \nb")) == "a" and first_line(KeyError()) == "KeyError"
