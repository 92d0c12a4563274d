"""Property-based: whatever stands in a setting, a data file or a template, the answer is a ConfigError that names it,
or a value that is finite and of its type. The settings are those of the schema and of every option in `conf/`."""

import logging
import math
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specbench.config.check import base_of
from specbench.config.compose import GROUPS, RunConfig, conf_dir, option_file
from specbench.config.mistakes import explain
from specbench.data.records import check_template, fill
from specbench.errors import ConfigError, visible
from specbench.settings import BaseSettings, chosen, validate
from specbench.train.student import Student
from specbench.train.trainer import Training


@pytest.fixture(autouse=True)
def _no_logs():
    """Hydra logs hostile values as they are, and half surrogates cannot be sent to another process."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


MANY = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
BASES = {**{group: base_of(group) for group in GROUPS}, "method": Student}
# Options whose interpolation or path a file alone does not have.
WITHOUT = {"path": "shipped:drafter", "gamma": 4, "reference": __file__, "tokenizer": "shipped:target"}

ODD = st.sampled_from([
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 0.5, 1e-45, 5e-324, 1e308, math.inf,
    -math.inf, math.nan, "", " ", "a", "null", "nan", "inf", "1e400", "5", "-5", "0.5", "true", "9" * 10000, "\0",
    "\x1b[2J", "\ud800", "[/b]", "../../x", "/dev/zero", "/", "~", "${nope}", "${gamma}", "${oc.env:NOT_SET}", "???",
    "x" * 10000, [], {}, [[]], [None], [[1]], [1, "a"], [math.nan], {"a": 1}, {"a": {"b": math.inf}}, [""], ["\\n"],
    [0.5, 0.5], "os.system", "auto",
])  # fmt: skip
SCALAR = st.one_of(ODD, st.integers(), st.floats(), st.text(max_size=8), st.booleans(), st.none())
VALUE = st.one_of(ODD, SCALAR, st.lists(SCALAR, max_size=3), st.dictionaries(st.text(max_size=3), SCALAR, max_size=2))


@cache
def options() -> dict[str, Any]:
    """The settings of every option in conf/, and the scalars of runs and of training."""
    found = {"run": OmegaConf.load(conf_dir() / "config.yaml"), "train": OmegaConf.load(conf_dir() / "train.yaml")}
    schemas = {"run": RunConfig, "train": Training}
    for name, schema in schemas.items():
        found[name] = OmegaConf.masked_copy(found[name], [*schema.model_fields])
    for group in BASES:
        for file in sorted((conf_dir() / group).glob("*.yaml")):
            node = OmegaConf.create(option_file(file))
            node.pop("defaults", None)
            if group in node:  # an option that sets scalars of the run too
                node = OmegaConf.create({**OmegaConf.to_container(node)[group], "beams": node.beams})
            for key, value in WITHOUT.items():
                if OmegaConf.to_container(node).get(key) in ("???", "${gamma}", "${target.path}"):
                    node[key] = __file__ if group == "data" else value
            if group == "data" and "url" in node:  # a published file, of which nobody has a copy yet
                node.path = __file__
            if file.stem == "server":
                node.url = "http://localhost:8000"
            if file.stem == "hierarchical":
                node["below"] = OmegaConf.load(conf_dir() / "drafter" / "ngram.yaml")
            found[f"{group}/{file.stem}"] = node
    return found


FIELDS = [(name, str(key)) for name, node in options().items() for key in node]


def sound(found: BaseSettings) -> None:
    """Asserts that every field has its type, and that numbers are finite and text is text."""
    assert type(found).model_validate(found.model_dump()) == found
    for value in vars(found).values():
        fits(value)


def fits(value: Any) -> None:
    if isinstance(value, list):
        for entry in value:
            fits(entry)
    elif isinstance(value, str):
        assert value and value.encode() and "\0" not in value
    elif isinstance(value, int | float):
        largest = 1e30 if isinstance(value, float) else 2**63
        assert math.isfinite(value) and (value == 0 or 1e-30 <= abs(value) <= largest)


def set_value(node: Any, key: str, value: Any) -> None:
    """Sets the value as an override would. Raises ConfigError if OmegaConf refuses it."""
    try:
        OmegaConf.update(node, key, value, merge=False)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, [f"{key}={value}"], lambda words: ())) from error


@pytest.mark.parametrize("place", range(4))  # four quarters, whose examples are spread over processes
@given(data=st.data())
@settings(MANY, max_examples=60)
def test_any_value_of_any_option(place, data):
    name, key = data.draw(st.sampled_from(FIELDS[place::4]))
    value = data.draw(VALUE)
    node = options()[name].copy()
    group = name.partition("/")[0]
    try:
        set_value(node, key, value)
        if name in ("run", "train"):
            found = validate(RunConfig if name == "run" else Training, node)
        else:
            found = chosen(node, group, BASES[group]).settings
    except ConfigError as error:
        assert key in str(error) or key == "_target_", error
        assert "\n" not in str(error) and len(str(error)) < 1500
    else:
        sound(found)


@given(
    st.lists(st.sampled_from([*"{}.![]:0 \n", "{{", "}}", "prompt", "{prompt}", "q", "__class__"]), max_size=8).map(
        "".join
    )
)
@settings(MANY, max_examples=500)
def test_any_template(template):
    """What is accepted is what `str.format` makes of it, whose oddities are all refused."""
    fields = {"prompt": "P", "q": "Q", " ": "S"}
    try:
        check_template(template, "data.template")
    except ConfigError as error:
        assert "data.template" in str(error) and "\n" not in str(error)
    else:
        try:
            expected = template.format(**fields)
        except KeyError as missing:
            with pytest.raises(KeyError, match=visible(missing.args[0])):
                fill(template, fields.__getitem__)
        else:
            assert fill(template, fields.__getitem__) == expected


@given(st.text(st.characters(), max_size=40))
@settings(MANY, max_examples=200)
def test_what_is_shown_has_no_control_characters(text):
    for found in (visible(text), visible(text, layout=True).replace("\n", "").replace("\t", "")):
        found.encode()  # no half of a surrogate pair
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E for c in found)
