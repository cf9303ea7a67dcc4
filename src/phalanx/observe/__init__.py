"""Where events go: console, files, TensorBoard. Imports core only."""
