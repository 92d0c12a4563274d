"""Training: losses, the look-ahead mask, and each method from text to a drafter that runs."""

import json
import shlex

import hydra
import pytest
import torch
from choosing import only
from small_runs import composed, parts_of, run, training

from specbench.config.build import build
from specbench.config.check import check
from specbench.errors import ConfigError
from specbench.models.heads import Heads, HeadsConfig, LookAhead, LookAheadConfig
from specbench.models.load import PretrainedModel, load_module
from specbench.settings import validate
from specbench.train.heads import LookAheadStudent
from specbench.train.student import distances, overlap
from specbench.train.trainer import text_rows, train

DRAFTERS = {  # how what a method saves is used
    "medusa": ["drafter=medusa", "drafter.path={}", "gamma=2"],
    "blockwise": ["drafter=blockwise", "drafter.path={}", "gamma=2"],
    "pass": ["drafter=pass_lookahead", "drafter.lookahead={}", "gamma=2"],
    "early_exit": ["drafter=early_exit", "drafter.head={}", "gamma=2"],
    "distill": ["drafter=model", "drafter.path={}", "gamma=2"],
    "boost": ["drafter=multi_draft", 'drafter.paths=["{0}/drafter_1","{0}/drafter_2"]', "gamma=2"],
}


def shipped(role):
    settings = PretrainedModel.Settings(path=f"shipped:{role}", weights="pretrained", chat_template="never")
    return load_module(settings, role, torch.device("cpu"), torch.float32, 0)


@pytest.mark.parametrize("method", only(["distill"], DRAFTERS))
def test_every_method_trains_a_drafter_that_runs(method, tmp_path):
    pytest.importorskip("accelerate")
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 200)
    size = [f"method={method}", f"text={text}", "row=32", "batch_size=2", "tokens=256"]
    with torch.inference_mode(False), torch.enable_grad():
        metrics = train(training(*size), tmp_path / "out")
    losses = metrics["training"]["losses"]
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert all(0 <= alpha <= 1 for alpha in metrics["alpha_by_guess"]) and all(loss >= 0 for loss in losses)
    wanted = [part.format(tmp_path / "out") for part in DRAFTERS[method]]
    parts = parts_of(*wanted, "data.limit=1", "max_new_tokens=8", "temperature=0")
    result, _ = run(parts, tmp_path / "run")
    assert result.lossless.passed and result.counts.drafted > 0


@pytest.mark.slow
def test_training_moves_the_heads_towards_the_target(tmp_path):
    pytest.importorskip("accelerate")
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 400)
    alphas = {}
    for tokens in (32, 6400):
        with torch.inference_mode(False), torch.enable_grad():
            size = [f"text={text}", "row=32", "batch_size=2", f"tokens={tokens}", "method.heads=1"]
            alphas[tokens] = train(training(*size), tmp_path / str(tokens))["alpha_by_guess"][0]
    assert alphas[6400] > alphas[32] + 0.2


def test_total_variation_is_one_minus_beta():
    p, q = torch.randn(2, 5, 7, 30, generator=torch.Generator().manual_seed(0))
    assert torch.isclose(distances("tv", p, q).mean(), 1 - overlap(p, q).mean(), atol=1e-6)
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean()
    assert torch.isclose(distances("kl", p, q).mean(), expected) and distances("kl", p, p).mean().abs() < 1e-6


def test_look_ahead_training_sees_what_decoding_will_see():
    """The masked pass over a whole row gives, at each cut, the logits of a pass over that context alone."""
    target = shipped("target")
    student = LookAheadStudent(target, "kl", LookAheadStudent.Settings(learning_rate=1e-3, count=3, stride=5))
    student.part.embeddings.data.normal_(std=0.5)
    row = torch.randint(4096, (1, 24), generator=torch.Generator().manual_seed(0))
    p, q = student.distributions(row)
    embed = target.get_input_embeddings()
    for group, cut in enumerate(range(0, 21, 5)):
        x = torch.cat([embed(row[:, : cut + 1]), student.part.embeddings[None]], 1)
        alone = target(inputs_embeds=x).logits[0, cut + 1 :]
        assert torch.allclose(q[group], alone, atol=2e-3)
        assert torch.allclose(p[group], target(row).logits[0, cut + 1 : cut + 4], atol=2e-3)


def test_untrained_heads_are_the_models_own():
    heads = Heads(HeadsConfig(hidden_size=8, heads=3, inner=4))
    hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads(hidden), hidden[:, :, None].expand(2, 5, 3, 8))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("loss=mse", "loss=mse is not allowed: it must be one of kl, tv"),
        ("text=/nowhere.txt", "text=/nowhere.txt is not a file"),
        ("row=8 method.heads=8", "row=8 is not possible with 8 guesses ahead"),
        ("method.heads=0", "method.heads=0 is not allowed: it must be an integer >= 1"),
        ("target.path=/nowhere", "target.path=/nowhere is not a model"),
        ("+nonsense=1", "nonsense is not a setting"),
        ("method._target_=specbench.drafters.ngram_lm.RandomDrafter", "must be a subclass of Student"),
        ("epochs=1e-320", "epochs=1e-320 is not allowed"),
        ("row=100000", "row=100000 is not possible: the context of shipped:target is 512 tokens"),
    ],
)
def test_mistakes_are_told_before_anything_loads(override, told, tmp_path):
    with pytest.raises(ConfigError, match=told.replace("/", ".")):
        train(training(*override.split()), tmp_path)


@pytest.mark.parametrize(("method", "key"), [
    ("medusa", "path"), ("blockwise", "path"), ("early_exit", "head"), ("distill", "path"), ("pass", "lookahead"),
])  # fmt: skip
def test_what_is_said_of_the_use_composes(method, key, tmp_path):
    folder = tmp_path / "a=1,b=shipped_x"
    method = training(f"method={method}").method
    kind = hydra.utils.get_class(method._target_)
    config = composed(*shlex.split(shlex.join(kind.use(validate(kind.Settings, method), folder))))
    assert config.drafter[key] == str(folder)


def test_an_encoder_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="it is an encoder-decoder, and python -m specbench"):
        train(training(f"target.path={tmp_path}"), tmp_path / "out")


def test_a_text_becomes_rows():
    class Letters:
        eos_token_id = 9

        def __call__(self, texts, **options):
            return {"input_ids": [[int(letter) for letter in text] for text in texts]}

    assert text_rows(["123", "45"], Letters(), 3, 100).tolist() == [[1, 2, 3], [9, 4, 5]]
    assert text_rows(["123", "45"], Letters(), 3, 3).tolist() == [[1, 2, 3]]
    with pytest.raises(ConfigError, match="row=8 is not possible"):
        text_rows(["123"], Letters(), 8, 100)


def test_the_look_ahead_of_another_width_is_refused(tmp_path):
    LookAhead(LookAheadConfig(hidden_size=160, count=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is for hidden states of 160, but shipped:target .* has 640"):
        build(check(composed("drafter=pass_lookahead", f"drafter.lookahead={tmp_path}", "data.limit=1")))
