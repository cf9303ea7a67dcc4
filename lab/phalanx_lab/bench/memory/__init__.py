"""`phalanx bench memory`: memory promised and measured."""
