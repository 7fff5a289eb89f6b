"""How many of the product's files are on the way of a request, a draft, an acceptance, and an operator's word."""
