"""Scripts that `holdfast run` is given: small trainings with what makes exactness hard."""
