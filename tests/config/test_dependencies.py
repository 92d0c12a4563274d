"""A package that is missing or does not fit is named, with its cause and the command that installs it."""

import subprocess
import sys

import pytest
from small_runs import composed

from specbench import drafters
from specbench.config.check import check
from specbench.drafters import ngram_lm
from specbench.errors import ConfigError, answering

MEND = "if a package is missing or does not fit, pip install 'speculative-decoding-bench'"


def test_what_a_class_of_specbench_needs_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, ngram_lm.__name__)
    monkeypatch.delattr(drafters, "ngram_lm")
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    with pytest.raises(ConfigError, match=r"drafter is not possible: .* cannot be imported .*import of torch") as told:
        check(composed("drafter=bigram"))
    assert MEND in str(told.value)


@pytest.mark.parametrize(("module", "cause"), [
    ("needs_more", r"needs_more.Mine cannot be imported \(ModuleNotFoundError: No module named 'absent_package'\)$"),
    ("is_broken", r"is_broken.Mine cannot be imported \(OSError: libabsent.so.1 is missing\)$"),
    ("lacks_it", r"lacks_it.Mine is not allowed: no such class can be imported \(No module named 'lacks_it"),
    ("not_there", r"not_there.Mine is not allowed: no such class can be imported \(No module named 'not_there'\)$"),
])  # fmt: skip
def test_a_class_that_needs_something_and_one_that_is_not_there_are_told_apart(module, cause, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import absent_package\n")
    (tmp_path / "is_broken.py").write_text("raise OSError('libabsent.so.1 is missing')\n")
    (tmp_path / "lacks_it.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=cause):
        check(composed(f"drafter._target_={module}.Mine"))


def test_the_command_says_so_without_hydra():
    code = "import runpy, sys; sys.modules['hydra'] = None; runpy.run_module('specbench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "import of hydra halted" in done.stderr and "pip install 'speculative-decoding-bench'" in done.stderr


def test_a_fault_of_its_own_keeps_its_traceback():
    with pytest.raises(ImportError), answering():
        import specbench.absent  # noqa: F401
