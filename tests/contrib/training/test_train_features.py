"""Training of EAGLE-3 and DFlash: the training's forward against the drafter's own steps, losses by hand, resuming,
the target's own answers, and what speculators reads."""

import csv
import json
import math
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint
from choosing import only, slow_unless
from eagle_cases import numbers
from safetensors.torch import load_file
from small_runs import parts_of, training
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from specbench.contrib.training import stored as stored_module
from specbench.contrib.training.dflash import DFlashStudent
from specbench.contrib.training.eagle3 import Eagle3Student
from specbench.contrib.training.rows import TrainingRows, answer_parts, end_token, own_answers, text_parts
from specbench.contrib.training.stored import store, unpack
from specbench.contrib.training.trainer import checked_settings, train
from specbench.errors import ConfigError
from specbench.models.published import expanded

pytest.importorskip("accelerate")
TEXT = [5, 9, 2, 7, 11, 3, 8, 1, 30, 4, 77, 12]
FEWER = 60  # tokens of the draft vocabulary
COMMON = {"layers": 1, "draft_vocab_size": FEWER, "feature_layers": None, "decay": 0.8,
          "intermediate_size": None, "dtype": "float32", "learning_rate": 3e-3}  # fmt: skip
OWN = {"eagle3": {"steps": 3, "head": "own"}, "dflash": {"block_size": 4, "anchors": 6, "mask_token": None}}
KINDS = {"eagle3": Eagle3Student, "dflash": DFlashStudent}


@pytest.fixture(autouse=True)
def _gradients():
    with torch.inference_mode(False), torch.enable_grad():
        yield


@cache
def target_folder() -> Path:
    return checkpoint(Path(mkdtemp()) / "target", num_hidden_layers=8, initializer_range=0.3)


def student_of(name: str, **changes):
    """A student whose training text is TEXT and random tokens, with random weights."""
    target = AutoModelForCausalLM.from_pretrained(target_folder())
    torch.manual_seed(0)
    kind = KINDS[name]
    student = kind(target, "kl", kind.Settings(**(COMMON | OWN[name] | changes)))
    tokens = torch.cat([torch.tensor([TEXT * 4]), torch.randint(100, (3, 48))])
    student.prepare(*vars(TrainingRows.whole(tokens)).values())
    for weight in filter(lambda weight: weight.requires_grad, student.parameters()):
        weight.data += 0.3 * torch.randn_like(weight)
    return student.eval()


def guesses_of(student, text=TEXT, features=None) -> dict[tuple[int, int], torch.Tensor]:
    """The student's logits [V'] of guess k behind place j, by (k, j)."""
    tokens = torch.tensor([text])
    with torch.no_grad():
        if features is None:
            features = student.read(tokens)[0]
        spans = torch.tensor([[0, len(text) - 1]])
        return {
            (k, j): q[0, i]
            for k, (places, q) in enumerate(student.guesses(tokens, features, spans), 1)
            for i, j in enumerate(places[0].tolist())
        }


@cache
def saved(name: str) -> Path:
    folder = Path(mkdtemp()) / name
    student_of(name).save(folder, [])
    return folder


@cache
def drafter(name: str):
    """What `drafter=NAME` loads of a student's file, and its target."""
    own = parts_of("target=model", f"target.path={target_folder()}", f"drafter={name}", f"drafter.path={saved(name)}",
                   "executor=eager", "gamma=3")  # fmt: skip
    return own.drafter, own.target


def target_states(target, layers) -> torch.Tensor:
    """Hidden states [1, T, A * H] of the stock module, as transformers gives them."""
    found = target.stock_module().model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer] for layer in layers], -1)


# -- EAGLE-3 -------------------------------------------------------------------------------------------


@torch.inference_mode()
def eagle_steps(place: int, count: int, late: int = 0) -> list[torch.Tensor]:
    """The drafter's own steps behind a place: it reads the pairs of the text with the target's hidden states, then the
    text's tokens with its own states. Logits [V] of each guess. `late` takes hidden states of later tokens."""
    own, target = drafter("eagle3")
    model = own.pairs
    states = target_states(target, model.layers)[:, late : late + place + 1]
    model.allocate(1, 32)
    visible = model.make_room([0], len(TEXT) + count)
    tokens = torch.tensor([TEXT])
    begin, last = torch.zeros(1, dtype=torch.long), torch.tensor([place])
    found = []
    for k in range(count):
        if k == 0:
            q, state = model.predict(tokens[:, 1 : place + 2], states, begin, last, visible)
        else:
            q, state = model.predict(tokens[:, place + k + 1, None], state, begin + place + k, None, visible)
        found.append(q[0, 0])
    return found


def eagle_difference(**changes) -> float:
    """The largest one between the student's logits and those of the drafter's steps, at several places."""
    student = student_of("eagle3")
    logits, count = guesses_of(student), 4
    return max(
        (logits[k, place] - q[student.targets]).abs().max().item()
        for place in (0, 3, 6)
        for k, q in enumerate(eagle_steps(place, count, **changes), 1)
    )


def test_training_sees_what_the_drafter_computes_step_by_step():
    """Guesses 1 to 4 behind several places: each step at once for all places, against one place after another. Negative
    control: hidden states of the next token. An empty list of layers is the usual three."""
    assert student_of("eagle3", feature_layers=[]).layers == student_of("eagle3").layers
    assert eagle_difference() < 1e-4
    assert eagle_difference(late=1) > 1e-2


@torch.inference_mode()
def dflash_difference(late: int = 0) -> float:
    """As `eagle_difference`, of the blocks that the drafter fills one after another."""
    own, target = drafter("dflash")
    student, model, found = student_of("dflash"), own.model, []
    states = target_states(target, target.feature_layers)
    trained = guesses_of(student)
    for place in {place for _, place in trained}:
        model.allocate(1, 32)
        model.hear(None, 0, states[:, late : late + place + 1])
        model.read_prompts()
        logits = model._logits(SimpleNamespace(tokens=torch.tensor([TEXT]), length=torch.tensor([place + 2])), 32)[0]
        found += [(logits[k - 1] - trained[k, place]).abs().max().item() for k in (1, 2, 3)]
    assert len(found) > 12
    return max(found)


def test_training_fills_the_blocks_that_the_drafter_fills():
    """Many blocks in one pass against one at a time. Negative control: hidden states of the next token."""
    assert dflash_difference() < 1e-4
    assert dflash_difference(late=1) > 1e-2


def test_a_guess_does_not_see_what_follows_it():
    """Guess k behind place j knows the tokens up to j + k and hidden states up to j, no more."""
    student = student_of("eagle3")
    plain, other = guesses_of(student), list(TEXT)
    other[7] = 99
    features = student.read(torch.tensor([TEXT]))[0]
    changed = guesses_of(student, other, features)
    for (k, j), q in plain.items():
        assert torch.equal(q, changed[k, j]) == (j + k < 7), (k, j)
    features[:, 5] += 1
    changed = guesses_of(student, TEXT, features)
    for (k, j), q in plain.items():
        assert torch.equal(q, changed[k, j]) == (j < 5), (k, j)


@pytest.mark.parametrize("name", KINDS)
def test_q_of_other_tokens_is_zero(name):
    """d2t holds differences, and names the most frequent tokens of the rows."""
    student, (own, _) = student_of(name), drafter(name)
    stored = load_file(saved(name) / "model.safetensors")
    targets = torch.arange(FEWER) + stored["d2t"]
    assert set(TEXT) <= set(targets.tolist()) and torch.equal(targets, student.targets)
    assert torch.equal(stored["t2d"].nonzero()[:, 0], targets)
    model = own.pairs if name == "eagle3" else own.model
    law = model.vocabulary.fit(torch.zeros(1, FEWER)).softmax(-1)[0]
    assert torch.equal(law.nonzero()[:, 0], targets)


# -- speculators ---------------------------------------------------------------------------------------------

# Logits of the first four tokens of guesses 1 to 3 behind place 4 by speculators 0.9.0, from the student's own file
# (`theirs` below; eager attention, float32, transformers 5.23).
STORED = {
    "eagle3": [[1.18538, 0.084453, -1.124773, -0.891633], [-0.26976, 0.606434, 0.70496, -0.100527],
               [0.26811, -0.161364, -0.383912, -0.114145]],
    "dflash": [[0.012658, 3.205246, 2.287549, -1.563613], [0.221228, 3.627151, 2.381755, -1.917912],
               [0.25676, 3.678246, 2.38289, -1.968192]],
}  # fmt: skip


def with_numbers(name: str):
    """A student with weights, embedding and hidden states [1, T, A * H] that follow from names alone."""
    student = student_of(name)
    tensors = {**student.tensors(), "embed_tokens.weight": student.target.get_input_embeddings().weight}
    for own, tensor in tensors.items():
        tensor.data.copy_(numbers(own, *tensor.shape))
    return student, numbers("features", len(TEXT), len(student.read_layers) * 16)[None]


def theirs(
    name: str, folder: Path, embedding: torch.Tensor, features: torch.Tensor
) -> dict[tuple[int, int], torch.Tensor]:
    """`guesses_of`, as speculators' own loader and its forward for training give them."""
    speculators = pytest.importorskip("speculators")
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    model.embed_tokens.weight.data.copy_(embedding)
    found, tokens, documents = [], torch.tensor([TEXT]), torch.zeros(1, len(TEXT), dtype=torch.long)
    model.lm_head.register_forward_hook(lambda module, given, result: found.append(result[0].detach()))
    if name == "eagle3":
        model(features[:, :-1], tokens[:, 1:], documents[:, 1:], ttt_steps=3)
        return {(k, j): found[k - 1][j] for k in (1, 2, 3) for j in range(len(TEXT) - k)}
    mask = torch.ones(1, len(TEXT))
    index = model._backbone_forward(features, tokens, mask, features[..., :16], documents, max_anchors=len(TEXT))[-1]
    blocks = zip(index.view(-1, 4).tolist(), found[0].unflatten(0, (-1, 4)), strict=True)
    return {(k, at[0] - 1): q[k] for at, q in blocks for k in (1, 2, 3) if at[0] > 0}


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_speculators(name):
    student, features = with_numbers(name)
    logits = guesses_of(student, TEXT, features)
    found = torch.stack([logits[k, 4][:4] for k in (1, 2, 3)])
    torch.testing.assert_close(found, torch.tensor(STORED[name]), atol={"dflash": 1e-5, "eagle3": 3e-5}[name], rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_speculators_reads_what_was_written(name, tmp_path):
    """All guesses, and that it takes the target's embedding for the one that is not stored."""
    student, features = with_numbers(name)
    student.save(tmp_path, [])
    ours = guesses_of(student, TEXT, features)
    other = theirs(name, tmp_path, student.target.get_input_embeddings().weight, features)
    both = ours.keys() & other.keys()
    assert len(both) >= 12
    assert max((ours[at] - other[at]).abs().max().item() for at in both) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_what_speculators_wrote_is_read(name, tmp_path):
    """A folder of its own `save_pretrained`: the drafter's tensors are those of the student's folder."""
    speculators = pytest.importorskip("speculators")
    speculators.SpeculatorModel.from_pretrained(saved(name)).save_pretrained(tmp_path)
    ours, _ = drafter(name)
    read = parts_of("target=model", f"target.path={target_folder()}", f"drafter={name}", f"drafter.path={tmp_path}",
                    "executor=eager", "gamma=3").drafter  # fmt: skip
    pairs = [(own.pairs if name == "eagle3" else own.model).module.state_dict() for own in (ours, read)]
    torch.testing.assert_close(*pairs, rtol=0, atol=0)


# -- Small files -------------------------------------------------------------------------------------------


def test_bytes_of_others_stay_bytes():
    """Four bits with scales that are exponents, as in MXFP4: they are refused later, as no floating point."""
    tensors = {"a.weight": torch.ones(4, 32, dtype=torch.uint8), "a.weight_scale": torch.ones(4, 2, dtype=torch.uint8)}
    assert expanded(tensors) == tensors


def test_a_head_of_the_target_is_not_trained_and_not_stored(tmp_path):
    """The drafter reads the target's rows of its own tokens, in the order of d2t."""
    student = student_of("eagle3", head="target")
    head, rows = student.network.get_output_embeddings().weight, student.head_rows()
    assert torch.equal(head, rows) and not head.requires_grad and "network.lm_head.weight" not in student.state_dict()
    student.save(tmp_path, [])
    assert not any("lm_head" in key for key in load_file(tmp_path / "model.safetensors"))
    own = parts_of("target=model", f"target.path={target_folder()}", "drafter=eagle3", f"drafter.path={tmp_path}",
                   "executor=eager", "gamma=3")  # fmt: skip
    found = own.drafter.pairs.module.get_output_embeddings().weight
    assert torch.equal(found, rows) and not torch.equal(found, rows.flip(0))
    assert torch.equal(found, own.target.stock_module().get_output_embeddings().weight[student.targets])


# -- Loss and measurement --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_the_loss_is_that_of_each_guess_by_hand(loss):
    """Over a padded row of which places 2 to 8 count: guess k behind place j against p behind token j + k."""
    student = student_of("eagle3")
    student.loss = loss
    student.train()
    tokens = torch.tensor([[*TEXT[:10], 0, 0]])
    p = student.target(tokens[:, :10]).logits[0].softmax(-1)
    logits = guesses_of(student, TEXT[:9])
    total = 0.0
    for k in (1, 2, 3):
        found = []
        for j in range(2, 8 - k + 1):
            law, q = p[j + k][student.targets], logits[k, j].softmax(-1)
            share = law.sum()
            law = law / share
            distance = (law * (law / q).log()).sum() if loss == "kl" else 0.5 * (law - q).abs().sum()
            found.append(share * distance)
        total += 0.8 ** (k - 1) * sum(found) / len(found)
    expected = total / (1 + 0.8 + 0.64)
    assert student(tokens, torch.tensor([[2, 8]]))["loss"].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_beta_and_agreement_are_those_of_the_whole_vocabulary(name):
    student = student_of(name)
    tokens = torch.tensor([TEXT])
    p = student.target(tokens).logits[0].softmax(-1)
    sums, logits = student.evaluate(tokens, torch.tensor([[0, len(TEXT) - 1]])), guesses_of(student)
    for k in (1, 3):
        q = torch.zeros(0, p.shape[1])
        places = [j for own, j in logits if own == k and j + k < len(TEXT)]
        q = torch.stack(
            [torch.zeros(p.shape[1]).index_add(0, student.targets, logits[k, j].softmax(-1)) for j in places]
        )
        law = p[[j + k for j in places]]
        assert sums[k - 1, 0].item() == pytest.approx(torch.minimum(law, q).sum().item(), abs=1e-3)
        assert sums[k - 1, 1] == (law.argmax(-1) == q.argmax(-1)).sum() and sums[k - 1, -1] == len(places)


@pytest.mark.parametrize("name", only(["dflash"], KINDS))
def test_the_loss_falls_and_the_target_stays(name):
    student = student_of(name).train()
    rows = TrainingRows.whole(torch.tensor([TEXT * 2] * 2))
    before = {key: tensor.clone() for key, tensor in student.target.state_dict().items()}
    optimiser, losses = AdamW(student.parameters(), lr=0.01), []
    for _ in range(30):
        optimiser.zero_grad()
        losses.append(student(rows.tokens, rows.spans)["loss"])
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(tensor, before[key]) for key, tensor in student.target.state_dict().items())
    assert not any("target" in key for key in student.state_dict())


# -- Whole trainings ---------------------------------------------------------------------------------------


def small_training(name, folder, *overrides, **others):
    text = folder / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 60)
    own = {"method.draft_vocab_size": FEWER, "method.layers": 1, "row": 16, "tokens": 256, "batch_size": 2, "every": 3,
           "method.dtype": "float32", "method.learning_rate": 0.01, "warmup": 0, "device": "cpu"} | others  # fmt: skip
    return training(f"method={name}", "target=model", f"target.path={target_folder()}", f"text={text}",
                    *(f"{key}={value}" for key, value in own.items()), *overrides)  # fmt: skip


@pytest.mark.parametrize("name", only(["eagle3"], KINDS))
def test_an_interrupted_training_goes_on_where_it_was(name, tmp_path, monkeypatch):
    """The same weights and curve as without an interruption; negative control: begun anew with another seed."""
    whole = train(small_training(name, tmp_path), tmp_path / "whole")
    plain, calls = KINDS[name].forward, []

    def forward(self, *given, **named):
        calls.append(1)
        if len(calls) == 6:
            raise MemoryError
        return plain(self, *given, **named)

    monkeypatch.setattr(KINDS[name], "forward", forward)
    with pytest.raises(MemoryError):
        train(small_training(name, tmp_path), tmp_path / "cut")
    with pytest.raises(ConfigError, match="holds an unfinished training with another row: give another folder"):
        train(small_training(name, tmp_path, row=24), tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-6").mkdir()  # one that was not written to its end
    cut = train(small_training(name, tmp_path), tmp_path / "cut")
    assert len(calls) == 6 + 5 and cut["training"]["steps"] == 8
    assert cut["training"]["losses"] == whole["training"]["losses"] and len(whole["training"]["losses"]) == 3
    first, second = (load_file(tmp_path / way / "model.safetensors") for way in ("whole", "cut"))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert (tmp_path / "whole" / "curve.csv").read_text() == (tmp_path / "cut" / "curve.csv").read_text()
    assert not list((tmp_path / "cut").glob("checkpoint-*"))
    lines = list(csv.DictReader((tmp_path / "cut" / "curve.csv").open()))
    assert [line["step"] for line in lines] == ["3", "6", "8"] and lines[-1]["tokens"] == "256"
    assert float(lines[-1]["agreement_1"]) == pytest.approx(whole["agreement_by_guess"][0], abs=1e-4)
    other = train(small_training(name, tmp_path, seed=1), tmp_path / "other")
    assert other["training"]["losses"] != whole["training"]["losses"]
    assert other["alpha_by_guess"] != cut["alpha_by_guess"]


def stopped(folder, monkeypatch, **others) -> Path:
    """The folder of a training that was interrupted behind its first checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Student, "save", None)
        with pytest.raises(TypeError):
            train(small_training("eagle3", folder, tokens=64, **others), folder / "cut")
    assert list((folder / "cut").glob("checkpoint-*"))
    return folder / "cut"


def refused(folder, told, *overrides, **others):
    """A training there is refused with one sentence, and its checkpoints stay."""
    before = sorted(path.name for path in (folder / "cut").iterdir() if path.name != ".lock")
    with pytest.raises(ConfigError, match=told) as error:
        train(small_training("eagle3", folder, *overrides, tokens=64, **others), folder / "cut")
    assert "\n" not in str(error.value) and "hydra.run.dir" in str(error.value)
    assert sorted(path.name for path in (folder / "cut").iterdir() if path.name != ".lock") == before


@pytest.mark.slow  # test_an_interrupted_training_goes_on_where_it_was is interrupted earlier
@pytest.mark.parametrize("name", KINDS)
def test_a_training_that_ends_while_it_is_written_goes_on_too(name, tmp_path, monkeypatch):
    train(small_training(name, tmp_path), tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(KINDS[name], "save", None)
        train(small_training(name, tmp_path), tmp_path / "late")
    train(small_training(name, tmp_path), tmp_path / "late")
    first, late = (load_file(tmp_path / way / "model.safetensors") for way in ("whole", "late"))
    assert all(torch.equal(tensor, late[key]) for key, tensor in first.items())


@pytest.mark.parametrize(("resume", "content"), [
    slow_unless(not resume or content is None, resume, content)
    for resume in (True, False) for content in (None, '{"row": ', "[]", "{}")
])  # fmt: skip
def test_checkpoints_of_others_stay(resume, content, tmp_path, monkeypatch):
    """Without a training.json, or with one that is damaged or no training's; whole checkpoints, and others."""
    path = stopped(tmp_path, monkeypatch) / "training.json" if resume else tmp_path / "cut" / "training.json"
    (tmp_path / "cut" / "checkpoint-7").mkdir(parents=True)
    path.unlink(missing_ok=True) if content is None else path.write_text(content)
    refused(tmp_path, "cut has a checkpoint-\\*, but no training.json that says what it is of", f"resume={resume}")


@pytest.mark.slow
def test_a_training_goes_on_with_the_same_files_alone(tmp_path, monkeypatch):
    """The text, or the target's weights, that have changed under the same path are another training; a folder that the
    Trainer did not name is left where it is."""
    target, text = copytree(target_folder(), tmp_path / "target"), tmp_path / "own.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 60)
    at = {"target.path": target, "text": text}
    folder, plain = stopped(tmp_path, monkeypatch, **at), text.read_text()
    text.write_text(plain.replace("add", "sub"))
    refused(tmp_path, "an unfinished training with another version of text: give", **at)
    text.write_text(plain)
    os.utime(target / "model.safetensors", ns=(1, 1))
    refused(tmp_path, "an unfinished training with another version of target.path: give", **at)
    (folder / "checkpoint-best").mkdir()
    found = train(small_training("eagle3", tmp_path, "resume=false", tokens=64, **at), folder)
    assert found["training"]["status"] == "complete"
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-best"]


@pytest.mark.slow
def test_gradients_of_several_batches_make_one_step(tmp_path):
    """Two batches of one row are one of two rows where both have as many places that count, as all rows of a text.
    Answers of unequal lengths have not: a step is the mean of the batches' losses, each over its own places."""
    ways = {"one": {"batch_size": 2}, "two": {"batch_size": 1, "accumulate": 2}}
    for way, others in ways.items():
        found = train(small_training("eagle3", tmp_path, epochs=0.5, **others), tmp_path / way)
        assert found["training"]["steps"] == 4
    first, second = (load_file(tmp_path / way / "model.safetensors") for way in ways)
    assert all(torch.allclose(tensor.float(), second[key].float(), atol=1e-5) for key, tensor in first.items())
    student, rows = student_of("eagle3"), torch.tensor([TEXT, TEXT[::-1]])
    for last, same in (([11, 11], True), ([11, 5], False)):
        spans = torch.tensor([[0, end] for end in last])
        alone = torch.stack([student(rows[i, None], spans[i, None])["loss"] for i in (0, 1)]).mean()
        assert torch.isclose(alone, student(rows, spans)["loss"], rtol=1e-4) == same


def test_bfloat16_trains(tmp_path):
    found = train(small_training("eagle3", tmp_path, precision="bfloat16", tokens=64), tmp_path / "out")
    assert all(math.isfinite(alpha) and 0 <= alpha <= 1 for alpha in found["alpha_by_guess"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for key, tensor in stored.items() if "2" not in key} == {torch.float32}


# -- Hidden states from a file -----------------------------------------------------------------------------


def stored_rows(student, rows, folder):
    """What an interrupted and continued call stores, one row after another."""
    with pytest.raises(MemoryError):
        store(cut_off(student, 4), rows, folder, "target", 1)
    return store(student, rows, folder, "target", 1)


def cut_off(student, calls):
    """The student, whose target is read so many times only."""
    left = iter(range(calls))

    def read(tokens):
        if next(left, None) is None:
            raise MemoryError
        return type(student).read(student, tokens)

    return SimpleNamespace(read=read, target=student.target, read_layers=student.read_layers, targets=student.targets,
                           head_rows=student.head_rows)  # fmt: skip


def loss_and_gradients(student, rows, features):
    """Of a batch of all rows; the places that DFlash draws are the same in every call."""
    torch.manual_seed(1)
    student.zero_grad()
    loss = student(rows.tokens, rows.spans, features)["loss"]
    loss.backward()
    return loss.item(), torch.cat([weight.grad.flatten() for weight in student.parameters() if weight.requires_grad])


@pytest.mark.parametrize("name", KINDS)
def test_stored_hidden_states_give_the_same_loss_and_gradients(name, tmp_path):
    """Within the rounding of 16 bits, over rows of several lengths. Negative control: those of another row."""
    student = student_of(name).train()
    rows = TrainingRows(
        torch.tensor([TEXT, TEXT[::-1], [*TEXT[3:], 0, 0, 0], TEXT]), torch.tensor([[0, 11], [4, 9], [2, 8], [1, 10]])
    )
    kept = stored_rows(student, rows, tmp_path)
    stored = torch.stack([kept[i]["stored"] for i in range(4)])
    assert stored.shape[:2] == rows.tokens.shape and kept.path.stat().st_size == (12 + 10 + 9 + 11) * stored.shape[2]
    loss, gradients = loss_and_gradients(student, rows, None)
    same, close = loss_and_gradients(student, rows, stored)
    assert same == pytest.approx(loss, rel=1e-3) and (close - gradients).norm() < 0.01 * gradients.norm()
    other, far = loss_and_gradients(student, rows, stored.roll(1, 0))
    assert other != pytest.approx(loss, rel=1e-2) and (far - gradients).norm() > 0.1 * gradients.norm()
    best = student.read(rows.tokens).best
    assert torch.equal(unpack(student, stored).best[0], best[0])
    content = kept.path.read_bytes()
    assert store(cut_off(student, 1), rows, tmp_path, "target", 1).path.read_bytes() == content  # nothing is read again
    assert store(student, TrainingRows(rows.tokens.flip(0), rows.spans), tmp_path, "target", 1).path != kept.path
    assert not kept.path.exists()


@pytest.mark.slow  # test_stored_hidden_states_give_the_same_loss_and_gradients is quicker
@pytest.mark.parametrize("name", KINDS)
def test_a_training_over_several_epochs_runs_the_target_once(name, tmp_path, monkeypatch):
    """It loses what one on the fly does, and leaves no file behind."""
    plain, read = KINDS[name].read, []
    monkeypatch.setattr(KINDS[name], "read", lambda self, tokens: read.append(tokens.numel()) or plain(self, tokens))
    found = {}
    for way in ("live", "disk"):
        read.clear()
        found[way] = train(small_training(name, tmp_path, epochs=3, every=100, features=way), tmp_path / way)
        found[way]["read"] = sum(read)
    measured = sum(row.numel() for row in text_parts(str(tmp_path / "text.txt"), stock()[0], 16, 256, 0)[1].tokens)
    rows = found["live"]["training"]["tokens"]
    assert found["live"]["read"] == 3 * rows + measured and found["disk"]["read"] == rows + measured + 2
    losses = [found[way]["training"]["losses"] for way in found]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert not list(tmp_path.rglob("features-*"))


def test_what_16_bits_cannot_store_is_refused(tmp_path, monkeypatch):
    student, rows = student_of("eagle3"), TrainingRows.whole(torch.tensor([TEXT]))
    plain = Eagle3Student.read
    for told, change in (
        ("a hidden state is too large for 16 bits", lambda seen: seen._replace(features=seen.features * 1e9)),
        ("the target's logits are not its output matrix times", lambda seen: seen._replace(law=seen.law.tanh())),
    ):
        monkeypatch.setattr(Eagle3Student, "read", lambda self, tokens, change=change: change(plain(self, tokens)))
        with pytest.raises(ConfigError, match=f"features=disk is not possible: {told}"):
            store(student, rows, tmp_path, "target", 1)
    monkeypatch.setattr(stored_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(
        ConfigError, match=r"features=disk is not possible: it takes .* GB in .*, where 1e-08 GB are free"
    ):
        store(student, rows, tmp_path, "target", 1)


# -- The target's own answers ------------------------------------------------------------------------------


def answer_scalars(tmp_path, count=24, *overrides):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}(a, b):"}) + "\n" for i in range(count)))
    config = small_training(
        "eagle3", tmp_path, f"prompts={path}", "max_new_tokens=6", *overrides, text="null", row=24, tokens=1000
    )
    return config, checked_settings(config)[0]


def stock():
    from specbench.models.pretrained import PretrainedModel, load_module, load_tokenizer

    settings = PretrainedModel.Settings(str(target_folder()), weights="pretrained", chat_template="never")
    module = load_module(settings, "target", torch.device("cpu"), torch.float32, 0)
    return load_tokenizer(settings, "target"), settings, module


def test_answers_are_the_targets_own_and_are_kept(tmp_path, monkeypatch):
    """Greedy answers in a padded batch, against one token at a time; a file that was cut off is completed, and the
    first answer to each prompt is taken."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer, settings, target = stock()
    _, scalars = answer_scalars(tmp_path)
    answers = own_answers(scalars, tokenizer, settings, target)
    assert len(answers) == 24
    for tokens, begin in answers[::5]:
        text = tokenizer.decode(tokens[:begin])
        assert text.startswith("def f") and text.endswith(":") and len(tokens) == begin + 6
        for end in range(begin, len(tokens)):
            assert target(torch.tensor([tokens[:end]])).logits[0, -1].argmax() == tokens[end]
    (path,) = (tmp_path / "cache" / "answers").glob("*.jsonl")
    whole = path.read_text()
    path.write_text(whole[: len(whole) * 9 // 10])
    assert own_answers(scalars, tokenizer, settings, target) == answers and path.read_text() == whole
    lines = whole.splitlines(keepends=True)
    path.write_text("".join([*lines[:5], *lines[3:5], lines[20], *lines[9:12]]))  # twice, out of order, and with gaps
    assert own_answers(scalars, tokenizer, settings, target) == answers
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted([*lines, *lines[3:5]])
    other = json.dumps({**json.loads(lines[9]), "tokens": [1, 2, 3]}) + "\n"
    path.write_text(whole + other)
    monkeypatch.setattr(target, "generate", None)
    assert own_answers(scalars, tokenizer, settings, target) == answers
    rows, held_out = answer_parts(scalars, tokenizer, settings, target)
    assert len(rows.tokens) == 22 and len(held_out.tokens) == 2
    tokens, begin = answers[9]
    assert held_out.tokens[0, : len(tokens)].tolist() == tokens
    assert held_out.spans[0].tolist() == [begin - 1, len(tokens) - 2]


def test_answers_of_a_file_are_read(tmp_path):
    """Answers that another program decoded: nothing is decoded, and the end of text stands behind those that ended."""
    tokenizer, settings, target = stock()
    _, scalars = answer_scalars(tmp_path, 20)
    said = [f" return a + {i}" for i in range(20)]
    lines = [{"prompt": f"def f{i}():", "answer": said[i]} | ({"finish_reason": "length"} if i == 3 else {})
             for i in range(20)]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    target.generate = None
    answers = own_answers(scalars, tokenizer, settings, target)
    end = tokenizer.decode([target.generation_config.eos_token_id])
    for i, (tokens, begin) in enumerate(answers):
        assert tokenizer.decode(tokens[:begin]) == f"def f{i}():"
        assert tokenizer.decode(tokens[begin:]) == said[i] + (end if i != 3 else "")
    for stops, own, expected in ([[3, 7], 7, [7]], [[3], 7, [3]], [5, None, [5]], [None, 7, []]):
        target.generation_config.eos_token_id = stops
        assert end_token(SimpleNamespace(eos_token_id=own), target) == expected
    target.generation_config.eos_token_id = [3, 4]
    with pytest.raises(ConfigError, match=r"ends its texts with any of \[3, 4\], and its tokenizer with 7"):
        end_token(SimpleNamespace(eos_token_id=7), target)


def test_sampled_answers_are_those_of_no_interruption(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer, settings, target = stock()
    _, scalars = answer_scalars(tmp_path, 12, "temperature=1")
    answers = own_answers(scalars, tokenizer, settings, target)
    (path,) = (tmp_path / "cache" / "answers").glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    assert own_answers(scalars, tokenizer, settings, target) == answers


@pytest.mark.parametrize("what", only(("weights", "nothing"), [
    "weights", "revision", "tokenizer", "chat template", "nothing"
]))  # fmt: skip
def test_answers_are_of_one_target(what, tmp_path, monkeypatch):
    """Another content under the same path is another target, whose answers are decoded."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer, settings, target = stock()
    folder = copytree(target_folder(), tmp_path / "target")
    settings = replace(settings, path=str(folder))
    _, scalars = answer_scalars(tmp_path, 2)
    own_answers(scalars, tokenizer, settings, target)
    if what == "weights":
        os.utime(folder / "model.safetensors", ns=(1, 1))
    elif what == "revision":
        settings = replace(settings, revision="other")
    elif what == "tokenizer":
        tokenizer.add_tokens(["def f"])
    elif what == "chat template":
        tokenizer.chat_template = "{{ messages }}"
    own_answers(scalars, tokenizer, settings, target)
    assert len([*(tmp_path / "cache" / "answers").glob("*.jsonl")]) == (1 if what == "nothing" else 2)


def test_one_training_decodes_while_another_waits(tmp_path, monkeypatch, caplog):
    """Two that begin together decode every answer once."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    tokenizer, settings, target = stock()
    _, scalars = answer_scalars(tmp_path)
    plain, asked, found, begun = target.generate, [], [], Event()

    def generate(**given):
        asked.append(len(given["input_ids"]))
        begun.set()
        time.sleep(0.3)
        return plain(**given)

    monkeypatch.setattr(target, "generate", generate)
    threads = [Thread(target=lambda: found.append(own_answers(scalars, tokenizer, settings, target))) for _ in (1, 2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert asked == [16, 8] and found[0] == found[1] and len(found[0]) == 24
    assert "another training decodes these answers" in caplog.text


@pytest.mark.slow  # test_answers_are_the_targets_own_and_are_kept and the trainings on text have its parts
def test_a_training_on_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    config, _ = answer_scalars(tmp_path)
    found = train(config, tmp_path / "out")
    assert found["held_out_positions"] == 2 * 5  # of two answers of six tokens, the first of which follows from p alone
    assert (tmp_path / "out" / "model.safetensors").is_file()


# -- Mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("method.draft_vocab_size=5000", "method.draft_vocab_size=5000 is not possible: the target has 4160 tokens"),
        ("method.draft_vocab_size=3", "draft_vocab_size=3 is not allowed: it must be an integer >= 20 or null"),
        ("method.feature_layers=[1,9]", "is not possible: the target has 8 layers"),
        ("method.steps=0", "method.steps=0 is not allowed"),
        ("method.steps=16 row=16", "row=16 is not possible with 16 guesses ahead"),
        ("precision=int8", "precision=int8 is not allowed: it must be one of float32, bfloat16"),
        ("prompts=/nowhere.jsonl text=null", "prompts=/nowhere.jsonl is not a file"),
        ("prompts={text} text=null", "prompts=.* line 1 is not JSON"),
        ("prompts={other} text=null", 'prompts=.* line 1 has no text: it must be an object with a "prompt"'),
        ("prompts={half} text=null", 'prompts=.* line 2 must have an "answer" that is a text, as every line or none'),
        ("prompts={why} text=null", 'prompts=.* line 1 has a "finish_reason" that is not "stop" or "length"'),
        slow_unless(False, "prompts={few} text=null", "gives 3 answers within row=16 tokens: it must give 10"),
        ("prompts={few}", "text=.* and prompts=.* are both set"),
        ("every=0", "every=0 is not allowed"),
        ("features=memory", "features=memory is not allowed: it must be one of live, disk"),
        ("accumulate=0", "accumulate=0 is not allowed"),
        ("method=dflash method.mask_token=4160", "method.mask_token=4160 is not possible: the target has 4160 tokens"),
        ("method=dflash method.block_size=1", "method.block_size=1 is not allowed: it must be an integer >= 2"),
    ],
)
def test_mistakes_are_one_sentence(overrides, told, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "few.jsonl").write_text('{"prompt": "def f():"}\n' * 3)
    (tmp_path / "half.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "why.jsonl").write_text('{"prompt": "a", "answer": "b", "finish_reason": "tired"}\n')
    files = {name: tmp_path / f"{name}.jsonl" for name in ("other", "few", "half", "why")}
    files["text"] = tmp_path / "text.txt"
    with pytest.raises(ConfigError, match=told) as error:
        train(small_training("eagle3", tmp_path, *overrides.format(**files).split()), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_prompts_need_a_method_that_learns_from_answers(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "def f():"}\n')
    with pytest.raises(ConfigError, match="is not possible with HeadsStudent: only method=eagle3 and method=dflash"):
        train(training(f"prompts={tmp_path / 'few.jsonl'}"), tmp_path / "out")
    with pytest.raises(ConfigError, match="features=disk is not possible with HeadsStudent: only method=eagle3 and"):
        train(training("features=disk"), tmp_path / "out")
