"""Encoder-decoders with random weights: generate()'s tokens, every cache, batch, tree and executor, and the law."""

from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from checkpoints import with_tokenizer
from choosing import in_turn, slow_unless
from decoder_cases import CACHES, GREEDY, adapted, generated_by, logits_of, make_drafter
from encoder_decoder_cases import HOT, INPUTS, KINDS, NEW, V, chi_squared, decoded_by, module_of
from small_runs import parts_of, run

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.state import State
from specbench.errors import ConfigError
from specbench.models.encoder_decoder import EncoderInputs
from specbench.models.language_model import LanguageModel
from specbench.models.positions import Positions
from specbench.models.reference_forward import FinishedText, stock_logits


@cache
def loaded(kind: str, seed: int) -> LanguageModel:
    return adapted(module_of(kind, seed), tokens=V)


def model(kind: str, sampling: Sampling, cache_name: str = "static", seed: int = 0):
    found = loaded(kind, seed)
    return found.shared(sampling, CACHES[cache_name], found.executor)


def decode(kind, sampling, drafts=None, cache_name="static", rows=3, which=INPUTS, new=None):
    """New tokens after the inputs, decoded through `rows` rows; without `drafts` one token a call."""
    models = [model(kind, sampling, cache_name, seed) for seed in (0, 1)]
    return decoded_by(models, drafts, rows, which, new)


@pytest.mark.parametrize(("drafts", "kind", "cache_name"), in_turn(
    ["tree_best", "multi_draft_two", "own_trees", "prompt_lookup", "under_ngram"],
    [(kind, cache) for cache in CACHES for kind in ("t5", "bart")],
))  # fmt: skip
def test_every_cache_and_kind_of_draft_keeps_the_tokens(kind, drafts, cache_name):
    sampling = Sampling(temperature=0)
    assert decode(kind, sampling, drafts, cache_name, rows=2) == decode(kind, sampling)


@pytest.mark.parametrize(("kind", "drafts"), in_turn([*KINDS], [("tree_distinct",), ("model",), ("own_trees",)]))
def test_a_batch_is_its_singles_at_temperature_one(kind, drafts):
    sampling = Sampling(temperature=1)
    assert decode(kind, sampling, drafts) == decode(kind, sampling, drafts, rows=1)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_have_the_logits_of_the_stock_module(kind):
    target = model(kind, Sampling(temperature=1))
    ours, theirs = ragged(target)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def ragged(target: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [2, V] after two rows of unequal lengths and inputs: ours, and the stock module's."""
    texts, starts = [[2, 8, 9, 30], [2, 19, 3, 12, 50, 7]], [2, 4]
    target.allocate(2, 8)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        target.encode(row, Sequence([], 0, 0, INPUTS[row]))
        target.read_row(torch.tensor([text]), row, 0, start)
    new = torch.tensor([text[start:] for text, start in zip(texts, starts, strict=True)])
    ours = logits_of(target, new, starts)[:, -1]
    padded = [torch.tensor([[*text, 0]]) for text in texts]  # the last token is predicted
    stock = [stock_logits(target, text, text.shape[1] - 1, INPUTS[row])[0] for row, text in enumerate(padded)]
    return ours, torch.stack(stock)


def wrong_row(self, count, row, plain=EncoderInputs.place):
    found = plain(self, count, row)
    plain(self, 1, None)
    return found


def no_mask(self, count, row, plain=EncoderInputs.place):
    return torch.ones_like(plain(self, count, row))


def stale(self, row, layers, plain=EncoderInputs.write):
    if not self.stored:
        plain(self, row, layers)


@pytest.mark.parametrize(("owner", "name", "mistake"), [
    (EncoderInputs, "place", wrong_row), (EncoderInputs, "place", no_mask), (EncoderInputs, "write", stale),
    (Positions, "at", None),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_mistakes_are_seen(kind, owner, name, mistake, monkeypatch):
    """Another row, no mask of the input's end, an input that is not renewed, positions of transformers' own."""
    monkeypatch.setattr(owner, name, mistake or (lambda *given: nullcontext()))
    ours, theirs = ragged(model(kind, Sampling(temperature=1)))
    assert (ours - theirs).abs().max() > 1e-2


def test_a_forced_token_and_suppressed_ones_are_those_of_generate():
    module = module_of("bart")
    module.generation_config.forced_bos_token_id = 4
    free = decode("bart", Sampling(temperature=0), rows=1, which=INPUTS[:1])[0]
    module.generation_config.suppress_tokens, module.generation_config.bad_words_ids = [free[0]], [[free[1]]]
    target = adapted(module, GREEDY, tokens=V)
    assert target.start_tokens == [2, 4]
    expected = [2, *generated_by(module, INPUTS[0], NEW)]
    [found] = decoded_by([target, None], rows=1, which=INPUTS[:1], new=len(expected) - 2)
    assert [2, 4, *found] == expected
    logits = FinishedText(expected[:2], expected[2:], INPUTS[0]).scores(target)
    assert logits.argmax(-1).tolist() == found and not {free[0], free[1]} & set(found)


def test_prompt_lookup_copies_from_the_input():
    drafter = make_drafter("prompt_lookup", model("t5", Sampling(temperature=0)), "")
    for read_tokens, guesses in (([9, 8, 7, 6, 1], [7, 6]), (None, [])):
        state = State.start([Sequence([0, 8], 9, 0, read_tokens)], [], 3, torch.device("cpu"))
        drafter.begin(state)
        assert drafter.propose(state, [2]).tokens[0].tolist() == guesses


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("t5") / str(seed)
        module_of("t5", seed, vocab_size=4160).save_pretrained(folder)
        folders.append(str(with_tokenizer(folder)))
    return folders


@pytest.mark.slow
def test_a_run_searches_the_beams_of_an_encoder_decoder(pair, tmp_path):
    target, drafter = pair
    parts = parts_of("target=model", f"target.path={target}", "drafter=model", f"drafter.path={drafter}",
                     "decoding=beam", "beams=3", "gamma=2", "max_new_tokens=6")  # fmt: skip
    result, records = run(parts, tmp_path)
    beam = result.details.beam
    assert result.lossless.passed and beam.equal == beam.requests == 2
    assert beam.levels > 0 and all(record.search for record in records)


@pytest.mark.slow
def test_a_whole_run_is_compiled(pair, tmp_path):
    """Every function is compiled before anything is timed, plain and speculative, for inputs of unequal lengths."""
    same = (f"target.path={pair[0]}", "drafter=model", f"drafter.path={pair[0]}", "target=model")
    parts = parts_of(*same, "temperature=0", "batch_size=2", "executor=compiled", "gamma=2", "max_new_tokens=8")
    assert run(parts, tmp_path)[0].lossless.passed
    executor = parts.target.executor
    assert sum(len(function.compiled) for function in executor.functions.values()) > 2 and not executor.notes()


@pytest.mark.parametrize("choice", ["drafter=early_exit", "drafter=medusa", "attention=triton"])
def test_what_is_not_possible_is_said_before_a_model_loads(choice, pair, monkeypatch):
    monkeypatch.setattr("specbench.models.load.load_module", partial(pytest.fail, "a model was loaded"))
    others = ("drafter=ngram",) if choice.startswith("attention") else ()
    with pytest.raises(ConfigError, match=f"{choice} is not possible with target.path"):
        parts_of("target=model", f"target.path={pair[0]}", choice, *others)


def test_an_encoder_decoder_needs_a_target_with_an_input(pair):
    with pytest.raises(ConfigError, match="its encoder would have no input"):
        parts_of("drafter=model", f"drafter.path={pair[0]}", "target=stdlib")


@pytest.mark.parametrize("drafter", [slow_unless(drafter == "t5_small", drafter)
                                     for drafter in ("t5_small", "t5_base", "t5_large", "t5_xl")])  # fmt: skip
def test_the_recipes_run_without_weights(drafter, tmp_path):
    few = [f"{role}.shape.{name}={value}" for role in ("target", "drafter")
           for name, value in (("num_layers", 1), ("num_decoder_layers", 1), ("d_model", 16), ("d_ff", 16),
                               ("num_heads", 2), ("vocab_size", 4160))]  # fmt: skip
    random = ("target.weights=random", "drafter.weights=random")
    parts = parts_of(f"drafter={drafter}", *random, *few, "max_new_tokens=4", "executor=eager", "data.limit=1")
    assert parts.target.name == "google/flan-t5-xxl" and parts.drafter.model.name.endswith(drafter[3:])
    result, _ = run(parts, tmp_path)
    assert result.lossless.passed and result.counts.tokens


def many_texts(inputs) -> list[list[int]]:
    return decode("t5", Sampling(temperature=HOT), "model", rows=50, which=inputs * 300, new=2)


@pytest.mark.slow
def test_texts_have_the_law_of_the_stock_module():
    target = model("t5", Sampling(temperature=HOT))
    for chi, freedom in chi_squared(many_texts(INPUTS[:2]), target):
        assert freedom > 2 and chi < freedom + 8 * (2 * freedom) ** 0.5
    exchanged = chi_squared(many_texts(INPUTS[1::-1]), target)[:2]  # every row has read the other's input
    assert any(chi > freedom + 8 * (2 * freedom) ** 0.5 for chi, freedom in exchanged)
