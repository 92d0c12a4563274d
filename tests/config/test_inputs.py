"""Wrong inputs of every kind, through the command line: one sentence that names them, exit code 2, nothing left behind;
and text from outside, which never reaches a terminal, a log or a page as it is."""

import gzip
import json
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib import pyplot as plt
from rich.table import Table
from small_runs import composed, run_main, small
from transformers import AutoTokenizer

import specbench
import specbench.results.report.command as report
import specbench.run.replay_command as replay
from specbench.config.components import timed_gammas
from specbench.config.validate import check
from specbench.data.prompts import Prompt, load, render
from specbench.data.records import JsonlData
from specbench.errors import ConfigError, VisibleFormatter, first_line, shown, visible
from specbench.policies.gamma.fixed import FixedGamma
from specbench.results.reader import StoredRun
from specbench.results.report.html_page import Drawing, FigureFolder
from specbench.results.report.style import save_figure
from specbench.results.report.sweep_figures import heat_maps
from specbench.results.terminal import show
from specbench.run import replay_policies as replayed

REFUSED = {  # an override: what the sentence begins with
    "name=../../esc": "name=../../esc is not allowed: it must be the name of a folder inside outputs/",
    "name=/tmp/esc": "name=/tmp/esc is not allowed",
    "name=a/../../b": "name=a/../../b is not allowed",
    "name=''": "name='' is not allowed",
    "name=.": "name=. is not allowed",
    "name='a\nb'": "name=a\\nb is not allowed",
    "name=" + "x" * 300: "name=xxxx",
    "name=${nope}": "name=${nope} is not possible: Interpolation key 'nope' not found",
    "gamma=${gamma}": "gamma=${gamma} is not possible: Recursive interpolation",
    "gamma=${oc.env:SPECBENCH_NOT_SET}": "gamma=${oc.env:SPECBENCH_NOT_SET} is not possible: KeyError",
    "gamma='${'": "gamma='${' is not possible",
    "gamma=" + "9" * 5000: "gamma=9999",
    "gamma=[1]": "gamma=[1] is not allowed: it must be an integer",
    "gamma=null": "gamma=null is not allowed",
    "gamma=20000": "gamma=20000 is not allowed: it must be an integer >= 0 and <= 1000",
    "gamma=600": "gamma=600 is not possible: the target's context is 512 tokens",
    "gamma=300": "gamma=300 with up to 300 guesses a round is not possible: warm-up alone would read",
    "force=2": "force=2 is not allowed: it must be true or false",
    "stop=['']": "stop='' is not allowed",
    "stop=[null]": "stop=null is not allowed",
    "top_k=4097": "top_k=4097 is not allowed: the target has 4096 tokens",
    "drafter.top_k=4097": "drafter.top_k=4097 is not allowed: the target has 4096 tokens",
    "data=null": "data=null is not possible",
    "drafter._target_=os.system": "drafter._target_=os.system is not allowed: no such class can be imported",
    "drafter._target_=null": "drafter._target_ is not set",
    "drafter._target_=[a]": "drafter._target_=['a'] is not allowed: it must be the name of a class",
    "drafter._target_=specbench.decoding.drafter.Drafter": "drafter._target_=specbench.decoding.drafter.Drafter is not",
    "verifier._target_=specbench.policies.lenience.load.VerifierUnderLoad": "verifier._target_=specbench.policies.lenience",  # noqa: E501
    "metrics=5": "metrics=5 is not allowed",
    "data.count=100000": "data.count=100000 is not possible: this Python's standard library has",
    "device=cpu:1": "device=cpu:1 is not allowed",
    "logger.project=a/b": "logger.project=a/b is not allowed",
    "logger.tags=[a,a]": "logger.tags=['a', 'a'] is not allowed",
}
REFUSED_TOGETHER = {  # overrides that only together are wrong, or that need a group
    "executor=eager executor._target_=specbench.decoding.executor.Executor": "Executor is not allowed: choose",
    "workload=poisson workload.rate=1e-6": "the workload's last request of 32 would arrive after",
    "drafter=tree drafter.branching=[1000]": "gamma=4 with up to 4,000 guesses a round is not possible",
    "drafter=tree drafter.branching=[11,10,10]": "drafter.branching=[11, 10, 10] is not allowed: the product",
    "drafter=tree drafter.branching=[[1]]": "drafter.branching=[1] is not allowed: it must be a list of integers",
    "drafter=hierarchical drafter.below=null": "drafter.below is not set",
    "drafter=hierarchical drafter.below._target_=specbench.verifiers.match.MatchVerifier": "must be a subclass of Draf",
    "drafter=multi_draft drafter.paths=[shipped:nope]": "drafter.paths=shipped:nope is not a model",
    "drafter=bigram drafter.path=/": "drafter.path=/ is not a file: it must be a text file in UTF-8",
    "-m gamma=1,${nope}": "gamma=${nope} is not allowed: Interpolation key 'nope' not found",
    "-m name=a,../../esc": "name=../../esc is not allowed",
}


@pytest.mark.parametrize("arguments", [*([one] for one in REFUSED), *(both.split() for both in REFUSED_TOGETHER)])
def test_one_sentence_names_the_key_and_the_value(arguments, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "here" / "below"
    folder.mkdir(parents=True)
    code, err = run_main(arguments, monkeypatch, capsys, folder)
    told = [line for line in err.splitlines() if line.startswith("specbench:")]
    assert code == 2 and len(told) == 1 and "Traceback" not in err, err
    assert {**REFUSED, **REFUSED_TOGETHER}[" ".join(arguments)] in told[0] and len(told[0]) < 2100
    assert os.listdir(tmp_path) == ["here"] and not (tmp_path / "here" / "esc").exists()
    assert set(os.listdir(folder)) <= {"outputs", "multirun"}


def prompt(text) -> bytes:
    return json.dumps({"prompt": text}).encode()


FILES = {  # bytes of a data file: what the sentence holds
    b"\xef\xbb\xbf" + prompt("a"): None,
    gzip.compress(prompt("a"), mtime=0): None,
    prompt("a").replace(b"a", b"\xe9"): "line 1 is not UTF-8",
    '{"prompt": "a"}'.encode("utf-16"): "line 1 is not UTF-8 (byte 1)",
    random.Random(0).randbytes(64).replace(b"\n", b" ") + b"\xff": "line 1 is not",
    gzip.compress(prompt("a" * 999), mtime=0)[:-9]: "cannot be read after line",
    gzip.compress(prompt("a"), mtime=0)[:-8] + bytes(8): "CRC check failed",
    b"\x1f\x8b": "cannot be read after line 0",
    prompt("a") + b"\n" + b'{"n": ' + b"9" * 10000 + b"}": "line 2 is not allowed: an integer of 10000 digits",
    b'{"prompt": ' + b"[" * 99999: "line 1 is not allowed: its values are nested too deeply",
    b'{"prompt": "\\ud800"}': "record 1 field 'prompt' holds half of a surrogate pair",
    b'{"prompt": NaN}': "line 1 is not allowed: NaN is not a number",
    prompt("a") + b"\n\n" + prompt(None): "record 3 field 'prompt' is null, not text",
    prompt(["a"]): "is a list, not text",
    prompt({"a": "b"}): "is an object, not text",
    prompt(True): "is true or false, not text",
    prompt(5): "is a number, not text",
    prompt(" \n"): "is empty: a prompt must be text that is not blank",
    b" \n\n": "holds only blank lines",
}


@pytest.mark.parametrize("content", FILES, ids=lambda content: repr(content[:20]))
def test_a_data_file_is_read_or_told_by_line(content, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    settings = JsonlData.Settings(str(path), "prompt", None, None, None)
    if FILES[content] is None:
        assert [p.turns for p in load(JsonlData(settings))] == [("a",)]
        return
    with pytest.raises(ConfigError) as told:
        load(JsonlData(settings))
    assert FILES[content] in str(told.value) and str(path) in str(told.value)


QUESTIONS = {
    '{"question_id": null, "turns": ["a"]}': "line 1 question_id is null",
    '{"question_id": "\\u001b[2J", "turns": ["a"]}': r"line 1 question_id is \x1b[2J",
    '{"turns": ["a", ""]}': "line 1 turn 2 is empty",
    '{"turns": [["a"]]}': "line 1 turn 1 is a list",
    '{"turns": ["a"], "category": {}}': "line 1 category is an object",
    '{"question_id": 1, "turns": ["a"]}\n{"question_id": "1", "turns": ["b"]}': "line 2 and line 1 are two prompts",
}


@pytest.mark.parametrize("lines", QUESTIONS)
def test_a_question_file_is_told_by_line(lines, tmp_path):
    (tmp_path / "q.jsonl").write_text(lines)
    data = check(composed("data=questions", f"data.path={tmp_path / 'q.jsonl'}")).choices["data"]
    with pytest.raises(ConfigError) as told:
        load(data.kind.from_settings(data.settings))
    assert QUESTIONS[lines] in str(told.value)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "too long a name"])
def test_what_is_no_file_is_refused_before_it_is_opened(kind, tmp_path):
    path = tmp_path / ("x" * (300 if kind == "too long a name" else 3))
    {"folder": os.mkdir, "pipe": os.mkfifo, "dangling link": lambda p: os.symlink(tmp_path / "nothing", p)}.get(
        kind, lambda p: None
    )(path)
    with pytest.raises(ConfigError, match=r"data\.path=.* (is not a file|cannot be read)"):
        check(composed("data=jsonl", f"data.path={path}"))


TRAINING = {
    "+nonsense=1": "nonsense is not a setting",
    "method._target_=specbench.drafters.random.RandomDrafter": "must be a subclass of Student",
    "method.learning_rate=inf": "method.learning_rate=inf is not allowed",
    "epochs=1e-320": "epochs=1e-320 is not allowed",
    "row=100000": "row=100000 is not possible: the context of shipped:target is 512 tokens",
    "tokens=${row}": None,
}


@pytest.mark.parametrize("override", TRAINING)
def test_training_is_checked_as_runs_are(override):
    from small_runs import training

    from specbench.contrib.training.trainer import checked_settings as check_training

    if TRAINING[override] is None:
        assert check_training(training(override))[0].tokens == 256
        return
    with pytest.raises(ConfigError) as told:
        check_training(training(override))
    assert TRAINING[override] in str(told.value)


@pytest.mark.parametrize("overrides", [
    ["temperature=0"], ["gamma_policy=fixed", "gamma_policy=oracle"], ["+gamma_policy.x=1"], ["x"],
])  # fmt: skip
def test_replay_refuses_what_cannot_apply(overrides, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        replay.main([str(tmp_path), *overrides])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.startswith("specbench: ") and overrides[0] in err


@pytest.mark.parametrize(("names", "overrides", "told"), [
    ("optimal", ["gamma=3"], "gamma=... cannot apply to gamma_policy=optimal"),
    ("optimal", ["gamma_policy.prior=3"], "gamma_policy.prior is not a setting of the chosen gamma_policy"),
    ("adaptive", ["gamma_policy.largest=50"], "gamma_policy.largest=50 is not possible: this run's rounds"),
    ("nope", [], "gamma_policy=nope is not a choice"),
])  # fmt: skip
def test_replay_names_the_setting_that_no_policy_has(names, overrides, told, monkeypatch):
    monkeypatch.setattr(replayed, "build_policy", lambda config, trace: None)
    with pytest.raises(ConfigError) as error:
        list(replayed.policies(SimpleNamespace(largest=4), [names], overrides))
    assert told in str(error.value)


def test_large_gammas_are_timed_on_a_thin_grid():
    gammas = timed_gammas(FixedGamma(300), fixed_shapes=False)
    assert gammas[:21] == [*range(1, 21), 30] and gammas[-1] == 300 and len(gammas) < 30
    assert timed_gammas(FixedGamma(300), fixed_shapes=True) == [300]
    assert timed_gammas(FixedGamma(0), fixed_shapes=False) == [0]


HOSTILE = "v2[/b] \x1b[31m\x9b2J\u202e$\\frac{"


def test_hostile_text_reaches_neither_terminal_nor_page(monkeypatch, capsys, tmp_path):
    """One run whose prompts, stop strings and folder hold markup, escapes and mathtext, and its page."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": HOSTILE, "kind": "[/b]$\\frac{"}))
    out = tmp_path / "v2[/b]$x$\\frac{"
    arguments = [f"hydra.run.dir='{out}'", f"data.path={tmp_path / 'p.jsonl'}", "data=jsonl", "logger=none",
                 "data.category_field=kind", "stop=['[/b]']", "data.limit=1"]  # fmt: skip
    code, err = run_main(small(*arguments), monkeypatch, capsys, tmp_path)
    assert code == 0, err
    report.main([str(out)])
    assert "v2[/b]$x$" in capsys.readouterr().out
    for text in (err, (out / "report.html").read_text(), (out / "run.log").read_text()):
        assert not set(text) & set("\x1b\x9b\u202e")
    assert "v2[/b] \\x1b[31m\\x9b2J\\u202e$" in (out / "report.html").read_text()


def test_a_table_shows_markup_and_escapes_as_text(capsys):
    table = Table(title=HOSTILE)
    table.add_column("[/i]\x1b]0;x\x07")
    table.add_row("[/b]\x1b[2J")
    show(table)
    out = capsys.readouterr().out
    assert "[/b]\\x1b[2J" in out and "[/i]\\x1b]0;x" in out and "\x1b" not in out


def test_a_log_record_is_one_line():
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", ("x\n[forged]\x1b[2J",), None)
    assert VisibleFormatter("%(message)s").format(record) == "x\\n[forged]\\x1b[2J"


def test_words_of_errors_are_short_and_visible():
    assert visible("a\tb\u2028\ud800é") == "a\\tb\\u2028\\ud800é" and visible("a\tb\nc\r", layout=True) == "a\tb\nc\\r"
    assert len(shown("x" * 10000)) < 200 and shown(10**5000) == "a number of thousands of digits"
    assert first_line(ValueError("\n\n a. \nb")) == "a" and first_line(KeyError()) == "KeyError"


def test_figures_of_dotted_keys_do_not_overwrite_each_other(tmp_path):
    figures = FigureFolder(tmp_path)
    for name in ("heat_drafter.path_data.path", "heat_drafter.path_data.limit", "heat_a/b", "heat_a_b"):
        figures.draw(Drawing(name, "", plt.figure))
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "heat_drafter.path_data.path.png", "heat_drafter.path_data.limit.png", "heat_a_b.png", "heat_a_b-2.png",
    }  # fmt: skip


def test_a_swept_value_is_no_mathtext(tmp_path):
    keys = {"data.path": HOSTILE, "drafter.path": "$\\nope{$"}
    runs = [StoredRun(tmp_path, {"alpha": {"mean": 0.5}}, keys)]
    svg = save_figure(lambda: heat_maps(runs, "data.path", "drafter.path", "alpha/mean", "alpha"), tmp_path / "map")
    assert "$\\nope{$" in svg and not set(svg) & set("\x1b\x9b\u202e")


def test_a_long_prompt_has_no_warning_of_transformers():
    """The run itself says which requests do not fit."""
    said, tokenizer = [], AutoTokenizer.from_pretrained(Path(specbench.__file__).parent / "shipped" / "target")
    tokenizer.model_max_length = 8
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        assert len(render(Prompt("a", ("x = 1\n" * 9,)), [], tokenizer, chat=False).tokens) > 8 and not said
        tokenizer("x = 1\n" * 9)
        assert "Token indices sequence length is longer" in said[0]  # so the handler hears it
    finally:
        logger.removeHandler(handler)
