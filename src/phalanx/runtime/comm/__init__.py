"""Everything that moves tensors or values between ranks: process groups, collectives, the launch of local ranks, streams and time limits."""
