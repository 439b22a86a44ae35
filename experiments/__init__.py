"""One-off studies: each is a command that answered one question, kept so that it can be asked again."""
