"""Lenience policies: how lenient the verifier is in each round (A.5)."""
