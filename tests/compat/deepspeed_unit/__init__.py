"""DeepSpeed's own unit tests, from a checkout that the user has, under the alias; see ``__main__``."""
