"""Figures and tables of the results, one module each. They read the tidy tables that `figures.collect` writes, and
nothing of the training system: a table that somebody else made in the same form draws just as well."""
