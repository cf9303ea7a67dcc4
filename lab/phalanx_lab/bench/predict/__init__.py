"""`phalanx bench predict`: steps and recoveries, predicted and measured."""
