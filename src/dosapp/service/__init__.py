"""A learner over HTTP that keeps learning, with a history and a way back."""
