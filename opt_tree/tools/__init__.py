"""What is done with a decoder: load a pair, price steps, advise, prove, show."""
