"""Kernels of attention for the GPUs and models that are named: none spills registers."""

import pytest

pytest.importorskip("triton")

from kernel_table import CALLS, CAPABILITIES, Shape, alike, in_a_process, measured, named_shapes

SHAPES = alike(named_shapes())
# Tiles of trees as they were, which spill.
WIDE_TREES = "from specbench.kernels import attention; attention.MOST_ROWS_OF_TREES = 64"


def test_every_named_model_with_plain_attention_has_a_shape():
    names = {name for own in named_shapes().values() for name in own}
    assert {"llama1b", "llama3b", "llama8b", "llama70b", "qwen7b", "qwen3_8b", "gpt2_xl", "smollm2", "stdlib"} <= names
    assert named_shapes()[Shape(16, 8, 256, 1024)] == ["gemma3_12b"] == named_shapes()[Shape(16, 8, 256)]
    assert {name for own in SHAPES.values() for name in own} == names and len(SHAPES) < len(named_shapes())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_kernel_spills(shape):
    found = measured([shape])
    assert {made.capability for made in found} == {*CAPABILITIES} and {made.call for made in found} <= {*CALLS}
    assert "attend_split" in {made.kernel for made in found}
    for made in found:
        print(made)
        assert made.stack == 0 and made.shared <= 99 * 1024, made  # the least that a program of a recent GPU may have
        assert 32 * made.warps * made.registers <= 65536, made


@pytest.mark.slow
def test_no_kernel_of_sampling_or_of_few_bits_spills():
    found = in_a_process("", "others_of_process", CAPABILITIES)
    assert {"softmax", "draw", "verdict", "product of int4"} <= {what for _, what, *_ in found}
    for kernel, what, _, _, stack, shared in found:
        assert stack == 0 and shared <= 99 * 1024, (kernel, what)


def kernels_of_rounds(rounds, change=""):
    """By call the kernels that rounds of so many rows and guesses would compile, with what they are compiled for."""
    found = {}
    for name, *kernels in in_a_process(change, "variants_of_process", rounds):
        found.setdefault(name, set()).update(kernels)
    return found


def test_one_kernel_serves_every_number_of_rows_and_guesses():
    """So that none is compiled in a timed lap. The verdict's are for N + 1 up to a power of 2; warm-up meets each N."""
    one = kernels_of_rounds([(1, 5)])
    assert kernels_of_rounds([(1, 4), (1, 6), (3, 4), (8, 7), (16, 5), (1, 0), (8, 0)]) == one and len(one) == 6
    others = kernels_of_rounds([(1, 1), (1, 15)])
    assert {name for name in one if others[name] != one[name]} == {"verdict"} and len(others["verdict"]) == 4


def test_a_kernel_for_each_number_is_seen():
    """Negative control."""
    change = "from specbench.kernels import softmax\nsoftmax._reduce.do_not_specialize.clear()"
    change += "\nfor p in softmax._reduce.params: p.__dict__['do_not_specialize'] = False"
    assert len(kernels_of_rounds([(1, 1), (8, 1)], change)["softmax"]) > len(kernels_of_rounds([(1, 1)])["softmax"])


@pytest.mark.slow
def test_wider_tiles_of_trees_spill():
    """Negative control."""
    found = measured([Shape(24, 8, 128)], (90,), WIDE_TREES)
    assert any(made.stack for made in found if made.call.tree)
    assert not any(made.stack for made in found if not made.call.tree)
