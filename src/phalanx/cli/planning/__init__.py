"""Parts of `phalanx plan`: placements, schedules, moves.

The rooms of `plan/` decide; what is here reads arguments, prints and draws.
"""
