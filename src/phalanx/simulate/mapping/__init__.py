"""Jobs and mappings on a cluster that is not here: shapes of models, degrees, stages."""
