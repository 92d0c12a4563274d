"""Workloads: when requests arrive."""
