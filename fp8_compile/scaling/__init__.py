"""What is known of a model between two steps: amax histories and scales, FP8 copies of weights, the loss scale."""
