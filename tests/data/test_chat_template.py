"""Chat templates are programs of others: they run in a process that is ended when they take too long or too much."""

import pytest
from transformers import AutoTokenizer

from specbench.data import chat_template
from specbench.data.chat_template import TemplateError
from specbench.data.prompts import Prompt, chat_text, render
from specbench.data.sources import SHIPPED
from specbench.errors import ConfigError

PLAIN = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
HOSTILE = {
    "a loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "did not end within"),
    "a long text": ("{{ 'a' * 40000000 }}", "more than 16,777,216 characters"),
    "doubling": ("{% set ns = namespace(s='aa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
                 "bytes of memory"),
    "an escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    found = AutoTokenizer.from_pretrained(SHIPPED / "drafter")
    found.chat_template = PLAIN
    return found


def test_texts_are_those_of_the_tokenizer(tokenizer):
    asked = [{"role": "user", "content": "é {{x}}\u2028\n"}, {"role": "assistant", "content": ""}]
    expected = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert chat_text(tokenizer, asked) == expected != tokenizer.apply_chat_template(asked, tokenize=False)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("a long text", "doubling"))) for kind in HOSTILE]
)
def test_a_template_that_takes_too_much_is_a_sentence(kind, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3 if kind == "a loop" else 60.0)
    template, why = HOSTILE[kind]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ConfigError, match=f"target.chat_template is not possible with prompt p .*{why}"):
        render(Prompt("p", ("x",)), [], tokenizer, True)
    monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    assert render(Prompt("p", ("x",)), [], tokenizer, True).text.endswith("<user>xTrue")  # the next one is rendered


@pytest.mark.slow
def test_an_interruption_leaves_no_answer_for_the_next_text():
    """Nor has the process begun that was interrupted at its beginning. The text was sent, so its answer would come
    first."""
    renderer = chat_template.Renderer()
    read = renderer._line

    def interrupted(seconds):
        raise KeyboardInterrupt

    for text in ("second", "third"):
        renderer._line = interrupted
        with pytest.raises(KeyboardInterrupt):
            renderer.render("first", [], {})
        renderer._line = read
        assert renderer.render(text, [], {}) == text
    renderer._end()


@pytest.mark.slow
def test_a_process_that_dies_is_a_sentence_and_begun_again(tokenizer):
    renderer = chat_template.Renderer()
    assert renderer.render("x", [], {}) == "x"
    renderer._process.stdin.close()
    renderer._process.wait()
    assert renderer.render("y", [], {}) == "y"
    send, renderer._send = renderer._send, lambda line: renderer._process.kill()
    with pytest.raises(TemplateError, match="its process has ended"):
        renderer.render("z", [], {})
    renderer._send = send
    assert renderer.render("x", [], {}) == "x"
    renderer._end()
