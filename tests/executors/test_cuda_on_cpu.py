"""The fake CUDA devices of the tests: faults that are planted in a decode are found, and indices are those of torch."""

from unittest import mock

import pytest
import torch
from choosing import slow_unless
from cuda_on_cpu import DataDependentShapeError, MixedDevicesError, cuda_on_cpu
from fake_cuda import fake_cuda, on_cuda, read_index, write_index
from fake_cuda_cases import Case, Decoder, violations
from transformers import LlamaConfig, LlamaForCausalLM

from specbench.decoding.state import State
from specbench.verifiers.speculative import SpeculativeVerifier


def planted_item(self, p, draft, noise):
    assert p.sum().item() > 0
    return TRUE_ACCEPT(self, p, draft, noise)


def planted_host_tensor(self, p, draft, noise):
    return TRUE_ACCEPT(self, p + torch.zeros(p.shape[-1]), draft, noise)


def planted_list(self, p, draft, noise):
    return TRUE_ACCEPT(self, p + torch.tensor([0.0] * p.shape[-1], device=p.device), draft, noise)


def planted_nonzero(self, p, draft, noise):
    p.nonzero()
    return TRUE_ACCEPT(self, p, draft, noise)


def planted_mask(self, p, draft, noise):
    assert p[p > 0].dim()
    return TRUE_ACCEPT(self, p, draft, noise)


TRUE_ACCEPT = SpeculativeVerifier.accept
PLACE = "decoding.speculative.accept_and_commit"


@pytest.mark.parametrize(
    ("planted", "error", "match"),
    [
        (planted_item, None, f"{PLACE} waits 1 times in a round, allowed are 0"),
        slow_unless(False, planted_list, None, f"{PLACE} waits 1 times in a round, allowed are 0"),
        (planted_host_tensor, MixedDevicesError, "tensors of both devices"),
        slow_unless(False, planted_nonzero, DataDependentShapeError, "nonzero"),
        (planted_mask, DataDependentShapeError, "index"),
    ],
)
def test_a_planted_fault_is_found(planted, error, match, number_text):
    """Negative controls: a value for the host, a list, a tensor of the host, shapes that depend on values."""
    with cuda_on_cpu() as device, mock.patch.object(SpeculativeVerifier, "accept", planted):
        decode = Decoder(Case(), device, number_text)
        if error is None:
            assert match in violations(Case(), device, decode)[0]
        else:
            with pytest.raises(error, match=match):
                decode()


def test_a_second_wait_a_round_is_found(number_text):
    """Negative control: a place of the table that waits twice."""
    true = State.read_round

    def twice(self, summary):
        true(self, summary)
        summary.tolist()

    place = "decoding.speculative.accept_and_append"  # `twice` is no function of specbench
    with cuda_on_cpu() as device, mock.patch.object(State, "read_round", twice):
        found, _ = violations(Case(), device, Decoder(Case(), device, number_text))
    assert f"{place} waits 1 times in a round, allowed are 0" in found
    with cuda_on_cpu() as device:
        decode = Decoder(Case(), device, number_text)
        wait = device.wait
        with mock.patch.object(device, "wait", lambda what: (wait(what), wait(what))):
            found, _ = violations(Case(), device, decode)
    assert "decoding.state.State.read_round waits 2 times in a round, allowed are 1" in found


def test_a_graph_that_waits_is_found(number_text):
    """Negative control: a value for the host inside of a graph."""
    with cuda_on_cpu() as device, mock.patch.object(SpeculativeVerifier, "accept", planted_item):
        decode = Decoder(Case(executor="cudagraph"), device, number_text)
        with pytest.raises(AssertionError, match="a graph waits"):
            decode()


def test_copies_from_pinned_memory_are_not_waited_for():
    with cuda_on_cpu() as device:
        pinned = torch.tensor([1, 2, 3]).pin_memory()
        assert pinned.is_pinned() and pinned[1:].to("cuda", non_blocking=True).tolist() == [2, 3]
        assert [wait.what for wait in device.waits] == ["tolist"]
        for send in (lambda: pinned.to("cuda"), lambda: torch.tensor([1]).to("cuda", non_blocking=True)):
            device.waits.clear()
            assert str(send().device) == "cuda:0" and [w.what for w in device.waits] == ["copy to the device"]


NUMBERS = torch.arange(120).reshape(2, 3, 4, 5)
PAIR = torch.tensor([0, 1])
INDICES = [
    0, -1, slice(1, None), (..., 0), (None, 0), (slice(None), None), (PAIR,), (slice(None), PAIR), (0, ..., PAIR),
    (PAIR[:, None], slice(None), PAIR), (slice(None), slice(None, None, 2), None, -1), (PAIR, PAIR, PAIR[:, None]),
    (None, PAIR, ..., slice(1, 3)), ([0, 1], slice(1, 2)), (0, PAIR), NUMBERS > 50, (slice(None), NUMBERS[0] > 50),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_without_the_guard_is_that_of_torch(index):
    assert torch.equal(read_index(NUMBERS, index), NUMBERS[index])
    ours, theirs = NUMBERS.clone(), NUMBERS.clone()
    write_index(ours, index, 7)
    theirs[index] = 7
    assert torch.equal(ours, theirs)


def test_a_model_of_any_size_runs_on_tensors_without_values():
    config = LlamaConfig(hidden_size=3072, num_hidden_layers=1, num_attention_heads=24, num_key_value_heads=8)
    with torch.inference_mode(False), fake_cuda():
        model = on_cuda(LlamaForCausalLM, config)
        logits = model(input_ids=torch.zeros(1, 6, dtype=torch.long, device="cuda")).logits
        assert (logits.shape, logits.dtype, logits.device.type) == ((1, 6, 32000), torch.bfloat16, "cuda")
        with pytest.raises(Exception, match="_local_scalar_dense"):
            logits.sum().item()
        with pytest.raises(Exception, match=r"two (different )?devices"):
            logits + torch.ones(32000)
