"""Operations of one MoE layer on GPUs that wait on flags, around the Triton programs in `programs/`."""
