"""From a question set to an answer file: options, models, processes, the machine, and the loop over questions."""
