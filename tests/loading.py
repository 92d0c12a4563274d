"""The shipped checkpoints are read hundreds of times in these tests: what cannot differ is found once.

`install` replaces functions for the process. A shipped tokenizer is made once, and so are the weights of a shipped
model in each dtype: a run gets copies. Whether it reads trees is asked once. Of other checkpoints, which tests make,
nothing is kept.
"""

import copy

import transformers

from specbench.models import load
from specbench.settings import SHIPPED

make_tokenizer = transformers.AutoTokenizer.from_pretrained
read_weights, ask_for_trees = load._read_weights, load.reads_trees
tokenizers, modules, answers = {}, {}, {}


def is_shipped(key: str) -> bool:
    return key.partition("=")[2].startswith("shipped:")


def tokenizer_of(pretrained_model_name_or_path, *given, **options):
    key = str(pretrained_model_name_or_path), repr((given, options))
    if not key[0].startswith(str(SHIPPED)):
        return make_tokenizer(pretrained_model_name_or_path, *given, **options)
    if key not in tokenizers:
        tokenizers[key] = make_tokenizer(pretrained_model_name_or_path, *given, **options)
    return copy.copy(tokenizers[key])


def weights_of(settings, config, options, device, key):
    if not is_shipped(key):
        return read_weights(settings, config, options, device, key)
    if (wanted := (settings.path, repr(options), str(device))) not in modules:
        modules[wanted] = read_weights(settings, config, options, device, key)
    return copy.deepcopy(modules[wanted])


def reads_trees(model, key):
    if not is_shipped(key):
        return ask_for_trees(model, key)
    if (wanted := (key.partition("=")[2], model.dtype)) not in answers:
        answers[wanted] = ask_for_trees(model, key)
    return answers[wanted]


def install() -> None:
    transformers.AutoTokenizer.from_pretrained = tokenizer_of
    load._read_weights, load.reads_trees = weights_of, reads_trees
