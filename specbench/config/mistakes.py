"""What Hydra does not accept of overrides, as one sentence with what could have been meant."""

import re
from collections.abc import Callable, Iterable, Sequence

from specbench.errors import first_line, shown, unknown


def explain(error: BaseException, overrides: Sequence[str], keys_of: Callable[[Sequence[str]], Iterable[str]]) -> str:
    """A mistake that Hydra or OmegaConf found in these overrides. `keys_of` says what can be set beside them."""
    text = str(error)
    if found := re.search(r"ConfigError raised while resolving interpolation: (.*)", text):  # by one of our resolvers
        return found[1]
    if found := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        key = found[1] or found[2]
        group, _, name = key.rpartition(".")
        own = dict(override.partition("=")[::2] for override in overrides).get(group)
        what = (f"setting of {group}={own}" if own else f"setting of the chosen {group}") if group else "setting"
        every = [*keys_of(overrides)]
        elsewhere = [known for known in every if known == name or known.endswith(f".{key}")]
        return str(unknown(key, (known for known in every if known.rpartition(".")[0] == group), what, elsewhere))
    if found := re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\n((?:\t.*\n?)*)", text):
        group, option, options = found[1], found[2], found[3].split()
        return str(unknown(f"{group}={option}", (f"{group}={name}" for name in options), "choice"))
    if found := re.search(r"Ambiguous value for argument '(.*?)'\n", text):
        return (
            f"{shown(found[1])} has several values: python -m specbench -m makes a run of each, python -m "
            "specbench.compare also compares them"
        )
    if override := getattr(error, "override", None):
        key, _, value = str(override).partition("=")
        hint = f"; a value with = in it needs quotes: '{key}=\"{value}\"'" if "=" in value else ""
        return f"{shown(override)} is not an override that Hydra can read: {first_line(error)}{hint}"
    where = getattr(error, "full_key", None) or "hydra."
    if where.startswith("hydra.") and overrides:  # a folder's name holds all overrides
        where = shown(", ".join(override for override in overrides if not override.startswith("-")))
    return f"{where} is not possible: {first_line(error)} (see python -m specbench --help)"
