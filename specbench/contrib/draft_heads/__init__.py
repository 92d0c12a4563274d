"""Published draft heads that read their own guesses: MLP speculators, and Arctic's LSTM."""
