"""Stop strings end a text at the first token whose whole decoded text holds one, on three kinds of tokenizer."""

import json
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from decoder_cases import V, make_drafter, tabular_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specbench.decoding.sampling import Sampling
from specbench.decoding.sequence import Sequence
from specbench.decoding.speculative import decode_autoregressive, decode_speculative
from specbench.decoding.state import State
from specbench.decoding.stops import StopStrings
from specbench.decoding.timer import Clock
from specbench.policies.base import FixedGamma
from specbench.run.readers import ends_where_it_should
from specbench.verifiers.base import SpeculativeVerifier

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ASCII = "don't stop , he said . It's 'fine' ; we 're here !   three spaces\n\n\ttabs  and the end ."
OTHERS = "naïve café 日本語です 🌍🌎😀 Ünïcödé"


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [ASCII], trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return made


def sentencepiece() -> Tokenizer:
    """Bytes stand for what is no ASCII, and the decoder strips one space at the beginning: Llama 2."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator([ASCII], trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL + BYTES))
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    made = Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    made.train_from_iterator([ASCII, OTHERS], trainers.WordPieceTrainer(vocab_size=160, special_tokens=SPECIAL))
    return made


KINDS = (byte_level, sentencepiece, word_piece)


@cache
def tokenizer_of(kind) -> PreTrainedTokenizerFast:
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=False))
    more = {"additional_special_tokens": SPECIAL[4:], "clean_up_tokenization_spaces": kind is word_piece}
    return PreTrainedTokenizerFast(tokenizer_object=kind(), **names, **more)


def encoded(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def by_whole_texts(tokenizer, strings, tokens) -> int | None:
    """Where the text ends: all of it is decoded at every token."""
    naming = [s for s in strings if any(name in s for name in SPECIAL)]
    for end in range(1, len(tokens) + 1):
        text, with_special = (tokenizer.decode(tokens[:end], skip_special_tokens=skip) for skip in (True, False))
        if any(s in text for s in strings) or any(s in with_special for s in naming):
            return end
    return None


def random_text(tokenizer, generator) -> list[int]:
    """Random tokens, a text, or characters of several tokens each; sometimes with special tokens."""
    length = generator.choice((3, 10, 40, 120))
    rare = "".join(chr(generator.randrange(0x4E00, 0x9FFF)) for _ in range(50))  # of which few come twice
    texts = (ASCII + OTHERS) * 2, "".join(generator.choice(rare + OTHERS + " ,.'n") for _ in range(length))
    begin = generator.randrange(40)
    tokens = generator.choice((
        [generator.randrange(len(tokenizer)) for _ in range(length)],
        encoded(tokenizer, texts[0])[begin : begin + length],
        encoded(tokenizer, texts[1]),
    ))  # fmt: skip
    for _ in range(generator.choice((0, 0, 1, 5))):
        tokens.insert(generator.randrange(len(tokens) + 1), generator.randrange(len(SPECIAL)))
    return tokens


def random_stops(tokenizer, tokens, generator) -> list[str]:
    """Parts of what the text is at some token; later tokens may change it."""
    found = []
    for _ in range(generator.choice((1, 1, 3))):
        end = generator.randint(1, len(tokens))
        text = tokenizer.decode(tokens[:end], skip_special_tokens=generator.random() < 0.7)
        size = generator.choice((1, 2, 3, 5, 8, 20))
        begin = max(0, len(text) - size - generator.choice((0, 0, 1, 3, 10)))
        found.append(text[begin : begin + size] or "no such text")
    return found


def in_rounds(stops, tokens, generator) -> int | None:
    """Where the text ends that is decoded in rounds of several tokens."""
    begin = 0
    while begin < len(tokens):
        width = generator.choice((1, 3, 6))
        kept = stops.find(tokens[:begin], tokens[begin : begin + width])
        if kept is not None:
            return begin + kept
        begin += width
    return None


def wrong_ends(kind, cases: int) -> int:
    """In how many of so many random cases the text ends elsewhere than by whole decoding."""
    tokenizer, generator, wrong = tokenizer_of(kind), random.Random(kind.__name__), 0
    for case in range(cases):
        tokens = random_text(tokenizer, generator)
        strings = random_stops(tokenizer, tokens, generator)
        stops, right = StopStrings(strings, tokenizer), by_whole_texts(tokenizer, strings, tokens)
        wrong += in_rounds(stops, tokens, generator) != right or (case % 10 == 0 and stops.end_of(tokens) != right)
    return wrong


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_text_ends_at_the_first_token_whose_whole_text_holds_a_stop(kind):
    assert wrong_ends(kind, 250) == 0


def test_a_window_of_a_fixed_width_is_wrong(monkeypatch):
    """Negative control: as many tokens as the longest stop has bytes, wherever they begin."""
    monkeypatch.setattr(StopStrings, "_window", lambda own, tokens: max(0, len(tokens) - own.needed + 16))
    assert wrong_ends(sentencepiece, 250) > 0 and wrong_ends(word_piece, 250) > 0


def test_few_tokens_are_decoded_at_once():
    """Of a long text, as many at its end as at its beginning, but for the one that ends it."""
    tokenizer = tokenizer_of(byte_level)
    decoded, tokens = [], encoded(tokenizer, ASCII * 40)

    def decode(part, **options):
        decoded.append(len(part))
        return tokenizer.decode(part, **options)

    names = ("added_tokens_decoder", "all_special_ids", "convert_ids_to_tokens")
    counted = SimpleNamespace(decode=decode, **{name: getattr(tokenizer, name) for name in names})
    assert StopStrings(["not there"], counted).end_of(tokens) is None
    assert len(tokens) > 1000 and max(decoded) < 100


def test_characters_of_several_tokens_stripped_spaces_and_special_tokens():
    tokenizer = tokenizer_of(sentencepiece)
    tokens = encoded(tokenizer, "日本語です")
    end = StopStrings(["本語"], tokenizer).end_of(tokens)
    assert tokenizer.decode(tokens[:end]) == "日本語" and len(tokens) - end == 6
    assert StopStrings([" d"], tokenizer).end_of(encoded(tokenizer, "don't")) is None  # the space is no part of it
    tokens = [*encoded(tokenizer, "fine"), SPECIAL.index("<|im_end|>"), *encoded(tokenizer, "stop")]
    assert StopStrings(["<|im_end|>"], tokenizer).end_of(tokens) == tokens.index(4) + 1
    assert StopStrings(["|"], tokenizer).end_of(tokens) is None  # special tokens are no part of the text


@pytest.mark.parametrize("gamma", [0, 3])
def test_both_decoders_and_the_verdicts_reader_end_a_text_there(gamma, tables):
    """On a tabular pair whose 16 tokens are some of a tokenizer's, among them bytes of characters."""
    whole = tokenizer_of(sentencepiece)
    some = [*dict.fromkeys(encoded(whole, "本です") + encoded(whole, "the end , he said don't stop"))][:V]
    tokenizer = SimpleNamespace(
        decode=lambda tokens, **options: whole.decode([some[token] for token in tokens], **options),
        convert_ids_to_tokens=lambda ids: whole.convert_ids_to_tokens(some[ids]) if isinstance(ids, int) else [],
        added_tokens_decoder={}, all_special_ids=[],
    )  # fmt: skip
    assert len(some) == V

    def decode(strings):
        target, helper = (tabular_model(table, Sampling()) for table in (tables.target, tables.similar))
        stops = StopStrings(strings, tokenizer)
        state = State.start([Sequence([1, 2], 26, key) for key in range(60)], [], 5, torch.device("cpu"), stops)
        target.allocate(60, state.tokens.shape[1])
        target.prefill(state)
        verifier = SpeculativeVerifier(Sampling())
        if not gamma:
            return decode_autoregressive(state, target, verifier, Clock()).generated
        drafter = make_drafter("model", target, "", helper)
        return decode_speculative(state, target, drafter, FixedGamma(gamma), verifier, Clock()).generated

    texts, strings = decode(["no such text"]), ["�����", "e d", "dd"]
    ends = [by_whole_texts(tokenizer, strings, text) for text in texts]
    assert decode(strings) == [text[:end] for text, end in zip(texts, ends, strict=True)]
    stops = StopStrings(strings, tokenizer)
    for text, end in zip(texts, ends, strict=True):
        for length in range(1, 25):
            assert ends_where_it_should(text[:length], 24, [], stops) == (length == (end or 24))
    assert len({*ends}) > 3
