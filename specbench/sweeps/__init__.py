"""Sweeps whose jobs run anywhere: the list of their jobs, what their launchers need, and the summary at their end."""
