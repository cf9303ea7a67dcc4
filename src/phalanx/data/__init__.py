"""Text to token batches: sources, tokenizers, prepared token files, packing, and the loader that says which samples form a step.

The usual way in is `prepare.prepare(config)` and then `loader.Loader(prepared.train, ...)`.
"""
