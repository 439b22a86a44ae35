"""What a first GPU should answer: `python -m experiments.gpu_first_light`."""
