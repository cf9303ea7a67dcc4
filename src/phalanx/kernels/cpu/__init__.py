"""Operations of a model on a CPU, each with its fast version and its plain reference."""
