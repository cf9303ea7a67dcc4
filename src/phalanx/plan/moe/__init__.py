"""How the tokens of a batch reach their experts and come back: who sends how many rows to which slot."""
