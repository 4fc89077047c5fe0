"""What `run.py` is made of. Standard library only, so that it starts on a machine where nothing is installed yet."""
