"""What concerns the machine and not the method: files, signals, versions, command lines."""
