"""Whisper with random weights and synthesised sounds: generate()'s tokens, every cache, batch and tree, the law."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from beam_cases import searched
from choosing import only
from decoder_cases import CACHES
from encoder_decoder_cases import NEW, Tokenizer, chi_squared, decoded_by
from whisper_cases import POSITIONS, RATE, SMALL, extractor, module_of, tone

from specbench.contrib.beams.numbers import stock_score
from specbench.contrib.beams.search_state import BeamRules
from specbench.contrib.whisper import audio_encoder
from specbench.contrib.whisper.audio_encoder import Hearing, SpeechEncoder
from specbench.contrib.whisper.sound import Speech
from specbench.decoding.encoder_input import Features
from specbench.decoding.sampling import Sampling
from specbench.executors.eager import EagerExecutor
from specbench.models import encoder_decoder
from specbench.models.checkpoint_checks import reads_trees
from specbench.models.encoder_decoder import Suppressed, suppressed_by
from specbench.models.language_model import LanguageModel
from specbench.models.reference_forward import stock_logits

HOT = 2.0
ENGLISH, GERMAN = Speech("en", "transcribe"), Speech("german", "translate")
WAYS = [("static", 1, None), ("static", 3, "model"), ("dynamic", 2, "tree_best"), ("paged", 3, "multi_draft_two"),
        ("paged", 1, "own_trees"), ("dynamic", 3, "prompt_lookup"), ("static", 2, "under_ngram")]  # fmt: skip


@cache
def loaded(seed: int, small: bool = False) -> LanguageModel:
    module = module_of(seed, **SMALL if small else {})
    new_encoder = partial(SpeechEncoder, hearing=Hearing(extractor(), module.config, "tiny"))
    return LanguageModel(module, Tokenizer(), name="tiny", sampling=Sampling(), new_cache=CACHES["static"],
                         executor=EagerExecutor(), new_encoder=new_encoder)  # fmt: skip


def model(temperature: float, cache_name: str = "static", seed: int = 0, small: bool = False, speech=ENGLISH):
    found = loaded(seed, small).shared(Sampling(temperature=temperature), CACHES[cache_name], EagerExecutor())
    found.encoder.speak(speech)
    return found


@cache
def inputs() -> tuple[Features, ...]:
    features = extractor()([tone(i) for i in range(3)], sampling_rate=RATE, return_tensors="np").input_features
    return tuple(Features(POSITIONS, lambda own=own: own) for own in features)


def generated(read: Features, new: int, speech=ENGLISH, module=None) -> list[int]:
    """What Whisper's own generate() writes, which leaves out the start and the end."""
    text = (module or loaded(0).module).generate(torch.from_numpy(read.values)[None], max_new_tokens=new,
                                                 language=speech.language, task=speech.task)  # fmt: skip
    return text[0].tolist()


def without_end(texts):
    return [text[:-1] if text[-1] == 1 else text for text in texts]


@pytest.mark.slow
def test_tokens_are_those_of_generate():
    assert reads_trees(loaded(0), "tiny")
    for speech, ways in ((ENGLISH, WAYS), (GERMAN, WAYS[:2])):
        expected = [generated(read, NEW - i, speech) for i, read in enumerate(inputs())]
        assert len({tuple(text) for text in expected}) == 3
        for cache_name, rows, drafts in ways:
            models = [model(0, cache_name, seed, seed == 1, speech) for seed in (0, 1)]
            found = decoded_by(models, drafts, rows, which=inputs())
            assert without_end(found) == expected, (cache_name, rows, drafts)


@pytest.mark.parametrize("drafts", only(["tree_distinct"], ["model", "tree_distinct", "own_trees"]))
def test_a_batch_is_its_singles_at_temperature_one(drafts):
    models = [model(1, seed=seed, small=seed == 1) for seed in (0, 1)]
    assert decoded_by(models, drafts, 3, which=inputs()) == decoded_by(models, drafts, 1, which=inputs())


def scores_of_generate(read: Features) -> tuple[torch.Tensor, torch.Tensor]:
    """Log p [n, V] of the tokens that generate() writes, which it has suppressed tokens in, and these tokens [n]."""
    answer = loaded(0).module.generate(
        torch.from_numpy(read.values)[None], language="en", task="transcribe", max_new_tokens=NEW,
        return_dict_in_generate=True, output_scores=True, force_unique_generate_call=True,
    )  # fmt: skip
    scores = torch.cat(answer.scores)
    return scores.log_softmax(-1), answer.sequences[0, -len(scores) :]


def ours(target: LanguageModel, read: Features, tokens: torch.Tensor) -> torch.Tensor:
    """The same log p [n, V] by the adapter, read through its cache."""
    text = torch.cat([torch.tensor(target.start_tokens), tokens])[None]
    begin = len(target.start_tokens)
    target.allocate(1, text.shape[1])
    target.open_text(text, begin, text.shape[1], read)
    return target.read_text(text, begin, text.shape[1])[0].log_softmax(-1)


def later(module, begin, plain=suppressed_by):
    return plain(module, begin + 1)


def never(module, begin):
    return Suppressed([], [], begin)


def only_always(module, begin, plain=suppressed_by):
    return replace(plain(module, begin), first=[])


def only_start(kind, options, config, speech, name):
    return [config.decoder_start_token_id]


MISTAKES = {(encoder_decoder, "suppressed_by"): (later, never, only_always),
            (audio_encoder, "start_of_speech"): (only_start,)}  # fmt: skip


def test_the_law_is_that_of_generate_and_mistakes_are_seen(monkeypatch):
    for read in inputs():
        theirs, tokens = scores_of_generate(read)
        found = ours(model(1), read, tokens)
        torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
        assert (found[0] == -torch.inf).nonzero()[:, 0].tolist() == [1, 8, 9, 10, 11]
        assert (found[1:] == -torch.inf).any(0).nonzero()[:, 0].tolist() == [8, 9, 10]
    for place, mistakes in MISTAKES.items():
        for mistake in mistakes:
            monkeypatch.setattr(*place, mistake)
            assert not torch.allclose(ours(model(1), read, tokens).exp(), theirs.exp(), atol=1e-3), mistake
        monkeypatch.undo()


def likely() -> list[int]:
    """The two likeliest first tokens."""
    target = model(1)
    text = torch.tensor([[*target.start_tokens, 0]])
    return stock_logits(target, text, text.shape[1] - 1, inputs()[0])[0].topk(2).indices.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_texts_have_the_law_of_the_stock_module(wrong, monkeypatch):
    """`wrong` suppresses the first position's tokens, among them likely ones, at the second one."""
    first = [1, *likely()]
    for seed in (0, 1):
        monkeypatch.setattr(loaded(seed, seed == 1).module.generation_config, "begin_suppress_tokens", first)
    if wrong:
        monkeypatch.setattr(encoder_decoder, "suppressed_by", later)
    models = [model(HOT, seed=seed, small=seed == 1) for seed in (0, 1)]
    texts = decoded_by(models, "model", 20, which=inputs()[:2] * 60, new=2)
    found = chi_squared(texts, models[0], inputs())
    assert min(freedom for _, freedom in found[:2]) >= 1
    far = [chi > freedom + 1 + 8 * (2 * freedom + 2) ** 0.5 for chi, freedom in found]  # rare tokens are one bin more
    assert any(far) == wrong, found


def test_every_position_of_the_encoder_is_read_and_no_other():
    """Whisper's cross-attention has no mask: columns that an executor adds would be read."""
    target = model(0)
    target.encoder.allocate(2, lambda columns: columns + 14, fixed_shapes=True)
    target.encoder.read(1, inputs()[0])
    assert target.encoder.inputs.visible == POSITIONS


def test_a_small_drafter_has_an_encoder_of_its_own():
    target, own = models = [model(1, seed=seed, small=seed == 1) for seed in (0, 1)]
    decoded_by(models, "model", 2, which=inputs())
    widths = [m.encoder.inputs.stored[0].shape for m in models]
    assert len(target.encoder.inputs.layers) == 2 and len(own.encoder.inputs.layers) == 1 and widths[0] != widths[1]


def test_the_beams_are_those_of_generate():
    target, drafter = model(0), model(0, seed=1, small=True)
    for read in inputs():
        wanted = loaded(0).module.generate(
            torch.from_numpy(read.values)[None], language="en", task="transcribe", max_new_tokens=12, num_beams=3,
            length_penalty=1.0, early_stopping=False,
        )[0].tolist()  # fmt: skip
        for own in (None, drafter):
            found, *_ = searched(BeamRules(3, 6, 1.0, False), read, {1}, target, own)
            assert without_end([list(found[0].tokens)])[0] == wanted
            again = stock_score(target, target.start_tokens, found[0].tokens, BeamRules(3, 6, 1.0, False), read)
            assert again.score == pytest.approx(found[0].score, abs=again.tolerance)
