"""Operations of a model, each with its fast version and its plain reference.

Each decides by `impl` and by where its tensors lie which runs: the reference, the fast version for a CPU, or the programs of `kernels/device`; and how rows are cut into pieces: by shapes alone, so that
results never depend on the number of threads.
"""
