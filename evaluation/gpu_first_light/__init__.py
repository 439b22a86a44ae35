"""What a first GPU should answer: `python -m evaluation.gpu_first_light`."""
