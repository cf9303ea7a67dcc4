"""Parts of `phalanx simulate`, and the prediction of a recipe that other commands show too."""
