"""What devices and links do: constants of clusters, costs of operations and collectives."""
