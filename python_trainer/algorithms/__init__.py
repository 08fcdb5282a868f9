"""Advantages, losses and KL estimates: pure functions on [batch, time], the only copy of the maths."""
