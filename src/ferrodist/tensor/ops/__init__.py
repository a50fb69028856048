"""What each operator does with tensors that are divided: a table, and the families that its entries are made of."""
