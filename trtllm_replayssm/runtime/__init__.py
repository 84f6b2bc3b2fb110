"""Running a model: the memory of its sequences, sessions, sampling, text."""
