"""`phalanx bench transformers`: what a config.json means to us, beside what it means to the installed transformers."""
