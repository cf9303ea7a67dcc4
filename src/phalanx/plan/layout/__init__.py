"""Who holds which box of which tensor: parameters, optimizer state, activations, and the holders of copies."""
