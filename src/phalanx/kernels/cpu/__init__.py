"""What operations are made of on a CPU: lanes that share the work, shapes that it likes, products that are checked, sums in no order, tiles."""
