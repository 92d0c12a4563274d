"""Prompts are what the user meant: everything of a record is in the text that a model reads, or it is refused."""

import json
from types import SimpleNamespace

import pytest
from small_runs import composed
from transformers import AutoTokenizer

from specbench.config.check import check
from specbench.data.chat import template_name
from specbench.data.prompts import Prompt, Request, load, notes_on_prompts, render
from specbench.errors import ConfigError
from specbench.settings import SHIPPED

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<answer>"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}<answer>"
LAST = "<user>{{ messages[-1].content }}<answer>"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
TOOLS = "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}" + PLAIN
CLOCK = "It is {{ strftime_now('%H:%M:%S.%f') }}." + PLAIN
SYSTEM = {"role": "system", "content": "You are a pirate."}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.fixture
def tokenizer():
    found = AutoTokenizer.from_pretrained(SHIPPED / "drafter")
    found.chat_template = PLAIN
    return found


def text_of(prompt: Prompt, tokenizer, template: str, answers=()) -> str:
    tokenizer.chat_template = template
    return render(prompt, answers, tokenizer, True).text


def test_a_chat_template_is_the_tokenizers(tokenizer):
    asked = render(Prompt("p", ("one", "two ")), ["answer"], tokenizer, True)
    assert asked.text == "<user>one<assistant>answer<user>two<answer>" and asked.id == "p/2"
    plain = render(Prompt("p", ("one", "two")), ["answer"], tokenizer, False)
    assert plain.text == "one\n\nanswer\n\ntwo" and plain.tokens == tokenizer(plain.text)["input_ids"]


def test_a_template_that_wants_parts_gets_parts(tokenizer):
    prompt = Prompt("p", ("one", "two"))
    assert text_of(prompt, tokenizer, PARTS, ["answer"]) == "<user>one<assistant>answer<user>two<answer>"
    words = [{"role": "user", "content": "one"}]
    assert "one" not in tokenizer.apply_chat_template(words, tokenize=False)  # the control: text is left out silently


@pytest.mark.parametrize(("template", "prompt", "answers", "said"), [
    ("{% for %}", Prompt("p", ("x",)), [], "TemplateSyntaxError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", Prompt("p", ("x",)), [], "SecurityError"),
    ("<answer>", Prompt("p", ("why?",)), [], "leaves out why?"),
    (LAST, Prompt("p", ("first", "second")), ["answer"], "leaves out first"),
    (LAST, Prompt("p", ("x",), before=(SYSTEM,)), [], "leaves out You are a pirate."),
    ("{{ strftime_now('%H' + '%M') }}" + PLAIN, Prompt("p", ("x",)), [], "reads the clock"),
    (STRICT, Prompt("p", ("x",), before=(SYSTEM,)), [], "no system"),
    (PLAIN, Prompt("p", ("x",), tools=(TOOL,)), [], "leaves out look_up"),
])  # fmt: skip
def test_what_a_template_leaves_out_is_refused(template, prompt, answers, said, tokenizer):
    with pytest.raises(ConfigError, match=r"target\.chat_template is not possible with prompt p .*never") as error:
        text_of(prompt, tokenizer, template, answers)
    assert said in str(error.value) and template_name(tokenizer) in str(error.value)


def test_system_messages_and_tools_are_rendered_and_need_a_template(tokenizer):
    prompt = Prompt(
        "p", ("x",), before=(SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant"}), tools=(TOOL,)
    )
    text = text_of(prompt, tokenizer, TOOLS)
    assert text.startswith('[{"type": "function"') and text.endswith(
        "<system>You are a pirate.<user>a<assistant><user>x<answer>"
    )
    with pytest.raises(ConfigError, match="which only a chat template places"):
        render(prompt, [], tokenizer, False)


def test_the_clock_of_a_template_stands_still(tokenizer):
    prompt = Prompt("p", ("x",))
    assert text_of(prompt, tokenizer, CLOCK) == text_of(prompt, tokenizer, CLOCK)
    asked = [{"role": "user", "content": "x"}]
    moving = [tokenizer.apply_chat_template(asked, tokenize=False) for _ in range(2)]
    assert moving[0] != moving[1]  # the control
    assert "reads the clock" in notes_on_prompts([], tokenizer, True)[0]
    tokenizer.chat_template = PLAIN
    assert notes_on_prompts([], tokenizer, True) == []


def test_a_token_that_ends_a_text_behind_a_prompt_is_noted():
    tokenizer = SimpleNamespace(eos_token_id=2, eos_token="</s>")
    requests = [Request("a", "a", "", tokens, "") for tokens in ([1, 5, 2], [1, 2, 5], [])]
    assert notes_on_prompts(requests, tokenizer, False) == ["1 of 3 prompts end with </s>, the token that ends a text"]
    assert notes_on_prompts(requests[1:], tokenizer, False) == []


def prompts_of(path, record, *words) -> list[Prompt]:
    path.write_text(json.dumps(record))
    choice = check(composed("logger=none", f"data.path={path}", *words)).choices["data"]
    return load(choice.build())


def test_chats_in_records(tmp_path):
    user, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}
    parts = {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o?"}]}
    for messages in ([SYSTEM, user], [SYSTEM, user, answer], [SYSTEM, parts]):
        record = {"question_id": 4, "messages": messages, "tools": [TOOL]}
        [found] = prompts_of(tmp_path / "a", record, "data=questions")
        assert (found.id, found.turns, found.before, found.tools) == ("4", ("Who?",), (SYSTEM,), (TOOL,))
        [found] = prompts_of(tmp_path / "a", record, "data=jsonl", "data.field=messages")
        assert (found.turns, found.before, found.tools) == (("Who?",), (SYSTEM,), (TOOL,))
    [found] = prompts_of(tmp_path / "a", {"turns": ["Who?", "Why?"], "system": SYSTEM["content"]}, "data=questions")
    assert found.turns == ("Who?", "Why?") and found.before == (SYSTEM,)


@pytest.mark.parametrize(("record", "said"), [
    ({"messages": [SYSTEM]}, "must end with a text of the user's"), ({"messages": [{"from": "human"}]}, "have a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
    ({"turns": ["x"], "tools": ["y"]}, "tools is"), ({"turns": ["x"], "system": ["y"]}, "system is"),
    ({"conversations": []}, "no list of turns or messages"),
])  # fmt: skip
def test_what_is_no_chat_is_one_sentence(record, said, tmp_path):
    with pytest.raises(ConfigError, match=said) as error:
        prompts_of(tmp_path / "a", record, "data=questions")
    assert f"data.path={tmp_path / 'a'} line 1" in str(error.value)
