"""What is searched for: one sampled text per request, or several beams."""
