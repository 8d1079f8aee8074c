"""What TensorFlow loops and Keras have in common: a model whose variables are not torch's, on the step engine."""
