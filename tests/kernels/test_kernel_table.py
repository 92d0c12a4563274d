"""Kernels of attention for the GPUs and models that are named: none spills registers."""

import pytest

pytest.importorskip("triton")

from kernel_table import CALLS, CAPABILITIES, Shape, alike, measured, named_shapes

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
def test_wider_tiles_of_trees_spill():
    """Negative control."""
    found = measured([Shape(24, 8, 128)], (90,), WIDE_TREES)
    assert any(made.stack for made in found if made.call.tree)
    assert not any(made.stack for made in found if not made.call.tree)
