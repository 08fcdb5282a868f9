"""History of training runs: the database, similarity of runs, stages worth learning from, retrodiction."""
