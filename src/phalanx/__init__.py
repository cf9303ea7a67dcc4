"""Phalanx trains mixture-of-experts language models. See docs/architecture.md."""
