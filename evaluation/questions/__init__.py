"""Question sets: where they are, what a line may look like, and how a conversation becomes a prompt."""
