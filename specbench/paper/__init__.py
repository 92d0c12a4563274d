"""The paper's tables and figures: its printed numbers, its formulas', and ours beside them."""
