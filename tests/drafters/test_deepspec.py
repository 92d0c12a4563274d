"""The grid of DeepSpec, trained on the same data: its YAML files, and its dialect of config.json."""

import pytest
from choosing import only
from small_runs import composed

from specbench.config.compose import conf_dir
from specbench.drafters.dflash_config import parse_dflash
from specbench.drafters.eagle3_checkpoint import parse_config
from specbench.errors import ConfigError

GRID = [file.stem for file in sorted((conf_dir() / "drafter").glob("deepspec_*.yaml"))]
LAYERS = dict(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
              vocab_size=96, rms_norm_eps=1e-6, max_position_embeddings=64, model_type="qwen3",
              rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False)  # fmt: skip
BLOCK = dict(LAYERS, architectures=["Qwen3DSparkModel"], num_hidden_layers=2, num_target_layers=5, block_size=7,
             layer_types=["full_attention"] * 2, mask_token_id=3, target_layer_ids=[1, 3], num_anchors=512,
             enable_confidence_head=True, confidence_head_with_markov=True, markov_rank=4)  # fmt: skip
PAIRS = dict(LAYERS, architectures=["Qwen3Eagle3Model"], num_hidden_layers=1, num_target_layers=5, ttt_length=7,
             step_loss_decay=0.8, draft_num_hidden_layers=1, target_layer_ids=[0, 1, 2, 3, 4],
             target_model_name_or_path="Qwen/Qwen3-4B", layer_types=["full_attention"])  # fmt: skip


def test_the_grid_names_three_methods_for_three_targets():
    assert len(GRID) == 9
    for name in GRID:
        _, method, model, size = name.split("_")
        config = composed(f"drafter={name}")
        assert config.target.path == f"Qwen/Qwen3-{size.upper()}"
        assert config.drafter.path.startswith(f"deepseek-ai/{method}_{model}_{size}_")


@pytest.mark.parametrize("kind", ["vanilla", *only(["gated"], ["gated", "rnn"])])
def test_a_block_guesses_from_its_anchor_and_ids_are_of_layers_behind_which_it_reads(kind):
    config = dict(BLOCK, markov_head_type=kind)
    if kind != "vanilla":
        with pytest.raises(ConfigError, match=f"markov_head_type={kind} is not allowed: it must be one of vanilla"):
            parse_dflash(config, "Q")
        return
    found = parse_dflash(config, "Q")
    assert (found.longest, found.layers_of(5), found.options.markov_rank) == (7, (2, 4), 4)
    plain = parse_dflash({**BLOCK, "markov_rank": 0, "enable_confidence_head": False}, "Q")
    assert plain.options.markov_rank == 0 and not plain.causal_windows
    with pytest.raises(ConfigError, match="model_type"):
        parse_dflash({**BLOCK, "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "Q")


@pytest.mark.parametrize("names", [["Qwen3DSparkModel", "Other"], ["Other", "Qwen3DSparkModel"]])
def test_one_of_several_architectures_is_enough(names):
    assert parse_dflash({**BLOCK, "architectures": names}, "Q").longest == 7


@pytest.mark.parametrize("names", ["Qwen3DSparkModel", [1], {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(names):
    with pytest.raises(ConfigError, match=r"Q has architectures=.* in its config.json: it must be a list of names"):
        parse_dflash({**BLOCK, "architectures": names}, "Q")


def test_eagle3_reads_five_layers():
    found = parse_config(PAIRS, None, "Q")
    assert found.layers_of(5) == (1, 2, 3, 4, 5) and found.draft_vocab_size == 96
    with pytest.raises(ConfigError, match="ttt_lengths"):
        parse_config({**PAIRS, "ttt_lengths": 7}, None, "Q")
