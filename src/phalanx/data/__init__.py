"""Text in, global sample ids and packed tokens out. Imports core only."""
