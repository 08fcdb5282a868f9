"""Training guided by history: the database, similarity of runs, two-stage sampling, replay."""
