"""stand-in"""
import numpy as np
def positions_of(seq_len, *, cp, index):
    if cp == 1: return np.arange(seq_len)
    c = seq_len // (2 * cp)
    return np.concatenate([np.arange(index*c,(index+1)*c), np.arange((2*cp-1-index)*c,(2*cp-index)*c)])
