"""`phalanx bench layer`: one MoE layer by all its schedules."""
