"""How lenient the verifier is, round by round."""
