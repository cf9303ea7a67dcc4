"""Parts of `phalanx plan`: placements, schedules, moves."""
