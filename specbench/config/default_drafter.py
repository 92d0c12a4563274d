"""The drafter of a run that names none: one that fits the target."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.config.compose import compose
from specbench.config.validate import check, choose
from specbench.errors import ConfigError
from specbench.models.load import load_tokenizer

# They need no second checkpoint.
UNTRAINED = ("suffix", "prompt_lookup", "mtp")
TAKEN = UNTRAINED[0]


def with_drafter(words: Sequence[str], announce: Callable[[str], None]) -> list[str]:
    """The words of a command that names a target and no drafter, with one that needs no model, if the default drafter
    has another tokenizer; what else can be tried is announced. Other words as they are."""
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    if not keys & {"target", "target.path"} or {key.partition(".")[0] for key in keys} & {"drafter", "experiment"}:
        return list(words)
    of_target = [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] == "target"]
    try:
        config = compose(of_target)
        target, drafter = (choose(config, group, None).settings for group in ("target", "drafter"))
        if target.path == drafter.path or _vocabulary(target, "target") == _vocabulary(drafter, "drafter"):
            return list(words)
    except ConfigError:  # which the command itself will tell
        return list(words)
    fit = [f"drafter={name}" for name, reason in untrained(of_target).items() if not reason and name != TAKEN]
    announce(
        f"No drafter was given, and the default one has another tokenizer than target.path={target.path}: "
        f"drafter={TAKEN} is taken, which needs no model. One can also try {', '.join(fit)}, or drafter.path=Q, a "
        f"small model with the target's tokenizer; python -m specbench.advise {' '.join(of_target)} measures what "
        "fits, and says whether any of it gains."
    )
    return [*words, f"drafter={TAKEN}"]


def _vocabulary(model: Any, role: str) -> Mapping[str, int]:
    found: Mapping[str, int] = load_tokenizer(model, role).get_vocab()
    return found


def untrained(words: Sequence[str]) -> dict[str, str]:
    """The drafters that need no training and no second checkpoint: for each, why a run with these words refuses it, ""
    if it does not."""
    found = {}
    for name in UNTRAINED:
        try:
            check(compose([*words, f"drafter={name}"]))
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    return found
