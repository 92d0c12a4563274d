"""What a run gives its verdict: the configuration's own sampling, and what other texts have at the same positions."""

from dataclasses import replace

import pytest
import torch
from small_runs import parts_of, run

import specbench.run.session
from specbench.decoding.noise import prompt_key

SHORT = ("executor=eager", "data.limit=4", "max_new_tokens=32")


def test_a_target_at_another_temperature_than_the_configurations_fails(tmp_path):
    for temperature, passed in ((1.0, True), (0.7, False)):
        parts = parts_of(*SHORT)
        parts.target.sampling = replace(parts.target.sampling, temperature=temperature)
        results, _ = run(parts, tmp_path / str(temperature))
        assert (results.lossless["passed"] is not False) is passed, results.lossless


def test_one_seed_for_all_prompts_fails(tmp_path, monkeypatch):
    for name, passed in (("own", True), ("one", False)):
        if name == "one":
            monkeypatch.setattr(specbench.run.session, "prompt_key", lambda seed, _: prompt_key(seed, ""))
        results, _ = run(parts_of(*SHORT, "data.limit=8"), tmp_path / name)
        assert (results.lossless["passed"] is not False) is passed, results.lossless


@pytest.mark.parametrize("temperature", [0, 1])
def test_alpha_along_plain_decodings_text_has_the_runs_lenience(tmp_path, temperature):
    parts = parts_of(*SHORT, f"temperature={temperature}", "lenience=0.5")
    tokens = {request.id: request.tokens for request in parts.rendered.values()}
    _, records = run(parts, tmp_path)
    for record in records:
        prompt, new = tokens[record.id], record.baseline.ids
        with torch.inference_mode():
            text = torch.tensor([[*prompt, *new[:-1]]])
            p, q = (
                model.stock(text).logits[0, len(prompt) - 1 :].softmax(-1)
                for model in (parts.target, parts.drafter.models[0])
            )
        guess = q.argmax(-1, keepdim=True)
        agreed = p.gather(1, guess)[:, 0] >= 0.5 * p.amax(-1)  # at temperature 0 (A.5)
        betas = torch.minimum(p / 0.5, q).sum(-1) if temperature else agreed
        assert record.target_text["positions"] == len(new)
        assert record.target_text["beta"] == pytest.approx(float(betas.sum()), abs=0.05)
