"""Which pipeline rank runs which pass of which stage and micro-batch, in which order, and what crosses between stages."""
