"""The tables and figures of Leviathan, Kalman, Matias 2023: printed, by the formulas, and ours."""
