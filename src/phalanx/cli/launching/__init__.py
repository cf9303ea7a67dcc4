"""Parts of `phalanx launch`: which way a recipe can be started on so many hosts, and the script of it."""
