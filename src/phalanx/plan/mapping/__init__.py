"""Which rank does what: the shape of a model, the machines of a job, the two rank grids over one world (folding), pipeline stages, and where experts live."""
