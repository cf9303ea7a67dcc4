"""Operations of a model on a CPU, each with its fast version and its plain reference.

Each operation decides by `impl` which of the two runs, and how rows are cut into pieces for lanes (`Lanes`): by shapes alone, so that results never depend on the number of threads.
"""
