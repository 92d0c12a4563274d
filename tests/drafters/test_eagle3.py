"""EAGLE checkpoints: each dialect and option against an independent forward pass, whole drafts, and refusals."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from checkpoints import checkpoint
from choosing import only, slow_unless
from decoder_cases import WRONG_PAIRS, noted_drafts
from eagle_cases import DRAFT_V, TARGET, D, PlainEagle, V, eagle3_tensors, numbers, plain, renamed, speculators, write
from small_runs import composed, parts_of, run, small

from specbench.config.check import check
from specbench.drafters.eagle3 import Eagle3Model
from specbench.drafters.eagle3_checkpoint import parse_config
from specbench.drafters.pair_model import PairModel
from specbench.errors import ConfigError
from specbench.models.intersection import DraftVocabulary

LAYERS = TARGET["num_hidden_layers"]
DEFAULT = (2, LAYERS // 2, LAYERS - 3)


@cache
def target_folder() -> Path:
    return checkpoint(Path(mkdtemp()) / "target", **TARGET)


# Checkpoints: tensors as the forward pass has them, tensors as they are stored, config.json.
def from_speculators(layers=1, qwen=False, without=frozenset(), ids=None, **flags):
    tensors = eagle3_tensors(layers, qwen=qwen, without=without, **flags)
    return tensors, tensors, speculators(tensors, ids, layers, qwen, **flags)


def from_safeailab(names=None, **flags):
    tensors = eagle3_tensors(**flags)
    return tensors, renamed(tensors, {"layers.0.": "midlayer."} | (names or {})), plain(tensors, **flags)


def from_optimizer(**options):
    tensors = eagle3_tensors()
    more = {"use_aux_hidden_state": True, "next_layer_regular": True, "use_mtp_layernorm": False, **options}
    return tensors, tensors, plain(tensors, eagle_config=more)


AUX_NAMES = {f"fc_norm.{j}.": f"aux_norm_{name}." for j, name in enumerate(("low", "mid", "high"))}
CASES = {
    "plain": lambda: from_speculators(),
    "residual": lambda: from_speculators(norm_before_residual=True),
    "before_fc": lambda: from_speculators(norm_before_fc=True, norm_output=True),
    "fc_norm": lambda: from_speculators(fc_norm=True, norm_before_residual=True),
    "two_layers": lambda: from_speculators(layers=2),
    "qwen": lambda: from_speculators(layers=2, qwen=True, norm_output=True),
    "no_embedding": lambda: from_speculators(without={"embedding"}),
    "no_map": lambda: from_speculators(without={"map"}),
    "nothing_of_the_target": lambda: from_speculators(without={"map", "head", "embedding"}),
    "safeailab": lambda: from_safeailab(),
    "sglang": lambda: from_safeailab(AUX_NAMES, fc_norm=True),
    "prefixed": lambda: from_safeailab({"fc.": "model.fc.", "norm.": "model.norm."}),
    "optimizer": lambda: from_optimizer(),
}  # fmt: skip
# The first four logits behind the pairs of `numbers("features", 6, 3 * D)` and TOKENS, by Eagle3DraftModel.forward of
# speculators 0.9.0 with these tensors (eager attention, ttt_steps=1, position_ids 0 .. 5, float32, transformers 5.23).
TOKENS = [7, 4000, 12, 255, 3111, 9]
STORED = {
    "plain": [0.642739, 0.657768, -0.170699, -0.780268],
    "residual": [-0.01964, 1.037, 0.763831, -0.488846],
    "before_fc": [0.085843, 0.993981, 0.627476, -0.54368],
    "fc_norm": [0.020917, 1.061763, 0.741044, -0.529961],
    "two_layers": [0.343512, 0.638866, 0.114963, -0.556364],
    "qwen": [0.181015, 0.600997, 0.250284, -0.421384],
}
STORED |= dict.fromkeys(("safeailab", "prefixed", "optimizer"), STORED["plain"])  # the same tensors, stored otherwise


@cache
def case(name: str):
    """The folder of a case, and its forward pass in numpy."""
    tensors, stored, config = CASES[name]()
    folder = write(Path(mkdtemp()) / name, stored, config, binary=name == "safeailab")
    flags = {flag: config.get(flag) for flag in ("norm_before_residual", "norm_output")}
    stock = parts_of("target=model", f"target.path={target_folder()}", "drafter=random", "executor=eager").target
    embedding, head = (t.detach().double().numpy() for t in (
        stock.module.get_input_embeddings().weight, stock.module.get_output_embeddings().weight))  # fmt: skip
    return folder, PlainEagle(tensors, embedding, head, **flags)


def overrides(name: str, *more: str) -> list[str]:
    return ["target=model", f"target.path={target_folder()}", "drafter=eagle3", f"drafter.path={case(name)[0]}",
            "executor=eager", *more]  # fmt: skip


@cache
def parts(name: str):
    """With a verifier that accepts at a rate, so that all numbers of accepted guesses occur."""
    return parts_of(*overrides(name, "verifier=synthetic", "verifier.alpha=0.7"))


def own_model(name: str) -> Eagle3Model:
    return parts(name).drafter.pairs


def draft_logits(q: torch.Tensor, width: int) -> torch.Tensor:
    """Of the draft model's tokens, from those of all tokens."""
    return q if width == V else q[..., 5 + 13 * torch.arange(DRAFT_V)]


def forward(model: Eagle3Model, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] behind pairs of the target's hidden states [N, A * D] and tokens."""
    model.allocate(1, 16)
    visible = model.rollback_to([0], len(tokens))
    pairs = model.join(torch.tensor([tokens]), model.project(features[None]))
    return model.forward(pairs, torch.zeros(1, dtype=torch.long), visible)[0]


@pytest.mark.parametrize("name", only(("before_fc", "fc_norm", "two_layers", "safeailab"), STORED))
def test_logits_are_those_of_speculators(name):
    """As stored, and at every position as the forward pass in numpy has them."""
    model, (_, reference) = own_model(name), case(name)
    features = numbers("features", len(TOKENS), 3 * D)
    logits = draft_logits(forward(model, features, TOKENS), DRAFT_V)
    torch.testing.assert_close(logits[-1, :4], torch.tensor(STORED[name]), atol=1e-5, rtol=0)
    own = [reference.feature(row.double().numpy()) for row in features]
    for end in range(1, len(TOKENS) + 1):
        expected, _ = reference(own[:end], TOKENS[:end])
        assert np.abs(logits[end - 1].numpy() - expected).max() < 1e-5
    other, _ = reference(own, [*TOKENS[1:], TOKENS[0]])  # negative control
    assert np.abs(logits[-1].numpy() - other).max() > 1e-3


def target_features(name: str, text: list[int], layers) -> np.ndarray:
    """[T, A * D] of the target's own module."""
    base = parts(name).target.stock.model
    states = base(torch.tensor([text]), output_hidden_states=True)
    return torch.cat([states.hidden_states[layer][0] for layer in layers], -1).double().numpy()


def expected_laws(name, text, guesses, layers=None) -> torch.Tensor:
    """q [gamma, V] from the whole text: behind it every guess has the draft model's own state."""
    reference = case(name)[1]
    features = [reference.feature(row) for row in target_features(name, text[:-1], layers or DEFAULT)]
    tokens, laws = list(text[1:]), []
    for guess in guesses.tolist():
        logits, state = reference(features, tokens)
        exact = torch.from_numpy(logits).softmax(-1)
        law = exact if len(exact) == V else torch.zeros(V, dtype=torch.double).index_add(
            0, 5 + 13 * torch.arange(DRAFT_V), exact)  # fmt: skip
        laws.append(law.float())
        features, tokens = [*features, state], [*tokens, guess]
    return torch.stack(laws)


@pytest.mark.parametrize("name", only(("qwen", "safeailab"), CASES))
def test_q_is_that_of_the_whole_text(name):
    """In ragged rows, after every number of accepted guesses, for guesses behind the draft model's own states."""
    found = noted_drafts(parts(name))
    assert 3 in {len(guesses) for _, guesses, _ in found} and len(accepted(found)) > 2
    for text, guesses, q in found[:: max(1, len(found) // 4)]:
        torch.testing.assert_close(q, expected_laws(name, text, guesses), atol=1e-5, rtol=0)


def accepted(found) -> set[int]:
    """The numbers of guesses that were accepted between two drafts for one text."""
    texts = [text for text, _, _ in found]
    return {
        len(after) - len(text) - 1
        for text in texts
        for after in sorted((t for t in texts if len(t) > len(text) and t[: len(text)] == text), key=len)[:1]
    }


def differ(name: str, found, layers=None) -> bool:
    laws = [expected_laws(name, text, guesses, layers) for text, guesses, _ in found[:4]]
    return not all(torch.allclose(q, law, atol=1e-4) for (_, _, q), law in zip(found, laws, strict=False))


def test_another_layer_is_seen():
    """Negative control."""
    assert differ("plain", noted_drafts(parts("plain")), layers=(3, 5, 6))


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_hidden_states_and_positions_that_are_wrong_are_seen(name, monkeypatch):
    """Negative controls."""
    monkeypatch.setattr(PairModel, name, WRONG_PAIRS[name])
    assert differ("plain", noted_drafts(parts("plain"), gamma=2))


def test_d2t_as_an_index_is_seen(monkeypatch):
    """Negative control: d2t is taken for the target's tokens."""
    own = own_model("plain").vocabulary
    wrong = DraftVocabulary((12 * torch.arange(DRAFT_V) + 5), own.own, own.wanted)
    monkeypatch.setattr(own_model("plain"), "vocabulary", wrong)
    assert differ("plain", noted_drafts(parts("plain")))


def test_ids_of_each_dialect():
    nested = from_optimizer(eagle_aux_hidden_state_layer_ids=[1, 3, 4])[2]
    for config, expected in (
        (from_speculators(ids=[1, 3, 8])[2], (1, 3, 8)),
        (nested, (2, 4, 5)),  # Model-Optimizer numbers the layers behind which it reads
        (from_speculators()[2], DEFAULT),
    ):
        assert parse_config(config, None, "").layers_of(LAYERS) == expected
        assert parse_config(config, [0, 1], "").layers_of(LAYERS) == (0, 1)


@pytest.mark.parametrize(("name", "cache_name", "batch"), [
    ("plain", "paged", 2), slow_unless(False, "two_layers", "static", 2), slow_unless(False, "qwen", "dynamic", 1),
])  # fmt: skip
def test_a_run_at_temperature_0_writes_plain_decodings_tokens(name, cache_name, batch, tmp_path):
    own = parts_of(*overrides(name, "verifier=speculative", f"cache={cache_name}", f"batch_size={batch}",
                              "temperature=0", "gamma=3", "max_new_tokens=8"))  # fmt: skip
    result, _ = run(own, tmp_path)
    assert result.lossless.passed and result.counts.drafted > 0 and not result.counts.failed


def changed(what, **more):
    """A plain checkpoint of speculators with another value in its config or among its tensors."""

    def make(folder):
        tensors, _, config = from_speculators()
        what(tensors, config)
        return write(folder, tensors, config, **more)

    return make


BAD = {
    "a tensor too many": (lambda w, c: w.update(mask_hidden=torch.zeros(1, 1, 48)), "no place for: mask_hidden"),
    "a tensor too few": (lambda w, c: w.pop("layers.0.mlp.up_proj.weight"), "lacks layers.0.mlp.up_proj.weight"),
    "no projection": (lambda w, c: w.pop("fc.weight"), "lacks fc.weight"),
    "NaN": (lambda w, c: w["fc.weight"].fill_(torch.nan), "not finite in float32"),
    "another width": (lambda w, c: w.update({"fc.weight": torch.zeros(D, 2 * D)}),
                      r"fc.weight \[16, 32\] for \[16, 48\]"),
    "an unknown key": (lambda w, c: c.update(parallel=3), "config.json parallel is not a setting"),
    "an unknown key of layers": (lambda w, c: c["transformer_layer_config"].update(experts=3), "has experts in its"),
    "another method": (lambda w, c: c.update(speculators_model_type="dflash"), "speculators_model_type=dflash"),
    "other layers": (lambda w, c: c["transformer_layer_config"].update(model_type="gpt2"), "model_type=gpt2"),
    "d2t out of range": (lambda w, c: w.update(d2t=w["d2t"] + V - 4), "d2t names tokens from 4161 to"),
    "d2t of tokens": (lambda w, c: w.update(d2t=w["d2t"] + torch.arange(DRAFT_V)), "d2t names tokens from 5 to 4191"),
    "d2t and another t2d": (lambda w, c: w.update(d2t=w["d2t"] + 1), "t2d marks other tokens"),
    "a token twice": (lambda w, c: w["d2t"].__setitem__(1, int(w["d2t"][0]) - 1), "d2t names a token twice"),
    "no d2t": (lambda w, c: (w.pop("d2t"), w.pop("t2d")), "no d2t, but a draft vocabulary of 300"),
    "quantised": (lambda w, c: c.update(quantization_config={"bits": 4}), "quantised"),
    "eight bits": (lambda w, c: w.update({"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)}), "8 bits"),
    "no layers": (lambda w, c: c.pop("transformer_layer_config"), "has no hidden_size"),
    "another target": (lambda w, c: c.update(target_hidden_size=32) or w.update({"fc.weight": torch.zeros(D, 96)}),
                       "hidden states of 32, and the target's have 16"),
    "layers that are not there": (lambda w, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 40]),
                                  "the target has 8: give drafter.feature_layers"),
    "ids that are no list": (lambda w, c: c.update(eagle_aux_hidden_state_layer_ids="2"), "layer_ids=2 is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_before_the_target_loads(name, tmp_path):
    """But for weights that are not finite: these are looked at when they are loaded."""
    what, expected = BAD[name]
    folder = changed(what)(tmp_path / "bad")
    wanted = small(*overrides("plain"), f"drafter.path={folder}", "logger=none")
    with pytest.raises(ConfigError, match=expected) as error:
        check(composed(*wanted))
        assert name == "NaN"
        parts_of(*wanted)
    assert str(folder) in str(error.value) or "another target" in name or "not there" in name
    assert "\n" not in str(error.value)
