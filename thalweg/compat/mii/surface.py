"""The names of DeepSpeed-MII: ``surface.ini`` has each module that ``import mii`` can reach."""

from thalweg.compat.finder import Package, read_surface

MII_VERSION = "0.3.4"
SURFACE = read_surface("mii")
PACKAGE = Package("mii", "DeepSpeed-MII", "deepspeed-mii", MII_VERSION, SURFACE)
