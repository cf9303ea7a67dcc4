"""Extensions of Phalanx: one of each kind."""
