"""Plans and predictions as text and SVG."""
