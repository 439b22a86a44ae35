"""What papers add to the core, a file each: it imports the core, and nobody of the core knows it.

A family of methods has a registry, which finds a file by what it registers; importing a folder imports nothing.
"""
