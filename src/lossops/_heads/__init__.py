"""Heads: a linear layer and the loss of its rows, without a tensor of all logits."""
