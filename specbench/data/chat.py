"""Chats: messages with roles and tools in records, and the text that a tokenizer's chat template makes of them."""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigError, shown

if TYPE_CHECKING:
    from specbench.data.prompts import Prompt

ROLES = ("system", "developer", "user", "assistant", "tool")
STARTED = datetime.datetime.now()  # what a template that reads the clock is given, so that all prompts have one time
READING = "strftime_now"  # what a template calls to read it
CLOCK = re.compile(READING + r"\(\s*(['\"])([^'\"]*)\1\s*\)")


def chat_of(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """The turns, messages before them and tools of a record whose `key` is a list of messages, of which the last one of
    the user's is to be answered. `where` names file and line. Raises ConfigError."""
    messages = [*record[key]]
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages.pop()  # the answer that a data set for training has
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ConfigError(f"{where} {key} has {shown(message)}: each must have a role, {', '.join(ROLES)}")
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts_of(message)):
            raise ConfigError(f"{where} {key} has {shown(message)}: its content must be text")
    if not messages or messages[-1]["role"] != "user" or not text_in(messages[-1]).strip():
        raise ConfigError(f"{where} {key} must end with a text of the user's")
    return {"turns": (text_in(messages[-1]),), "before": tuple(messages[:-1]), "tools": tools_of(record, where)}


def beside_turns(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a record of turns has beside them: a system message and tools. Raises ConfigError."""
    system = record.get("system") or record.get("system_prompt") or ""
    if not isinstance(system, str):
        raise ConfigError(f"{where} system is {shown(system)}: it must be text")
    return {"before": ({"role": "system", "content": system},) if system else (), "tools": tools_of(record, where)}


def tools_of(record: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """The tools of a record. Raises ConfigError."""
    tools = record.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and name_of(tool) for tool in tools):
        raise ConfigError(f"{where} tools is {shown(tools)}: it must be a list of objects that have names")
    return tuple(tools)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool; empty if it has none."""
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """The content of a message as parts with types."""
    content = message.get("content") or []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def text_in(message: Mapping[str, Any]) -> str:
    """The text of a message."""
    return "".join(part["text"] for part in parts_of(message))


def chat_text(prompt: "Prompt", answers: Sequence[str], tokenizer: Any) -> str:
    """A turn of a prompt by the tokenizer's chat template, from messages whose content is text or, if it wants them,
    parts. Raises ConfigError if the template fails, or leaves out anything but an answer."""
    messages = [{**message} for message in prompt.before]
    for question, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    said = [text_in(message) for message in messages if message["role"] != "assistant"]
    said += [name_of(tool) for tool in prompt.tools]
    tools, reason = [*prompt.tools] or None, ""
    for content_of in (text_in, parts_of):
        own = [message | {"content": content_of(message)} for message in messages]
        try:
            template = frozen(tokenizer.get_chat_template(tools=tools))
            text: str = tokenizer.apply_chat_template(
                own, tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program, and may raise anything
            reason = reason or " ".join(f"it fails with {type(error).__name__}: {error}".split())[:200]
            continue
        missing = [each for each in said if squeezed(each) not in squeezed(text)]
        if not missing:
            return text
        reason = reason or f"it leaves out {shown(missing[0])}"
    raise ConfigError(
        f"target.chat_template is not possible with prompt {prompt.id} and the {template_name(tokenizer)} "
        f"({reason}): use target.chat_template=never, or a model whose template reads such messages"
    )


def frozen(template: str) -> str:
    """A template in which the clock stands still. Raises ValueError if it reads it in a way that is not known."""
    found = CLOCK.sub(lambda call: json.dumps(STARTED.strftime(call[2])), template)
    if f"{READING}(" in found:
        raise ValueError("it reads the clock by a format that is not written in the call")
    return found


def squeezed(text: str) -> str:
    """A text with one space for each white space: templates strip what they are given."""
    return " ".join(text.split())


def clock_note(tokenizer: Any) -> list[str]:
    """What a reader must know of a template that reads the clock, if it does."""
    if f"{READING}(" not in str(tokenizer.chat_template):
        return []
    return [f"the {template_name(tokenizer)} reads the clock, which stood at {STARTED:%Y-%m-%d %H:%M:%S} throughout"]


def template_name(tokenizer: Any) -> str:
    """A chat template in words: whose it is, and which."""
    digest = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return f"chat template of {tokenizer.name_or_path} (sha256 {digest[:12]})"
