"""What is checked once of every loaded model: complete, finite, causal, within its tokenizer's range, and with the
logits of its stock module on ragged rows and trees. T tokens, V vocabulary."""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as OF_TEXT

from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.executor import plain_parts
from specbench.decoding.state import Job
from specbench.decoding.token_tree import static_tree
from specbench.errors import ConfigError, IncompleteError, first_line
from specbench.models.architecture import size_of, stops_of
from specbench.models.encoder_decoder import KINDS, encoder_words
from specbench.models.encoder_decoder import SIZES as ENCODER_DECODER_SIZES
from specbench.models.language_model import LanguageModel

OUTSIDE = ("cpu", "disk", "meta")  # where layers are put that no GPU has room for
NAMED = 3  # tensors that an error names
MOST_LAYERS = 1000  # building the modules of more would take minutes, even without memory
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
OPTIONAL_SIZES = ("num_attention_heads", "max_position_embeddings", "num_key_value_heads", "head_dim",
                  "intermediate_size")  # fmt: skip
PROBE = 8  # tokens of the texts that show whether a model is causal
NO_LOGITS = "logits that are all 0, or not finite"
# Of the largest logit: far above what two texts in one forward differ by through rounding.
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
TEXT = 8  # tokens, within the shortest context that decodes anything
PARENT, PATHS = (0, 0, 1, 1, 2), ((0, 2, 5), (0, 1, 3), (0, 1, 4))  # a tree, and nodes on its paths
CHAIN = (tuple(range(len(PARENT) + 1)),)
STARTS = (1, 2)  # where each of two rows goes on
PLACED, PLACED_16_BIT = 1e-3, 0.1  # of the largest logit: what rounding may explain there
WORDS_OF_ITS_OWN = 100
WORDS = "The quick brown fox, or def f(x): return 1"


def refuse_bad_sizes(config: PretrainedConfig, where: str) -> None:
    """Raises ConfigError if a size of the model is missing, no integer, or not positive, or if its encoder reads no
    text. `where` comes before the name of the size: "target.path=FOLDER has "."""
    paired = config.is_encoder_decoder
    text = config if paired else config.get_text_config()
    needed = (*SIZES, "num_attention_heads") if paired else SIZES
    optional = ENCODER_DECODER_SIZES if paired else OPTIONAL_SIZES
    if paired:
        named = f"{where}model_type={config.model_type} in its config, "
        if config.model_type not in OF_TEXT:
            raise ConfigError(
                f"{named}whose encoder reads no text: give a model without one, or an encoder-decoder of text, {KINDS}"
            )
        if isinstance(getattr(config, "decoder", None), PretrainedConfig):
            raise ConfigError(
                f"{named}which has one configuration for the encoder and another for the decoder: give an "
                f"encoder-decoder with one for both, {KINDS}"
            )
    for name in (*needed, *(name for name in optional if size_of(text, name) is not None)):
        value = size_of(text, name)
        value = max(value, default=0) if isinstance(value, list) and all(isinstance(v, int) for v in value) else value
        most = MOST_LAYERS if name.endswith("layers") else 2**63 - 1
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            allowed = f"from 1 to {most}" if name.endswith("layers") else ">= 1"
            raise ConfigError(f"{where}{name}={value} in its config: it must be an integer {allowed}")


def refuse_incomplete(info: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError if tensors are missing, unexpected or of another shape, by transformers' loading info."""
    others = [f"{name} {list(stored)} for {list(wanted)}" for name, stored, wanted in info["mismatched_keys"]]
    wrong = {
        "lacks": info["missing_keys"],
        "holds what its config has no place for:": info["unexpected_keys"],
        "has other shapes than its config says:": others,
    }
    found = [f"{what} {few(names)}" for what, names in wrong.items() if names]
    found += [str(message) for message in info["error_msgs"]]
    if found:
        raise ConfigError(f"{key} {'; it '.join(found)}: its weights and its config.json must agree")


def few(names: Iterable[str]) -> str:
    """The first names and the number of the others: "a, b, c and 5 more"."""
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more


def refuse_not_finite(module: nn.Module, key: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if a weight is NaN or infinite in the run's dtype. A device is waited for once."""
    names, finite = {}, []
    for name, weight in module.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and weight.numel() and id(weight) not in names:
            parts = [x for x in plain_parts(weight.detach()) if x.is_floating_point()]
            ends = [torch.stack((x.float() if x.element_size() == 1 else x).aminmax()) for x in parts]  # carry NaN
            if ends:
                names[id(weight)] = name
                finite.append(torch.stack([both.isfinite().all() for both in ends]).all())
    good = torch.stack([whole.to(finite[0].device) for whole in finite]).tolist() if finite else []
    if bad := [name for name, whole in zip(names.values(), good, strict=True) if not whole]:
        advice = "repair it" if dtype == torch.float32 else "use dtype=float32, or repair it"
        raise ConfigError(f"{key} has weights that are not finite in {_name(dtype)}, in {few(bad)}: {advice}")


@torch.no_grad()
def refuse_not_causal(module: PreTrainedModel, key: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if logits at a token change when a later token does, or are not finite. One forward of two
    texts that differ in their last token, as transformers runs it."""
    config = module.config.get_text_config()
    vocabulary, ids = int(config.vocab_size), _probe_ids(config)
    *text, _ = probe_text(module)
    texts = torch.tensor([[*text, ids[-1]], [*text, ids[-2:][0]]], device=module.device)  # [2, T]
    logits = _plain_logits(module, texts, text)  # [2, T, V]
    if logits.shape[-1] != vocabulary:
        raise ConfigError(f"{key} has logits of {logits.shape[-1]} tokens, but vocab_size={vocabulary} in its config")
    before = logits[:, :-1]
    if not bool(logits.isfinite().all()):
        raise ConfigError(f"{key} has logits that are not finite in {_name(dtype)}: use another dtype or model")
    if text and float((before[0] - before[1]).abs().max()) > ROUNDING[dtype] * float(before.abs().max()):
        raise ConfigError(f"{key} is not causal: its logits at a token change with later tokens, give a causal model")


def _plain_logits(module: Any, texts: Tensor, read: EncoderInput) -> Tensor:
    """Logits [n, T, V] of texts [n, T], each after an encoder's input if there is an encoder, without a cache; those of
    tokens that generate() never draws are finite."""
    words = {"input_ids": texts}
    if module.config.is_encoder_decoder:
        words = encoder_words(module, read, len(texts)) | {"decoder_input_ids": texts}
    found: Tensor = module(**words, use_cache=False).logits.float()
    return found


def probe_text(module: PreTrainedModel) -> list[int]:
    """PROBE tokens, or as many as the model reads."""
    config = module.config.get_text_config()
    length = min(PROBE, getattr(config, "max_position_embeddings", None) or PROBE)
    return (_probe_ids(config) * PROBE)[:length]


def _probe_ids(config: Any) -> list[int]:
    """Tokens that no model masks."""
    special = [getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    return [token for token in range(min(int(config.vocab_size), 4 * PROBE)) if token not in special] or [0]


def refuse_bad_stops(module: PreTrainedModel, key: str) -> None:
    """Raises ConfigError if the ids that end a text are no integers of 64 bits."""
    for source in (module.config.get_text_config(), module.generation_config):
        for token in (found := stops_of(source)):
            if not isinstance(token, int) or abs(token) >= 2**63:
                raise ConfigError(f"{key} has eos_token_id={found} in its configuration: it must be token ids")


def refuse_more_ids(tokenizer: Any, key: str, vocabulary: int) -> None:
    """Raises ConfigError if the tokenizer has ids that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        few_tokens = f"{key} has a tokenizer with ids up to {largest}, but the model has {vocabulary} tokens"
        raise ConfigError(f"{few_tokens}: give the tokenizer that the model was trained with")


def refuse_no_text(tokenizer: Any, key: str) -> None:
    """Raises ConfigError if the tokenizer cannot read text; other errors are those of the tokenizer."""
    tokenizer(WORDS)
    special = {*tokenizer.all_special_ids, tokenizer.unk_token_id}
    own = [token for token, index in tokenizer.get_vocab().items() if index not in special]
    texts = (WORDS, " ".join(own[:WORDS_OF_ITS_OWN]))  # it may be of another script
    found = {token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]}
    if found <= special:
        raise ConfigError(f"{key} has a tokenizer that reads no text: its vocabulary file is missing or empty")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_offloaded(module: PreTrainedModel, key: str) -> None:
    """Raises ConfigError if layers are not on a GPU: each step would wait for their weights to be copied."""
    places = {str(place) for place in (getattr(module, "hf_device_map", None) or {}).values()}
    places |= {weight.device.type for weight in module.parameters()}
    if outside := sorted(places.intersection(OUTSIDE)):
        raise ConfigError(
            f"{key} does not fit the GPUs that are visible: device_map=auto puts layers on {' and '.join(outside)}, "
            "where every step would wait for them; give more GPUs, or choose a smaller model"
        )


# -- The adapter: an architecture that it does not call rightly is refused ---------------------------


@torch.inference_mode()
def reads_trees(model: LanguageModel, key: str) -> bool:
    """Whether trees behind two rows of unequal lengths have the logits that their paths have in the module as
    transformers calls it. Raises ConfigError if chains have not. `model` has static caches, and runs eagerly."""
    with closing(_differences(model)) as differences:
        reason = next(differences)
        trees = reason is None and model.recurrence is None and next(differences) is None
    if reason == NO_LOGITS:
        raise ConfigError(f"{key} computes {NO_LOGITS}: its weights or its configuration are damaged")
    if reason is not None:
        kind = "encoder-decoder" if model.encoder else "model"
        raise ConfigError(
            f"{key} is a {type(model.module).__name__}, whose decoder does not follow the positions and masks that it "
            f"is given ({reason}): give another {kind}"
        )
    return trees


def _differences(model: LanguageModel) -> Generator[str | None, None, None]:
    """How logits along a chain, and then along the paths of a tree, differ from the stock module's, or why there are
    none; None if by rounding. Both stand behind the same two rows, which are read once."""
    # In 16 bits rounding may turn a single token to other experts, which changes its logits and no others' before it.
    exact = model.dtype == torch.float32
    try:
        text, stock = _read_rows(model)
        first = torch.tensor(STARTS, device=model.device)
        for parents, paths in ((None, CHAIN), (PARENT, PATHS)):
            tree = None if parents is None else static_tree(parents, model.device)
            found = model.forward(text.expand(len(STARTS), -1), first, TEXT, tree=tree).float()  # [2, entries, V]
            errors = _errors(model, found, stock[tree is not None], paths)
            worst = float((errors.amax(1) if exact else errors.median(1).values).max())
            limit = PLACED if exact else PLACED_16_BIT
            yield NO_LOGITS if math.isnan(worst) else None if worst <= limit else f"logits differ by {worst:.1g}"
    except IncompleteError:
        raise
    except Exception as error:  # of a module that is called as it was not meant to be
        yield first_line(error)
    finally:
        model.free()
        model.encoder = None if model.encoder is None else model.encoder.shared()


def _read_rows(model: LanguageModel) -> tuple[Tensor, list[list[Tensor]]]:
    """The tokens [1, entries] behind two rows that the model has read; and for the chain and the tree, by row, the
    stock module's logits [paths, entries, V] from one forward a row. Short paths go on there: it is causal."""
    unplaced = None if model.encoder is None else model.encoder.positions.no_position
    ids = [token % model.own_vocab_size for token in range(2, 3 + TEXT) if token != unplaced][:TEXT]
    text = torch.tensor([ids], device=model.device)
    inputs = [ids[:3], ids[2:]]  # of an encoder
    model.allocate(len(STARTS), TEXT)
    stock: list[list[Tensor]] = [[], []]
    paths = CHAIN if model.recurrence is not None else (*CHAIN, *PATHS)
    for row, start in enumerate(STARTS):
        model.encode(row, Job([], 0, 0, inputs[row]))
        model.read_row(text, row, 0, start)
        whole = [(*path, *CHAIN[0][len(path) :]) for path in paths]
        alone = torch.tensor([[*ids[:start], *(ids[entry] for entry in path)] for path in whole], device=model.device)
        logits = _plain_logits(model.module, alone, inputs[row])[:, start:]
        stock[0].append(logits[: len(CHAIN)])
        stock[1].append(logits[len(CHAIN) :, : len(PATHS[0])])
    model.cache.reserve([TEXT] * len(STARTS))
    return text[:, : len(PARENT) + 1], stock


def _errors(model: LanguageModel, found: Tensor, stock: list[Tensor], paths: Sequence[Sequence[int]]) -> Tensor:
    """[2, entries]: distances of the logits [2, entries, V] from the stock module's along all paths, as shares of the
    largest, for two rows."""
    errors = []
    for row, own in enumerate(stock):
        ours = found[row, torch.tensor(paths, device=model.device), : own.shape[-1]]
        distance = torch.where(ours.isfinite(), (ours - own).abs(), 0 if model.encoder else torch.inf)
        errors.append((distance.amax(-1) / own.abs().max()).flatten())
    return torch.stack(errors)
